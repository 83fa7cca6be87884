"""`hf-lowprec doctor` on several ranks; with the word `broken` gradients are summed in their own dtype."""

import sys

import torch

from hf_lowprec.cli import app
from hf_lowprec.reduction import ddp


def mean_in_bfloat16(received: torch.Tensor, ranks: int, out: torch.Tensor) -> None:
    out.zero_()
    for gradient in received:  # torch.sum would add up in FP32
        out += gradient / ranks


if "broken" in sys.argv:
    ddp.mean_in_rank_order = mean_in_bfloat16
app(["doctor"])
