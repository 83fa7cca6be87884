"""The share of an optimizer step that is lost in rounding.

For a sample of weights, two changes are computed from the same state: the algorithm's FP32 change `u`, and the change
`Δ` of the stored values (weight plus compensation). The slope of `Δ` on `u`, `Σ u·Δ / Σ u²`, is the share of the
algorithm's change that is stored; the rest is lost. Rounding to nearest loses nearly all of small updates; Kahan
summation loses none; stochastic rounding loses none on average, so its value scatters around zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.step.fused_group import FusedGroup
from hf_lowprec.optim.step.fused_step import algorithm_update, fused_step
from hf_lowprec.optim.step.whole_tensor_quantities import compute_tensor_means, parts_to_step

SAMPLE = 1 << 12
"""Elements per parameter."""


@torch.no_grad()
def lost_updates(optimizer: LowPrecisionOptimizer, sample: int = SAMPLE) -> float:
    """Compute the share of the coming step's weight changes that rounding will lose, over 16-bit parameters.

    Call it when gradients are final, before `optimizer.step()`. Like the step, it creates missing states, and
    converts those of another rounding mode; it changes nothing else.

    Args:
        optimizer: the optimizer about to step.
        sample: how many elements of each parameter are compared; they are evenly spaced.

    Returns:
        0 if everything is stored, 1 if nothing is; NaN if there is no change to store or no 16-bit parameter.
    """
    update_square = stored_product = 0.0
    with optimizer.plan_step() as plan:
        for fused_group in plan.fused_groups:
            fused_group.compute_scalars(optimizer.scalars)
        optimizer.clip_step(plan)
        compute_tensor_means(plan.backend_steps)
        for backend_step in plan.backend_steps:
            fused_group = backend_step.fused_group
            if fused_group.spec.param_dtype == torch.float32:
                continue
            firsts = fused_group.segments.first.tolist()
            for entries in parts_to_step(optimizer, backend_step):
                part = fused_group.segments.of_entries(entries)
                for segment, keys in enumerate(fused_group.segment_keys(part), part.start):
                    if firsts[segment] == 0:  # one segment of each parameter is a sufficient sample
                        update, stored = _changes(fused_group, segment, keys, sample)
                        update_square += float(update.square().sum())
                        stored_product += float((update * stored).sum())
    return 1 - stored_product / update_square if update_square else float("nan")


def _changes(
    fused_group: FusedGroup, segment: int, keys: dict[int, tuple[int, int]], sample: int
) -> tuple[Tensor, Tensor]:
    """The changes `u` and `Δ`, in FP64, of a sample of a segment that begins at element 0 of its parameter."""
    segments = fused_group.segments
    count, shift = int(segments.end[segment]), int(segments.shift[segment])
    taken = min(sample, count)
    positions = torch.arange(taken, device=fused_group.device) * count // taken
    elements = fused_group.elements(int(segments.entry_index[segment]), positions)
    update, _ = algorithm_update(fused_group.spec, *elements)
    new_weight, new_state = fused_step(fused_group.spec, *elements, (positions + shift).to(torch.int32), keys)
    stored = new_weight.double() - elements.weight.double()
    if "compensation" in elements.state:
        stored += new_state["compensation"].double() - elements.state["compensation"].double()
    return update.double(), stored
