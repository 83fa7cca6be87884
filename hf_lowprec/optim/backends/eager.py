"""The `eager` backend: `fused_step` on torch tensors, on any device; the reference for every other backend."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_lowprec.optim.step.fused import evaluate, fused_step
from hf_lowprec.optim.step.fused_group import FusedGroup

CHUNK = 1 << 22
"""Elements computed at once; bounds the FP32 temporaries at a few dozen bytes each."""


def run(fused_group: FusedGroup) -> None:
    """Step every parameter of `fused_group` in place."""
    if fused_group.skipped:
        return
    segments = fused_group.segments
    columns = (column.tolist() for column in (segments.entry_index, segments.first, segments.end, segments.shift))
    for entry, first, end, shift, keys in zip(*columns, fused_group.segment_keys(), strict=True):
        for start in range(first, end, CHUNK):
            part = slice(start, min(start + CHUNK, end))
            index = torch.arange(part.start + shift, part.stop + shift, device=fused_group.device).to(torch.int32)
            elements = fused_group.elements(entry, part)
            new_weight, new_state = fused_step(fused_group.spec, *elements, index, keys)
            # Values are already representable, so these copies only change the format.
            param, *states = (tensor.view(-1)[part] for tensor in fused_group.entries[entry].written)
            param.copy_(new_weight)
            for stored, state in zip(fused_group.spec.states, states, strict=True):
                state.copy_(new_state[stored.name])


def tensor_sums(fused_group: FusedGroup) -> Tensor:
    """The sums of the `tensor_mean` formula over each parameter of `fused_group`; FP64 of shape (entries) on its device."""
    formula = fused_group.spec.tensor_mean
    assert formula is not None
    sums = torch.zeros(len(fused_group.entries), dtype=torch.float64, device=fused_group.device)
    for k, entry in enumerate(fused_group.entries):
        for start in range(0, entry.written[0].numel(), CHUNK):
            values = evaluate(formula, fused_group.spec, *fused_group.elements(k, slice(start, start + CHUNK)))
            sums[k] += values.double().sum()
    return sums
