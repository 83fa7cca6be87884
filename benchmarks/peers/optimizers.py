"""The AdamW of other packages for BF16 weights, a function each; it imports its package when it is called."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from contextlib import AbstractContextManager
from importlib import metadata
from typing import Any, Literal

import torch
from torch.optim import Optimizer

Params = Iterable[torch.nn.Parameter]

MODULES = {
    "torch-optimi": "optimi",
    "torchao": "torchao",
    "flashoptim": "flashoptim",
    "bitsandbytes": "bitsandbytes",
    "heavyball": "heavyball",
}
"""Name on PyPI → name to import."""


def is_installed(package: str) -> bool:
    """Return whether a package of `MODULES` is installed."""
    return importlib.util.find_spec(MODULES[package]) is not None


def versions() -> dict[str, str]:
    """The version of each package of `MODULES`, or "not installed"."""
    return {name: metadata.version(name) if is_installed(name) else "not installed" for name in MODULES}


def run_uncompiled() -> AbstractContextManager[Any]:
    """Let this process run the steps of torchao and HeavyBall uncompiled; compiling takes up to a minute per shape.

    Returns:
        The end of its context lets them compile again.
    """
    return torch.compiler.set_stance("force_eager")


def optimi_kahan(params: Params, **options: Any) -> Optimizer:
    """BF16 states rounded to nearest, and a BF16 compensation."""
    import optimi

    return optimi.AdamW(params, kahan_sum=True, **options)


def torchao_bf16(params: Params, **options: Any) -> Optimizer:
    """BF16 states rounded to nearest, weights rounded stochastically."""
    try:
        from torchao.optim import _AdamW
    except ImportError:
        from torchao.prototype.low_bit_optim import _AdamW

    return _AdamW(params, bf16_stochastic_round=True, **options)


def heavyball_bf16(params: Params, **options: Any) -> Optimizer:
    """BF16 states and weights, both rounded stochastically."""
    import heavyball

    return heavyball.AdamW(params, storage_dtype="bfloat16", consume_grad=False, **options)


def torchao_8bit(params: Params, stochastic: bool, **options: Any) -> Optimizer:
    """States in 8 bits by a table of values, in blocks of 256, rounded to nearest.

    Args:
        params: what to step.
        stochastic: whether BF16 weights are rounded stochastically.
        options: of AdamW.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        from torchao.prototype.low_bit_optim import AdamW8bit

    return AdamW8bit(params, bf16_stochastic_round=stochastic, **options)


def flashoptim(params: Params, bits: Literal[24, 32], **options: Any) -> Optimizer:
    """States in 8 bits in groups of 32, rounded to nearest, and masters of `bits` bits. Runs on CUDA alone."""
    import flashoptim

    return flashoptim.FlashAdamW(params, master_weight_bits=bits, **options)


def bitsandbytes_8bit(params: Params, **options: Any) -> Optimizer:
    """States in 8 bits by a table of values, in blocks of 256, rounded to nearest; weights rounded to nearest."""
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params, **options)
