"""What measurements give reason to warn of, each as a sentence with its remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_lowprec.monitor.step_precision import StepPrecision


@dataclass(frozen=True)
class Finding:
    code: str
    message: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Evidence:
    optimizer: torch.optim.Optimizer
    model: nn.Module | None
    precision: StepPrecision
    dtypes: Sequence[torch.dtype]
    measurements: int
    without_gradient: Sequence[str]


def find(evidence: Evidence) -> list[Finding]:
    return []
