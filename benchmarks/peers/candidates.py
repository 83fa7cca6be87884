"""The rows of the comparison: ours in each mode, torch's, and those of the other packages that are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from hf_lowprec import AdamW

from . import optimizers
from .flash_adamw import FlashAdamW

BF16, FP32, INT8 = torch.bfloat16, torch.float32, torch.int8
BASELINE = "torch AdamW, FP32"


@dataclass(frozen=True)
class Candidate:
    """A row of the table.

    Attributes:
        name: of the row.
        build: makes the optimizer from parameters, and the options of AdamW that all packages have.
        dtype: of weights and gradients.
        package: its name on PyPI, if it is neither torch's nor ours.
        low_bits: whether it begins with the digits that the cast to BF16 rounds off.
        copied: whether it is a copy of an algorithm in torch operations, whose time says nothing of the package's.
    """

    name: str
    build: Callable[..., Optimizer]
    dtype: torch.dtype = BF16
    package: str | None = None
    low_bits: bool = False
    copied: bool = False


def _ours(mode: str, state_dtype: torch.dtype, words: str = "", **more: Any) -> Candidate:
    states = "8-bit" if state_dtype == INT8 else "BF16"
    build = partial(AdamW, rounding=mode, state_dtype=state_dtype, **more)
    return Candidate(f"hf_lowprec AdamW, {mode}{words}, {states} states", build, low_bits=mode != "stochastic")


def _without_feedback(state_dtype: torch.dtype) -> Candidate:
    return _ours("stochastic", state_dtype, " without feedback", error_feedback=False)


def _flash(name: str, **options: Any) -> Candidate:
    return Candidate(name, partial(FlashAdamW, **options), copied=True)


def _torchao_8bit(stochastic: bool) -> Candidate:
    name = f"torchao AdamW8bit, weights {'stochastic' if stochastic else 'nearest'}"
    return Candidate(name, partial(optimizers.torchao_8bit, stochastic=stochastic), package="torchao")


def _bitsandbytes_8bit(dtype: torch.dtype) -> Candidate:
    name = f"bitsandbytes AdamW8bit, {'FP32 weights' if dtype == FP32 else 'weights nearest'}"
    return Candidate(name, optimizers.bitsandbytes_8bit, dtype, package="bitsandbytes")


CANDIDATES = (
    Candidate(BASELINE, partial(torch.optim.AdamW, fused=True), FP32),
    Candidate("torch AdamW, BF16", partial(torch.optim.AdamW, fused=True)),
    _ours("kahan", BF16),
    _ours("split", BF16),
    _ours("stochastic", BF16),
    _without_feedback(BF16),
    _ours("kahan", INT8),
    _ours("split", INT8),
    _ours("stochastic", INT8),
    _without_feedback(INT8),
    Candidate("optimi AdamW, Kahan, BF16 states", optimizers.optimi_kahan, package="torch-optimi"),
    Candidate("torchao _AdamW, stochastic, BF16 states", optimizers.torchao_bf16, package="torchao"),
    _torchao_8bit(stochastic=False),
    _torchao_8bit(stochastic=True),
    _bitsandbytes_8bit(BF16),
    _bitsandbytes_8bit(FP32),
    Candidate("heavyball AdamW, stochastic, BF16 states", optimizers.heavyball_bf16, package="heavyball"),
    _flash("FlashOptim AdamW, 24 bits", bits=24),
    _flash("FlashOptim AdamW, 32 bits", bits=32),
    _flash("Unsloth adamw_flash (FlashOptim, 32 bits, no 8-bit states)", bits=32, quantize=False),
)


def installed(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates whose package is installed; a line says which are left out."""
    found = []
    for candidate in candidates:
        if candidate.package is None or optimizers.is_installed(candidate.package):
            found.append(candidate)
        else:
            print(f"{candidate.name}: left out, {candidate.package} is not installed")
    return found
