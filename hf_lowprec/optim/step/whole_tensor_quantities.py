"""Compute the mean or the orthogonalized matrix of whole tensors that some algorithms need before the fused step.

A sharded tensor counts as one: sums are taken over all its shards, and every rank orthogonalizes the full matrix, which
takes no further communication and gives all of them the same bits.

Matrices are orthogonalized and stepped one after the other, so that a step never holds those of a whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm_interface import Algorithm, Formula, ParamGroup
from hf_lowprec.optim.sharding import full_tensor, is_sharded, shard_like, sum_over_shards
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.fused_group import CHUNK, FusedGroup, LrScales
from hf_lowprec.optim.step.fused_step import momentum_matrix
from hf_lowprec.optim.step.param_entry import ParamEntry

_BATCH = 1 << 18
"""Elements of small matrices that are orthogonalized together: four or more. Batches of larger ones save no time."""
_CPU_CHUNK = 1 << 17
"""Elements of which a CPU computes the momentum matrix at once: the FP32 values of more do not fit into its caches."""
_SLOT_ALIGNMENT = 128
"""Elements; 256 bytes, as torch's allocators align memory."""


class MatrixAlgorithm(Protocol):
    """An algorithm whose `update` takes `state.orthogonalized` and multiplies it by `scalars.lr_scale`.

    Attributes:
        momentum_matrix: the elementwise formula of the matrix that is orthogonalized; takes the arguments of `update`
            except for the weight.
    """

    momentum_matrix: Formula

    def orthogonalize(self, group: ParamGroup, matrix: Tensor) -> Tensor:
        """The orthogonalized `matrix`, which is BF16 and has the shape of the full parameter; of the same shape."""

    def batch_keeps_bits(self, count: int, shape: torch.Size, device: torch.device) -> bool:
        """Return whether `count` matrices of `shape` are orthogonalized to the same bits as a stack and one by one."""

    def lr_scale(self, group: ParamGroup, shape: torch.Size) -> float:
        """The factor of the learning rate for a parameter of `shape`."""


def compute_tensor_means(backend_steps: Iterable[BackendStep]) -> None:
    """Give every fused group the means that its formula needs, for the coming step.

    Called after gradients, scalars and the clip factor of the step are set, since the formulas use them.
    """
    for backend_step in backend_steps:
        fused_group = backend_step.fused_group
        if fused_group.spec.tensor_means:
            sums = sum_over_shards(backend_step.tensor_sums(), fused_group.sharding)
            fused_group.per_param_scalars = (sums / fused_group.full_sizes[:, None]).float()


def parts_to_step(optimizer: Algorithm, backend_step: BackendStep) -> Iterator[range]:
    """Yield the entries of a fused group in parts, each of which must be stepped before the next one is asked for.

    A group that orthogonalizes yields one matrix at a time, or several small ones with at most `CHUNK` elements, after
    it has computed the orthogonalized matrices of these entries; the next part overwrites them. Other groups yield all
    entries at once. Called after `compute_tensor_means`.
    """
    fused_group = backend_step.fused_group
    if not fused_group.spec.orthogonalizes:
        yield range(len(fused_group.entries))
        return
    algorithm = cast(MatrixAlgorithm, optimizer)
    parts = _parts(fused_group)
    fused_group.per_param_scalars = _lr_scales(algorithm, fused_group)
    fused_group.matrix_slots = slots = _matrix_slots(fused_group, parts)
    backend_step.release_tables()  # they may hold no addresses of these slots yet
    for part in parts:
        for k in part:
            _compute_momentum_matrix(slots[k], algorithm, fused_group, k)
        for batch in _batches(fused_group, part):
            _orthogonalize([slots[k] for k in batch], algorithm, [fused_group.entries[k] for k in batch])
        for k in part:
            fused_group.entries[k].orthogonalized = slots[k]
        yield part
        for k in part:
            fused_group.entries[k].orthogonalized = None
    fused_group.matrix_slots = None


def _parts(fused_group: FusedGroup) -> list[range]:
    """Consecutive entries with at most `CHUNK` elements together, or single ones with more; the same on all ranks.

    The part with the largest matrix comes first: if its temporaries fit into memory, those of the others do as well, so
    running out of memory leaves all weights of the group unchanged.
    """
    sizes = [entry.param.numel() for entry in fused_group.entries]
    parts, first, total = [], 0, 0
    for k, size in enumerate(sizes):
        if k > first and total + size > CHUNK:
            parts.append(range(first, k))
            first, total = k, 0
        total += size
    parts.append(range(first, len(sizes)))
    return sorted(parts, key=lambda part: max(sizes[k] for k in part), reverse=True)


def _matrix_slots(fused_group: FusedGroup, parts: Sequence[range]) -> list[Tensor]:
    """Uninitialized BF16 tensors of the shapes of the entries' weights; different parts share their memory."""
    weights = fused_group.weights
    offsets, ends = [0] * len(weights), [0]
    for part in parts:
        end = 0
        for k in part:
            offsets[k] = end
            end += -(-weights[k].numel() // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        ends.append(end)
    memory = torch.empty(max(ends), dtype=torch.bfloat16, device=fused_group.device)
    return [
        memory[offset : offset + weight.numel()].view(weight.shape)
        for offset, weight in zip(offsets, weights, strict=True)
    ]


def _lr_scales(algorithm: MatrixAlgorithm, fused_group: FusedGroup) -> Tensor:
    """`lr_scale` of each entry, FP32 of shape (entries, 1) on the group's device; sent there when one has changed."""
    values = [algorithm.lr_scale(entry.group, entry.param.shape) for entry in fused_group.entries]
    if fused_group.lr_scales is None or fused_group.lr_scales.values != values:
        column = torch.tensor(values, dtype=torch.float32, device=fused_group.device)[:, None]
        fused_group.lr_scales = LrScales(values, column)
    return fused_group.lr_scales.column


def _compute_momentum_matrix(slot: Tensor, algorithm: MatrixAlgorithm, fused_group: FusedGroup, k: int) -> None:
    """Write this rank's part of what is orthogonalized for entry number `k` into `slot`."""
    size = min(CHUNK, _CPU_CHUNK) if slot.device.type == "cpu" else CHUNK
    for start in range(0, slot.numel(), size):
        chunk = slice(start, start + size)
        elements = fused_group.elements_without_weight(k, chunk)
        slot.view(-1)[chunk] = momentum_matrix(algorithm.momentum_matrix, fused_group.spec, *elements)


def _batches(fused_group: FusedGroup, part: range) -> list[list[int]]:
    """The entries of a part in batches: small matrices of the same shape and parameter group, or single entries.

    They are the same on all ranks, which gather their matrices in this order.
    """
    batches: list[list[int]] = []
    last: dict[tuple[int, torch.Size], list[int]] = {}
    for k in part:
        entry = fused_group.entries[k]
        key, size = (id(entry.group), entry.param.shape), entry.param.numel()
        batch = last.get(key)
        alone = entry.param.ndim > 2 or not 0 < 4 * size <= _BATCH
        if batch is None or alone or (len(batch) + 1) * size > _BATCH:
            last[key] = batch = []
            batches.append(batch)
        batch.append(k)
    return batches


def _orthogonalize(slots: list[Tensor], algorithm: MatrixAlgorithm, entries: list[ParamEntry]) -> None:
    """Replace this rank's parts of the matrices of a batch, in `slots`, by those of the orthogonalized matrices."""
    group, shape, count = entries[0].group, entries[0].param.shape, len(entries)
    fulls = [full_tensor(slot, entry.param) for slot, entry in zip(slots, entries, strict=True)]
    if count > 1 and algorithm.batch_keeps_bits(count, shape, slots[0].device):
        results: Iterable[Tensor] = algorithm.orthogonalize(group, torch.stack(fulls))
    else:
        results = (algorithm.orthogonalize(group, full) for full in fulls)
    for slot, entry, result in zip(slots, entries, results, strict=True):
        slot.copy_(shard_like(result, entry.param) if is_sharded(entry.param) else result)
