"""Use DeepSpeed on a CPU, without what it would compile there, and through accelerate, which uses it on GPUs only."""

import logging
import os
import warnings
from unittest import mock

import accelerate.state
import torch
from accelerate.utils import DistributedType

os.environ["DS_ACCELERATOR"] = "cpu"  # read on import

import deepspeed

# Tensors in shared memory, compiled when a process group is made; a killed process would leave a lock on it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.utils.logger.setLevel(logging.ERROR)
with mock.patch.object(torch, "compile", lambda function=None, **_: function or (lambda given: given)):
    import deepspeed.runtime.zero.muon.muon_optimizer  # imports half of torch's compiler, for seconds
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of names that DeepSpeed uses


def allow_deepspeed_on_cpu() -> None:
    """Let every `Accelerator` that is given a DeepSpeed plugin, or is launched for it, use it."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    accelerate.state.PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
