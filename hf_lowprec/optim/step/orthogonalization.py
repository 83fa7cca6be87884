"""Orthogonalize the momentum of matrices before the fused step takes them.

Matrices are orthogonalized and stepped in parts, one after the other, so that a step never holds the orthogonalized
matrices of a whole model. Ranks share the work (`matrix_owners.py`): the owner of a matrix sends the others the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm_interface import Algorithm, Formula, ParamGroup
from hf_lowprec.optim.sharding import flat_part, full_shape, replicas_of
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.fused_group import CHUNK, FusedGroup
from hf_lowprec.optim.step.fused_step import momentum_matrix
from hf_lowprec.optim.step.matrix_owners import MatrixOwners
from hf_lowprec.optim.step.sharing_ranks import ranks_that_share
from hf_lowprec.optim.step.whole_tensor_quantities import chunk_size

_BATCH = 1 << 18
"""The most elements in a batch of small matrices, four or more. Batches of larger matrices save no time."""
_SLOT_ALIGNMENT = 128
"""The alignment of slots in elements: 256 bytes, as torch's allocators align memory."""


class MatrixAlgorithm(Protocol):
    """An algorithm whose `update` takes `state.orthogonalized` and multiplies it by `scalars.lr_scale`.

    Attributes:
        momentum_matrix: the elementwise formula of the matrix to orthogonalize; takes the arguments of `update` except
            for the weight.
    """

    momentum_matrix: Formula

    def orthogonalize(self, group: ParamGroup, matrix: Tensor) -> Tensor:
        """Orthogonalize `matrix`, which is BF16 and has the shape of the full parameter; return the same shape."""

    def batch_keeps_bits(self, count: int, shape: torch.Size, device: torch.device) -> bool:
        """Return whether `count` matrices of `shape` get the same bits as a stack and one by one."""

    def matrices_at_once(self, shape: torch.Size, device: torch.device) -> int:
        """Return how many matrices of `shape` in a stack are orthogonalized at once, independently of all others."""

    def lr_scale(self, group: ParamGroup, shape: torch.Size) -> float:
        """Return the factor of the learning rate for a parameter of `shape`."""


def parts_to_step(optimizer: Algorithm, backend_step: BackendStep, without_replicas: bool = False) -> Iterator[range]:
    """Yield the entries of a fused group in parts; step each part before you request the next one.

    A group that orthogonalizes yields a few matrices at a time, after their orthogonalized momentum is computed, which
    a later part overwrites. Other groups yield all entries at once. This is called after `compute_tensor_means`.

    Args:
        optimizer: the optimizer.
        backend_step: the backend's step of the group.
        without_replicas: do not share the work with replicas, which may not call this.
    """
    fused_group = backend_step.fused_group
    if not fused_group.spec.orthogonalizes:
        yield range(len(fused_group.entries))
        return
    algorithm, entries = cast(MatrixAlgorithm, optimizer), fused_group.entries
    owners = _owners(algorithm, fused_group, without_replicas)
    fused_group.per_param_scalars = _lr_scales(algorithm, fused_group)
    slots = _MatrixSlots(fused_group, owners)
    fused_group.matrix_slots = slots.tensors
    backend_step.release_tables()  # they may hold no addresses of these slots yet

    def begin(parts: Mapping[int, range]) -> Callable[[], dict[int, Tensor]]:
        """Compute the momentum of this replica's part of a round, and send it to the owners."""
        own = {k: slots.tensors[k] for k in parts.get(owners.ranks.replicas.own, ())}
        size = chunk_size(fused_group.device)
        for k, slot in own.items():
            for start in range(0, slot.numel(), size):
                chunk = slice(start, start + size)
                elements = fused_group.elements_without_weight(k, chunk)
                slot.view(-1)[chunk] = momentum_matrix(algorithm.momentum_matrix, fused_group.spec, *elements)
        return owners.gather(own)

    begun: list[Callable[[], dict[int, Tensor]]] = []
    for number, parts in enumerate(owners.rounds):
        # The next part is sent while this one is orthogonalized.
        begun += map(begin, owners.rounds[number + len(begun) : number + min(len(owners.ranks.shards), 2)])
        matrices = begun.pop(0)()
        for batch in _batches(fused_group, matrices):
            _orthogonalize([matrices[k] for k in batch], algorithm, entries[batch[0]].group)
        for replica, part in parts.items():
            if replica == owners.ranks.replicas.own:
                owners.scatter(matrices, {k: slots.tensors[k] for k in part})
                matrices.clear()
            owners.ranks.broadcast(slots.memory_of(part), replica)
            for k in part:
                entries[k].orthogonalized = slots.tensors[k]
            yield part
            for k in part:
                entries[k].orthogonalized = None
    fused_group.matrix_slots = None


def _owners(optimizer: MatrixAlgorithm, fused_group: FusedGroup, without_replicas: bool) -> MatrixOwners:
    """Return the owners of a group's matrices; they are the same in all steps with the same sharing ranks."""
    matrices, first = [entry.param for entry in fused_group.entries], fused_group.entries[0].number
    part = flat_part(matrices[0])
    shared: Any = fused_group.sharding if part is None else part.group
    if shared is None:
        found = set(map(replicas_of, matrices))
        shared = found.pop() if len(found) == 1 else None
    key = shared, without_replicas
    if key not in fused_group.matrix_owners:
        ranks = ranks_that_share(shared, fused_group.device, without_replicas)
        fused_group.matrix_owners[key] = MatrixOwners(matrices, ranks, CHUNK, optimizer.matrices_at_once, first)
    return fused_group.matrix_owners[key]


class _MatrixSlots:
    """Uninitialized BF16 tensors of the shapes of the entries' weights, in memory that parts share.

    This replica's parts share one place, or alternate between two if the next part is sent while one is orthogonalized.
    The parts of other replicas have another place.

    Attributes:
        tensors: one tensor for each entry.
    """

    def __init__(self, fused_group: FusedGroup, owners: MatrixOwners) -> None:
        weights, own, starts = fused_group.weights, owners.ranks.replicas.own, dict[int, int]()
        self._sizes = [-(-weight.numel() // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT for weight in weights]
        most = max(sum(self._sizes[k] for k in part) for parts in owners.rounds for part in parts.values())
        places = min(len(owners.ranks.shards), 2)
        for number, parts in enumerate(owners.rounds):
            for replica, part in parts.items():
                place = number % places if replica == own else places
                starts |= zip(part, accumulate((self._sizes[k] for k in part), initial=place * most), strict=False)
        places += len(owners.ranks.replicas) > 1
        self._starts = [starts[k] for k in range(len(weights))]
        self._memory = torch.empty(places * most, dtype=torch.bfloat16, device=fused_group.device)
        self.tensors = [
            self._memory[start : start + weight.numel()].view(weight.shape)
            for start, weight in zip(self._starts, weights, strict=True)
        ]

    def memory_of(self, part: range) -> Tensor:
        """Return the memory of the slots of a part, one after the other."""
        return self._memory[self._starts[part[0]] : self._starts[part[-1]] + self._sizes[part[-1]]]


def _lr_scales(algorithm: MatrixAlgorithm, fused_group: FusedGroup) -> Tensor:
    """Return the entries' `lr_scale`, FP32 of shape (entries, 1) on the group's device; send it if one has changed."""
    values = [algorithm.lr_scale(entry.group, full_shape(entry.param)) for entry in fused_group.entries]
    if fused_group.lr_scales is None or fused_group.lr_scales[0] != values:
        column = torch.tensor(values, dtype=torch.float32, device=fused_group.device)[:, None]
        fused_group.lr_scales = values, column
    return fused_group.lr_scales[1]


def _batches(fused_group: FusedGroup, entries: Iterable[int]) -> list[list[int]]:
    """Divide entries into batches: small matrices of the same shape and param group, or single entries."""
    batches: list[list[int]] = []
    open_batches: dict[tuple[int, torch.Size], list[int]] = {}
    for k in entries:
        entry = fused_group.entries[k]
        shape = full_shape(entry.param)
        key, size = (id(entry.group), shape), shape.numel()
        batch = open_batches.get(key)
        alone = len(shape) > 2 or not 0 < 4 * size <= _BATCH  # a stack is a batch already
        if batch is None or alone or (len(batch) + 1) * size > _BATCH:
            open_batches[key] = batch = []
            batches.append(batch)
        batch.append(k)
    return batches


def _orthogonalize(matrices: list[Tensor], algorithm: MatrixAlgorithm, group: ParamGroup) -> None:
    """Orthogonalize the matrices of a batch in place."""
    first = matrices[0]
    if len(matrices) > 1 and algorithm.batch_keeps_bits(len(matrices), first.shape, first.device):
        results: Iterable[Tensor] = algorithm.orthogonalize(group, torch.stack(matrices))
    else:
        results = (algorithm.orthogonalize(group, matrix) for matrix in matrices)
    for matrix, result in zip(matrices, results, strict=True):
        matrix.copy_(result)
