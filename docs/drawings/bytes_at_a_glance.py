"""Bytes per parameter of FP32 and of the recommended modes, for the first page."""

from __future__ import annotations

import functools

import torch
from bytes_per_parameter import FP32, chart
from matplotlib.figure import Figure
from style import Theme

from hf_lowprec import AdamW


def draw(theme: Theme) -> Figure:
    """A stacked bar for each."""
    ours = {
        "adamw_bf16_split": functools.partial(AdamW, rounding="split"),
        "adamw_bf16_sr": functools.partial(AdamW, rounding="stochastic"),
        "the same, int8 states": functools.partial(AdamW, rounding="stochastic", state_dtype=torch.int8),
        "and factored": functools.partial(AdamW, rounding="stochastic", state_dtype=torch.int8, factored=True),
    }
    found, ax = chart(theme, 2.8, FP32 | {label: (torch.bfloat16, make) for label, make in ours.items()})
    ax.text(11.95, 1, "remainder", color=theme.stochastic, ha="left", va="center")
    return found
