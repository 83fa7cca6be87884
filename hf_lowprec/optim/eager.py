"""The `eager` backend: `fused_step` on torch tensors, on any device; the reference for every other backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_lowprec.optim.step import Layout, fused_step
from hf_lowprec.optim.work import Rows, Tables, Work

CHUNK = 1 << 22
"""Elements computed at once; bounds the FP32 temporaries at a few dozen bytes each."""


def run(layout: Layout, works: Sequence[Work], tables: Tables) -> None:
    """Step every parameter of `works` in place."""
    rows = Rows.of(layout, works)
    keys = rows.row_keys(layout, works)
    for row, (k, first) in enumerate(zip(rows.owner, rows.first, strict=True)):
        length, first_index = int(rows.lengths[row]), int(rows.first_index[row])
        for start in range(0, length, CHUNK):
            count = min(CHUNK, length - start)
            part = slice(first + start, first + start + count)
            device = works[k].tensors[0].device
            index = torch.arange(first_index + start, first_index + start + count, device=device).to(torch.int32)
            new_weight, new_state = fused_step(layout, *works[k].elements(layout, part), index, keys[row])
            # Values are already representable, so these copies only change the format.
            param, _, *states = (tensor.view(-1)[part] for tensor in works[k].tensors)
            param.copy_(new_weight)
            for stored, state in zip(layout.states, states, strict=True):
                state.copy_(new_state[stored.name])
