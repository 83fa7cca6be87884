"""Run a script (argv[2:]) whose process dies by SIGKILL halfway through writing the file named argv[1]."""

import os
import runpy
import signal
import sys

import torch

original = torch.save
victim = sys.argv[1]


def save(value, path, *args, **kwargs):
    original(value, path, *args, **kwargs)
    if str(path).endswith(victim):
        with open(path, "r+b") as file:
            file.truncate(os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)


torch.save = save
sys.argv = [sys.argv[0], *sys.argv[2:]]
runpy.run_module("hf_lowprec", run_name="__main__", alter_sys=False)
