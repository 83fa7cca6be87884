"""The `eager` backend: `fused_step` on torch tensors, on any device with FP64; the reference for all others."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.fused_group import CHUNK
from hf_lowprec.optim.step.fused_step import evaluate, fused_step
from hf_lowprec.rounding.block_floats import BLOCK


class EagerStep(BackendStep):
    """Steps a fused group chunk by chunk with torch's own operations. It keeps nothing between steps.

    The largest chunk is the first: if its temporaries fit into memory, the others' do as well.
    """

    def run(self, entries: range) -> None:
        """Step some consecutive entries of the group in place."""
        group = self.fused_group
        if group.skipped:
            return
        segments = group.segments
        part = segments.of_entries(entries)
        columns = (segments.entry_index, segments.first, segments.end, segments.shift)
        rows = zip(*(column[part].tolist() for column in columns), group.segment_keys(part), strict=True)
        chunks = [
            (entry_index, slice(start, min(start + CHUNK, end)), shift, keys)
            for entry_index, first, end, shift, keys in rows
            for start in range(first, end, CHUNK)
        ]
        for chunk in sorted(chunks, key=lambda chunk: chunk[1].start - chunk[1].stop):
            self._step_chunk(*chunk)

    def _step_chunk(self, entry_index: int, chunk: slice, shift: int, keys: dict[int, tuple[int, int]]) -> None:
        """Step some elements of an entry, whose global indices are `shift` larger than those in its tensors."""
        group = self.fused_group
        entry = group.entries[entry_index]
        index = torch.arange(chunk.start + shift, chunk.stop + shift, device=group.device).to(torch.int32)
        new_weight, new_states = fused_step(group.spec, *group.elements(entry_index, chunk), index, keys)
        # The values are already representable in the storage dtype, so these copies only convert them.
        entry.weight.view(-1)[chunk].copy_(new_weight)
        for name, state in entry.states.items():
            if name in group.spec.per_block_tensors:
                state.view(-1)[chunk.start // BLOCK : chunk.stop // BLOCK].copy_(new_states[name][::BLOCK])
            else:
                state.view(-1)[chunk].copy_(new_states[name])

    def tensor_sums(self) -> Tensor:
        """Return the sums of `spec.tensor_means` over each parameter; FP64 of shape (entries, means) on its device."""
        group = self.fused_group
        formulas = group.spec.tensor_means
        sums = torch.zeros(len(group.entries), len(formulas), dtype=torch.float64, device=group.device)
        for k, entry in enumerate(group.entries):
            for start in range(0, entry.weight.numel(), CHUNK):
                chunk = slice(start, min(start + CHUNK, entry.weight.numel()))
                elements = group.elements(k, chunk)
                for column, (_, formula) in enumerate(formulas):
                    sums[k, column] += evaluate(formula, group.spec, *elements).double().sum()
        return sums
