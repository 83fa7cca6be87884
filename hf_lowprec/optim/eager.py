"""The `eager` backend: `fused_step` on torch tensors, on any device; the reference for every other backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_lowprec.optim.step import Layout, fused_step
from hf_lowprec.optim.work import Rows, Work

CHUNK = 1 << 22
"""Elements computed at once; bounds the FP32 temporaries at a few dozen bytes each."""


def run(layout: Layout, works: Sequence[Work]) -> None:
    """Step every parameter of `works` in place."""
    rows = Rows.of(layout, works)
    keys = rows.keys(works).tolist()
    for row, (k, first) in enumerate(zip(rows.owner, rows.first, strict=True)):
        length, first_index = int(rows.lengths[row]), int(rows.first_index[row])
        for start in range(0, length, CHUNK):
            count = min(CHUNK, length - start)
            _run_slice(layout, works[k], slice(first + start, first + start + count), first_index + start, keys[row])


def _run_slice(layout: Layout, work: Work, part: slice, first_index: int, keys: list[list[int]]) -> None:
    param, grad, *states = (tensor.view(-1)[part] for tensor in work.tensors)
    index = torch.arange(first_index, first_index + param.numel(), device=param.device).to(torch.int32)
    new_weight, new_state = fused_step(
        layout,
        param.float(),
        grad.float(),
        {stored.name: state.float() for stored, state in zip(layout.states, states, strict=True)},
        dict(zip(layout.scalars, work.scalars, strict=True)),
        index,
        {word: (key0, key1) for word, (key0, key1) in zip(layout.words, keys, strict=True)},
    )
    # Values are already representable, so these copies only change the format.
    param.copy_(new_weight)
    for stored, state in zip(layout.states, states, strict=True):
        state.copy_(new_state[stored.name])
