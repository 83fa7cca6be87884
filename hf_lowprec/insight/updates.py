"""The share of an optimizer step that rounding lost.

For a sample of weights the coming step is computed twice, from the same state: the change `u` that the algorithm wants,
in FP32, and the change `Δ` of what is stored, weight plus compensation. The slope of `Δ` on `u`, `Σ u·Δ / Σ u²`, is the
share of the wanted change that arrives; one minus it is lost. Nearest rounding loses nearly all of small updates; Kahan
summation loses none; stochastic rounding loses none on average, so its value scatters around zero.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.step import Layout, fused_step
from hf_lowprec.optim.work import Rows, Work

SAMPLE = 1 << 12
"""Elements per parameter."""


@torch.no_grad()
def lost_updates(optimizer: LowPrecisionOptimizer, sample: int = SAMPLE) -> float:
    """The share of the coming step's weight changes that rounding will lose, over parameters of 16 bits.

    Call it when gradients are final, before `optimizer.step()`; nothing is changed.

    Args:
        optimizer: the optimizer about to step.
        sample: elements to look at per parameter, evenly spread.

    Returns:
        0 if everything arrives, 1 if nothing does; NaN if there is no change to store or no 16-bit parameter.
    """
    wanted_square = stored_product = 0.0
    for (layout, _), works in optimizer.next_step():
        if layout.param_dtype == torch.float32:
            continue
        keys = Rows.of(layout, works).keys(works)
        for work, key in zip(works, keys.tolist(), strict=True):
            wanted, stored = _changes(layout, work, key, sample)
            wanted_square += float(wanted.square().sum())
            stored_product += float((wanted * stored).sum())
    return 1 - stored_product / wanted_square if wanted_square else float("nan")


def _changes(layout: Layout, work: Work, keys: list[list[int]], sample: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The wanted and the stored change of a sample of one parameter, in FP64."""
    count = work.tensors[0].numel()
    index = torch.arange(0, count, max(1, count // sample), device=work.tensors[0].device)[:sample]
    weight, grad, *states = (tensor.view(-1)[index].float() for tensor in work.tensors)
    state = {stored.name: value for stored, value in zip(layout.states, states, strict=True)}
    scalars = dict(zip(layout.scalars, work.scalars, strict=True))
    key = {word: (key0, key1) for word, (key0, key1) in zip(layout.words, keys, strict=True)}
    signed = -grad if layout.maximize else grad
    wanted, _ = layout.update(
        weight, signed, SimpleNamespace(**state), SimpleNamespace(**scalars), **dict(layout.options)
    )
    new_weight, new_state = fused_step(layout, weight, grad, state, scalars, index.to(torch.int32), key)
    stored = new_weight.double() - weight.double()
    if "compensation" in state:
        stored += new_state["compensation"].double() - state["compensation"].double()
    return wanted.double(), stored
