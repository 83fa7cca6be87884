"""Imports of the scripts: the fork server makes them once, so that no script has to."""
# ruff: noqa: E402

import contextlib
import gc

gc.disable()  # it would take a fifth of the time of the imports, whose objects all stay

import accelerate.utils  # noqa: F401
import torch
import torch.distributed.checkpoint
from torch.distributed.fsdp import fully_shard  # noqa: F401
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: F401

import hf_lowprec.integrations  # noqa: F401
import tests.support.processes.ranks

with contextlib.suppress(ImportError):  # it is optional
    import tests.support.processes.deepspeed_on_cpu  # noqa: F401

torch.set_num_threads(1)  # ranks share few cores
gc.enable()
gc.freeze()  # scripts' collections neither visit nor copy what was imported
