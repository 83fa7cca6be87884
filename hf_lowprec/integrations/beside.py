"""Models that are evaluated beside the one that is trained: a reference, a teacher, a judge.

Trainers hand them to `Accelerator.prepare_model(…, evaluation_mode=True)`. Left alone such a model computes in the
format that it happened to be loaded in, and a reference that is a copy of the trained model gives other
log-probabilities than it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_lowprec.casting import CastReport


@torch.no_grad()
def cast_beside(model: nn.Module, trained: nn.Module | None, cast: Callable[[nn.Module], CastReport]) -> CastReport:
    """Cast `model` like the trained one, and give back what loading has rounded of tensors that both have.

    TRL loads a reference in the trained model's dtype, so norms, which are FP32 in the one, arrive in 16 bits in the
    other. A tensor of `model` that the cast has widened takes the value of its namesake in `trained` if rounding is
    all that tells them apart.

    Args:
        model: not sharded yet.
        trained: the model in training, cast.
        cast: what casts in place and tells what it did.
    """
    report = cast(model)
    here, there = model.state_dict(), {} if trained is None else trained.state_dict()
    for name, loaded in report.upcast.items():
        exact, rounded = there.get(name), here.get(name)
        if exact is None or rounded is None or exact.shape != rounded.shape:
            continue
        exact = exact.to(rounded.device, torch.float32)
        if torch.equal(exact.to(loaded).float(), rounded):
            rounded.copy_(exact)
    return report


def is_evaluation(*args: Any, **kwargs: Any) -> bool:
    """Whether these arguments of `Accelerator.prepare_model`, after the model, ask for a model to evaluate."""
    return bool(kwargs.get("evaluation_mode", len(args) > 1 and args[1]))
