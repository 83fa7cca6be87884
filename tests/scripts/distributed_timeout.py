"""Run hf_lowprec's command line (argv[2:]) where a collective gives up after argv[1] seconds.

`TrainingArguments(ddp_timeout=…)` would be the way to say so, but transformers drops it where `use_cpu` is set.
"""

import functools
import runpy
import sys
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group = functools.partial(dist.init_process_group, timeout=timedelta(seconds=int(sys.argv[1])))
sys.argv = [sys.argv[0], *sys.argv[2:]]
runpy.run_module("hf_lowprec", run_name="__main__", alter_sys=False)
