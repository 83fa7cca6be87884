"""`hf-lowprec doctor` on several ranks, with something broken by a word on the command line.

Then only the checks that ranks do together run.
"""

import os
import sys

import torch

from hf_lowprec.reduction import ddp
from hf_lowprec.tools import machine_checks as checks
from hf_lowprec.tools.cli import app

WORD, RANK = sys.argv[-1], os.environ["RANK"]


def mean_in_bfloat16(received: torch.Tensor, ranks: int, out: torch.Tensor) -> None:
    out.zero_()
    for gradient in received:  # torch.sum would add up in FP32
        out += gradient / ranks


def gather_otherwise(output: torch.Tensor, part: torch.Tensor, **options: object) -> object:
    work = gather(output, part, **options)
    work.wait()
    output[0] += 1
    return work


def fail() -> None:
    raise RuntimeError(f"out of memory, says rank {RANK}")


gather = ddp.all_gather
if WORD in ("broken", "differs", "alone"):
    for check in ("packages", "names", "steps"):
        del checks.CHECKS[check]
if WORD == "broken":
    ddp.mean_in_rank_order = mean_in_bfloat16
if WORD == "differs" and RANK == "1":
    ddp.all_gather = gather_otherwise
if WORD == "alone" and RANK == "1":
    checks._train = fail
app(["doctor"])
