"""Orthogonalize the momentum of matrices before the fused step takes them.

Matrices are orthogonalized and stepped in parts, one after the other, so that a step never holds those of a whole
model. Each sharded matrix is orthogonalized by one rank (`matrix_owners.py`), so all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, cast

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm_interface import Algorithm, Formula, ParamGroup
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.fused_group import CHUNK, FusedGroup
from hf_lowprec.optim.step.fused_step import momentum_matrix
from hf_lowprec.optim.step.matrix_owners import MatrixOwners
from hf_lowprec.optim.step.whole_tensor_quantities import chunk_size

_BATCH = 1 << 18
"""Elements of small matrices that are orthogonalized together: four or more. Batches of larger ones save no time."""
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

    def matrices_at_once(self, shape: torch.Size, device: torch.device) -> int:
        """How many matrices of `shape` in a stack are orthogonalized at once, independently of all others."""

    def lr_scale(self, group: ParamGroup, shape: torch.Size) -> float:
        """The factor of the learning rate for a parameter of `shape`."""


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
    algorithm, entries = cast(MatrixAlgorithm, optimizer), fused_group.entries
    owners = _owners(algorithm, fused_group)
    parts = owners.parts
    fused_group.per_param_scalars = _lr_scales(algorithm, fused_group)
    fused_group.matrix_slots = slots = _matrix_slots(fused_group, owners)
    backend_step.release_tables()  # they may hold no addresses of these slots yet

    def begin(part: range) -> Callable[[], dict[int, Tensor]]:
        """Compute the momentum matrices of a part, and send them to their owners."""
        for k in part:
            _compute_momentum_matrix(slots[k], algorithm, fused_group, k)
        return owners.gather({k: slots[k] for k in part})

    begun: list[Callable[[], dict[int, Tensor]]] = []
    for number, part in enumerate(parts):
        # The next part is sent while this one is orthogonalized.
        begun += map(begin, parts[number + len(begun) : number + (2 if owners.count > 1 else 1)])
        owned = begun.pop(0)()
        for batch in _batches(fused_group, owned):
            _orthogonalize([owned[k] for k in batch], algorithm, entries[batch[0]].group)
        owners.scatter(owned, {k: slots[k] for k in part})
        del owned
        for k in part:
            entries[k].orthogonalized = slots[k]
        yield part
        for k in part:
            entries[k].orthogonalized = None
    fused_group.matrix_slots = None


def _owners(optimizer: MatrixAlgorithm, fused_group: FusedGroup) -> MatrixOwners:
    """Who orthogonalizes the matrices of a group; the same in all steps."""
    if fused_group.matrix_owners is None:
        entries, device = fused_group.entries, fused_group.device
        fused_group.matrix_owners = MatrixOwners(
            [entry.param for entry in entries],
            CHUNK,
            lambda shape: optimizer.matrices_at_once(shape, device),
            first=entries[0].number,
        )
    return fused_group.matrix_owners


def _matrix_slots(fused_group: FusedGroup, owners: MatrixOwners) -> list[Tensor]:
    """Uninitialized BF16 tensors of the shapes of the entries' weights; parts share their memory.

    If ranks share the work, only every second part does, since the next part is sent while one is orthogonalized.
    """
    weights, ends = fused_group.weights, list[int]()
    offsets = [0] * len(weights)
    for part in owners.parts:
        end = 0
        for k in part:
            offsets[k] = end
            end += -(-weights[k].numel() // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        ends.append(end)
    second = max(ends) if owners.count > 1 and len(ends) > 1 else 0
    for k in (k for part in owners.parts[1::2] for k in part):
        offsets[k] += second
    memory = torch.empty(second + max(ends), dtype=torch.bfloat16, device=fused_group.device)
    return [
        memory[offset : offset + weight.numel()].view(weight.shape)
        for offset, weight in zip(offsets, weights, strict=True)
    ]


def _lr_scales(algorithm: MatrixAlgorithm, fused_group: FusedGroup) -> Tensor:
    """`lr_scale` of each entry, FP32 of shape (entries, 1) on the group's device; sent there when one has changed."""
    values = [algorithm.lr_scale(entry.group, entry.param.shape) for entry in fused_group.entries]
    if fused_group.lr_scales is None or fused_group.lr_scales[0] != values:
        column = torch.tensor(values, dtype=torch.float32, device=fused_group.device)[:, None]
        fused_group.lr_scales = values, column
    return fused_group.lr_scales[1]


def _compute_momentum_matrix(slot: Tensor, algorithm: MatrixAlgorithm, fused_group: FusedGroup, k: int) -> None:
    """Write this rank's part of what is orthogonalized for entry number `k` into `slot`."""
    size = chunk_size(slot.device)
    for start in range(0, slot.numel(), size):
        chunk = slice(start, start + size)
        elements = fused_group.elements_without_weight(k, chunk)
        slot.view(-1)[chunk] = momentum_matrix(algorithm.momentum_matrix, fused_group.spec, *elements)


def _batches(fused_group: FusedGroup, entries: Iterable[int]) -> list[list[int]]:
    """Some entries in batches: small matrices of the same shape and parameter group, or single entries."""
    batches: list[list[int]] = []
    open_batches: dict[tuple[int, torch.Size], list[int]] = {}
    for k in entries:
        entry = fused_group.entries[k]
        key, size = (id(entry.group), entry.param.shape), entry.param.numel()
        batch = open_batches.get(key)
        alone = entry.param.ndim > 2 or not 0 < 4 * size <= _BATCH  # a stack is a batch already
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
