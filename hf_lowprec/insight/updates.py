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
from hf_lowprec.optim.batch import Batch
from hf_lowprec.optim.step import fused_step, wanted_update

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
        for batch in plan.batches:
            if batch.layout.param_dtype == torch.float32:
                continue
            firsts = batch.rows.first.tolist()
            for row, keys in enumerate(batch.row_keys()):
                if firsts[row] == 0:  # one row of each parameter is sample enough
                    wanted, stored = _changes(batch, row, keys, sample)
                    wanted_square += float(wanted.square().sum())
                    stored_product += float((wanted * stored).sum())
    return 1 - stored_product / wanted_square if wanted_square else float("nan")


def _changes(batch: Batch, row: int, keys: dict[int, tuple[int, int]], sample: int) -> tuple[Tensor, Tensor]:
    """The wanted and the stored change of a sample of one row's elements, in FP64."""
    count, shift = int(batch.rows.end[row]), int(batch.rows.shift[row])  # its elements begin at 0
    taken = min(sample, count)
    place = torch.arange(taken, device=batch.device) * count // taken
    elements = batch.elements(int(batch.rows.owner[row]), place)
    wanted, _ = wanted_update(batch.layout, *elements)
    new_weight, new_state = fused_step(batch.layout, *elements, (place + shift).to(torch.int32), keys)
    stored = new_weight.double() - elements.weight.double()
    if "compensation" in elements.state:
        stored += new_state["compensation"].double() - elements.state["compensation"].double()
    return wanted.double(), stored
