"""The optimizers that are measured: ours in each mode, torch's, and those of other packages that are installed.

All of them get the same hyperparameters. Every tensor of a model is BF16 for the BF16 ones, norms included, and FP32
for the FP32 one: a single layout, which all of them can step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from peers import optimizers as peers

from gpu.device import Device
from hf_lowprec import AdamW
from hf_lowprec.optim.backends.triton import launch

BF16, FP32 = torch.bfloat16, torch.float32
COMMON: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
IN_8_BITS = {"state_dtype": torch.int8}
LIMITED = ", 96 registers"
"""At the end of modes whose kernel of whole chunks has at most so many for each thread: an experiment."""
MODES: dict[str, dict[str, Any]] = {
    "split": {"rounding": "split"},
    "stochastic": {"rounding": "stochastic"},
    "kahan": {"rounding": "kahan"},
    "nearest": {"rounding": "nearest"},
    "split, 8-bit states": {"rounding": "split", **IN_8_BITS},
    "stochastic, 8-bit states": {"rounding": "stochastic", **IN_8_BITS},
}
MODES |= {mode + LIMITED: options for mode, options in MODES.items() if mode.endswith("8-bit states")}
"""The options of our AdamW in each mode."""
BYTES = {"split": 18, "stochastic": 14, "kahan": 18, "nearest": 14}
BYTES |= {"split, 8-bit states": 14.125, "stochastic, 8-bit states": 10.125}
BYTES |= {mode: BYTES[mode.removesuffix(LIMITED)] for mode in MODES if mode.endswith(LIMITED)}
"""Read and written per parameter in each mode: weight, gradient and states."""
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
        mode: its key in `MODES`, if it is ours.
        package: the distribution it comes from, if it is not torch or ours.
        patience: seconds for its first measurement, which may compile.
        trial_seconds: what a trial in a process of its own may take, see `trial.py`; None: it needs none.
    """

    name: str
    dtype: torch.dtype
    bytes: float
    build: Build
    mode: str | None = None
    package: str | None = None
    patience: float = 60
    trial_seconds: float | None = None


def our_backend(device: Device) -> str:
    """The kernel on a GPU; in a rehearsal the kernel too if it can be interpreted."""
    if not device.rehearsal or os.environ.get("TRITON_INTERPRET") == "1":
        return "triton"
    return "auto"


class LimitedAdamW(AdamW):
    """Our AdamW for modes that end in `LIMITED`; on a CPU, it is the same as any other."""

    def step(self, closure: Any = None) -> Any:
        with mock.patch.object(launch, "_kernel_options", _limited):
            return super().step(closure)


_kernel_options = launch._kernel_options


def _limited(spec: Any, device: torch.device) -> Any:
    options = _kernel_options(spec, device)
    return options._replace(step=options.step | ({"maxnreg": 96} if device.type == "cuda" else {}))


def our_adamw(params: list[torch.nn.Parameter], mode: str, backend: str) -> AdamW:
    """Our AdamW in a mode of `MODES`."""
    made = LimitedAdamW if mode.endswith(LIMITED) else AdamW
    return made(params, **COMMON, **MODES[mode], backend=backend)


def ours(mode: str, device: Device) -> Candidate:
    build = partial(our_adamw, mode=mode, backend=our_backend(device))
    return Candidate(f"hf_lowprec AdamW, {mode}", BF16, BYTES[mode], build, mode=mode)


def _torch(**options: bool) -> Build:
    return lambda params: torch.optim.AdamW(params, **COMMON, **options)


def _peer(build: Callable[..., torch.optim.Optimizer], **options: Any) -> Build:
    return partial(build, **COMMON, **options)


def candidates(device: Device) -> list[Candidate]:
    """All candidates, the most informative ones first, because time may run out."""
    others = [mode for mode in MODES if mode not in ("split", "kahan", "stochastic")]
    return [
        ours("split", device),
        ours("kahan", device),
        Candidate(BASELINE, FP32, 28, _torch(fused=True)),
        ours("stochastic", device),
        *(ours(mode, device) for mode in others if not mode.endswith(LIMITED)),
        Candidate("torch AdamW, BF16, fused", BF16, 14, _torch(fused=True)),
        Candidate(
            "optimi AdamW, BF16, Kahan, Triton", BF16, 18, _peer(peers.optimi_kahan, triton=True, foreach=False),
            package="torch-optimi",
        ),
        # Two moments in 8 bits with a 16-bit scale per 32; the correction of the weight has 8 bits.
        Candidate("flashoptim AdamW, 24 bits", BF16, 12.25, _peer(peers.flashoptim, bits=24), package="flashoptim"),
        # Compiles a kernel per shape in its first step.
        Candidate(
            "torchao AdamW, stochastic", BF16, 14, _peer(peers.torchao_bf16), package="torchao", trial_seconds=110
        ),
        *(ours(mode, device) for mode in others if mode.endswith(LIMITED)),
    ]  # fmt: skip


def installed(found: list[Candidate]) -> tuple[list[Candidate], dict[str, str]]:
    """The candidates whose package is installed, and the versions of the packages."""
    chosen = [candidate for candidate in found if candidate.package is None or peers.is_installed(candidate.package)]
    return chosen, peers.versions()
