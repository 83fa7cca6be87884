"""The share of an optimizer step that rounding lost.

For a sample of weights the coming step is computed twice, from the same state: the change `u` that the algorithm wants,
in FP32, and the change `Δ` of what is stored, weight plus compensation. The slope of `Δ` on `u`, `Σ u·Δ / Σ u²`, is the
share of the wanted change that arrives; one minus it is lost. Nearest rounding loses nearly all of small updates; Kahan
summation loses none; stochastic rounding loses none on average, so its value scatters around zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.step.fused import fused_step, wanted_update
from hf_lowprec.optim.step.fused_group import FusedGroup

SAMPLE = 1 << 12
"""Elements per parameter."""


@torch.no_grad()
def lost_updates(optimizer: LowPrecisionOptimizer, sample: int = SAMPLE) -> float:
    """The share of the coming step's weight changes that rounding will lose, over parameters of 16 bits.

    Call it when gradients are final, before `optimizer.step()`; states that do not exist yet are created, as the step
    would, and nothing else is changed.

    Args:
        optimizer: the optimizer about to step.
        sample: elements to look at per parameter, evenly spread.

    Returns:
        0 if everything arrives, 1 if nothing does; NaN if there is no change to store or no 16-bit parameter.
    """
    wanted_square = stored_product = 0.0
    with optimizer.next_step() as plan:
        for fused_group in plan.fused_groups:
            if fused_group.spec.param_dtype == torch.float32:
                continue
            firsts = fused_group.segments.first.tolist()
            for segment, keys in enumerate(fused_group.segment_keys()):
                if firsts[segment] == 0:  # one segment of each parameter is sample enough
                    wanted, stored = _changes(fused_group, segment, keys, sample)
                    wanted_square += float(wanted.square().sum())
                    stored_product += float((wanted * stored).sum())
    return 1 - stored_product / wanted_square if wanted_square else float("nan")


def _changes(
    fused_group: FusedGroup, segment: int, keys: dict[int, tuple[int, int]], sample: int
) -> tuple[Tensor, Tensor]:
    """The wanted and the stored change of a sample of one segment's elements, in FP64."""
    count, shift = (
        int(fused_group.segments.end[segment]),
        int(fused_group.segments.shift[segment]),
    )  # its elements begin at 0
    taken = min(sample, count)
    place = torch.arange(taken, device=fused_group.device) * count // taken
    elements = fused_group.elements(int(fused_group.segments.entry_index[segment]), place)
    wanted, _ = wanted_update(fused_group.spec, *elements)
    new_weight, new_state = fused_step(fused_group.spec, *elements, (place + shift).to(torch.int32), keys)
    stored = new_weight.double() - elements.weight.double()
    if "compensation" in elements.state:
        stored += new_state["compensation"].double() - elements.state["compensation"].double()
    return wanted.double(), stored
