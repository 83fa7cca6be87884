"""Run the script named first as `accelerate launch` would on GPUs, FSDP included, on a CPU."""

import os
import runpy
import sys

from accelerate import PartialState

from tests.support.processes.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.support.processes.ranks import leave

os.environ["ACCELERATE_USE_CPU"] = "true"
allow_fsdp_on_cpu()
PartialState(cpu=True)  # before anything asks for it without saying that there is no GPU, which would be one process
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))  # as `python SCRIPT` does
runpy.run_path(sys.argv[0], run_name="__main__")
leave()
