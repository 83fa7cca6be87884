"""The `eager` backend: `fused_step` on torch tensors, on any device; the reference for every other backend."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_lowprec.optim.batch import Batch
from hf_lowprec.optim.step import evaluate, fused_step

CHUNK = 1 << 22
"""Elements computed at once; bounds the FP32 temporaries at a few dozen bytes each."""


def run(batch: Batch) -> None:
    """Step every parameter of `batch` in place."""
    if batch.skipped:
        return
    rows = batch.rows
    columns = (column.tolist() for column in (rows.owner, rows.first, rows.end, rows.shift))
    for work, first, end, shift, keys in zip(*columns, batch.row_keys(), strict=True):
        for start in range(first, end, CHUNK):
            part = slice(start, min(start + CHUNK, end))
            index = torch.arange(part.start + shift, part.stop + shift, device=batch.device).to(torch.int32)
            elements = batch.elements(work, part)
            new_weight, new_state = fused_step(batch.layout, *elements, index, keys)
            # Values are already representable, so these copies only change the format.
            param, *states = (tensor.view(-1)[part] for tensor in batch.works[work].written)
            param.copy_(new_weight)
            for stored, state in zip(batch.layout.states, states, strict=True):
                state.copy_(new_state[stored.name])


def measure(batch: Batch) -> Tensor:
    """The sums of the algorithm's measure over each parameter of `batch`; FP64 of shape (works) on its device."""
    formula = batch.layout.measure
    assert formula is not None
    sums = torch.zeros(len(batch.works), dtype=torch.float64, device=batch.device)
    for k, work in enumerate(batch.works):
        for start in range(0, work.written[0].numel(), CHUNK):
            values = evaluate(formula, batch.layout, *batch.elements(k, slice(start, start + CHUNK)))
            sums[k] += values.double().sum()
    return sums
