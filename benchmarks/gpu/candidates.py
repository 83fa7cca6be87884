"""The optimizers that are measured: ours in each mode, torch's, and those of other packages that are installed.

All of them get the same hyperparameters. Every tensor of a model is BF16 for the BF16 ones, norms included, and FP32
for the FP32 one: a single layout, which all of them can step.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from gpu.device import Device
from hf_lowprec import AdamW

BF16, FP32 = torch.bfloat16, torch.float32
COMMON: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MODES = ("kahan", "split", "stochastic", "nearest")
BASELINE = "torch AdamW, FP32, fused"
Build = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Candidate:
    """A row of the table.

    Attributes:
        name: of the row.
        dtype: of weights and gradients.
        bytes: read and written per parameter: weight, gradient and states, each as it is stored.
        build: makes the optimizer.
        mode: our rounding mode, if it is ours.
        package: the distribution it comes from, if it is not torch or ours.
        patience: seconds for its first measurement, which may compile.
    """

    name: str
    dtype: torch.dtype
    bytes: float
    build: Build
    mode: str | None = None
    package: str | None = None
    patience: float = 60


def our_name(mode: str) -> str:
    return f"hf_lowprec AdamW, {mode}"


def our_backend(device: Device) -> str:
    """The kernel on a GPU; in a rehearsal the kernel too if it can be interpreted."""
    if not device.rehearsal or os.environ.get("TRITON_INTERPRET") == "1":
        return "triton"
    return "auto"


def ours(mode: str, device: Device) -> Candidate:
    backend = our_backend(device)
    return Candidate(
        our_name(mode),
        BF16,
        18 if mode in ("kahan", "split") else 14,
        lambda params: AdamW(params, **COMMON, rounding=mode, backend=backend),
        mode=mode,
    )


def _torch(**options: bool) -> Build:
    return lambda params: torch.optim.AdamW(params, **COMMON, **options)


def _optimi(kind: str) -> Build:
    def build(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        import optimi

        # Older releases have no Triton, newer ones would choose it over foreach.
        known = inspect.signature(optimi.AdamW).parameters
        options = {name: name == kind for name in ("triton", "foreach") if name in known}
        if kind not in options:
            raise ValueError(f"optimi {metadata.version('torch-optimi')} has no {kind} implementation")
        return optimi.AdamW(params, **COMMON, kahan_sum=True, **options)

    return build


def _flashoptim(bits: int) -> Build:
    def build(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        import flashoptim

        return flashoptim.FlashAdamW(params, **COMMON, master_weight_bits=bits)

    return build


def _torchao(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    try:
        from torchao.optim import _AdamW
    except ImportError:
        from torchao.prototype.low_bit_optim import _AdamW

    return _AdamW(params, **COMMON, bf16_stochastic_round=True)


def candidates(device: Device) -> list[Candidate]:
    """All candidates, the most informative ones first, because time may run out."""
    return [
        ours("kahan", device),
        ours("split", device),
        Candidate(BASELINE, FP32, 28, _torch(fused=True)),
        ours("stochastic", device),
        ours("nearest", device),
        Candidate("torch AdamW, BF16, fused", BF16, 14, _torch(fused=True)),
        Candidate("optimi AdamW, BF16, Kahan, Triton", BF16, 18, _optimi("triton"), package="torch-optimi"),
        # Two moments in 8 bits with a 16-bit scale per 32; the correction of the weight has 8 or 16 bits.
        Candidate("flashoptim AdamW, 24 bits", BF16, 12.25, _flashoptim(24), package="flashoptim"),
        Candidate("flashoptim AdamW, 32 bits", BF16, 14.25, _flashoptim(32), package="flashoptim"),
        Candidate("torch AdamW, BF16, foreach", BF16, 14, _torch(foreach=True)),
        Candidate("optimi AdamW, BF16, Kahan, foreach", BF16, 18, _optimi("foreach"), package="torch-optimi"),
        # Compiles a kernel per shape in its first step.
        Candidate("torchao AdamW, stochastic", BF16, 14, _torchao, package="torchao", patience=110),
    ]


_MODULES = {"torch-optimi": "optimi", "flashoptim": "flashoptim", "torchao": "torchao"}


def installed(found: list[Candidate]) -> tuple[list[Candidate], dict[str, str]]:
    """The candidates whose package is installed, and the versions of the packages."""
    versions, missing = {}, set()
    for package, module in _MODULES.items():
        if importlib.util.find_spec(module) is None:
            missing.add(package)
            versions[package] = "not installed, left out"
        else:
            versions[package] = metadata.version(package)
    return [candidate for candidate in found if candidate.package not in missing], versions
