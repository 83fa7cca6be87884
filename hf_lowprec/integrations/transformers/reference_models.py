"""Casts models that are evaluated alongside the trained one, such as a reference, a teacher or a judge.

Trainers pass them to `Accelerator.prepare_model(…, evaluation_mode=True)`. Without a cast, such a model computes in the
dtype in which it was loaded, and a reference that is a copy of the trained model gives different log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hf_lowprec.casting import CastReport


@torch.no_grad()
def cast_like_trained(
    model: nn.Module, trained: nn.Module | None, cast: Callable[[nn.Module], CastReport]
) -> CastReport:
    """Cast `model`, and restore the tensors that loading has rounded but the trained model has in full precision.

    TRL loads a reference in the trained model's dtype, so norms, which are FP32 in the trained model, arrive in 16 bits
    in the reference. A tensor of `model` that the cast has upcast takes the value of the tensor with the same name in
    `trained` if the two differ only by rounding.

    Args:
        model: the model to cast, not sharded yet.
        trained: the model being trained, already cast; None if there is none.
        cast: a function that casts a model in place.

    Returns:
        The report of `cast`.
    """
    report = cast(model)
    tensors, exact_tensors = model.state_dict(), {} if trained is None else trained.state_dict()
    for name, loaded_dtype in report.upcast.items():
        exact, rounded = exact_tensors.get(name), tensors.get(name)
        if exact is None or rounded is None or exact.shape != rounded.shape:
            continue
        exact = exact.to(rounded.device, torch.float32)
        if torch.equal(exact.to(loaded_dtype).float(), rounded):
            rounded.copy_(exact)
    return report
