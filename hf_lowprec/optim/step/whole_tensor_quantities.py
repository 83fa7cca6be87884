"""Compute what some algorithms need of whole tensors before the fused step: means, factors, orthogonalized matrices.

A sharded tensor counts as one: sums are taken over all its shards, and every rank orthogonalizes the full matrix, which
takes no further communication and gives all of them the same bits.

Factored second moments are means of squared gradients over rows and over columns, in place of one per element. The
moment of an element is estimated as the product of its row's and its column's mean, divided by the mean of all
(Shazeer and Stern, arXiv:1804.04235, Alg. 2). The formulas get the root of that estimate as a product of two factors,
so that a kernel reads one number per row and one per column. Squares are rounded to FP32 and summed in FP64;
the sums are rounded to FP32. So results hardly depend on the order in which they are summed, that is on shards, devices
and backends.

Matrices are orthogonalized and stepped one after the other, so that a step never holds those of a whole model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm_interface import Algorithm, Formula, ParamGroup
from hf_lowprec.optim.sharding import Sharding, full_tensor, is_sharded, shard_like, sharding_of, sum_over_shards
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.fused_group import CHUNK, FusedGroup
from hf_lowprec.optim.step.fused_step import evaluate, momentum_matrix
from hf_lowprec.optim.step.matrix_tiles import MatrixSums
from hf_lowprec.optim.step.param_entry import ParamEntry

_BATCH = 1 << 18
"""Elements of small matrices that are orthogonalized together: four or more. Batches of larger ones save no time."""
_CPU_CHUNK = 1 << 17
"""Elements of which a CPU computes squares or the momentum matrix at once: the FP32 values of more do not fit into its
caches."""
_SLOT_ALIGNMENT = 128
"""Elements; 256 bytes, as torch's allocators align memory."""


def compute_tensor_means(backend_steps: Iterable[BackendStep]) -> None:
    """Give every fused group the means that its formula needs, for the coming step.

    Called after gradients, scalars and the clip factor of the step are set, since the formulas use them.
    """
    for backend_step in backend_steps:
        fused_group = backend_step.fused_group
        if fused_group.spec.tensor_means:
            sums = sum_over_shards(backend_step.tensor_sums(), fused_group.sharding)
            fused_group.per_param_scalars = (sums / fused_group.full_sizes[:, None]).float()


def compute_factors(backend_steps: Iterable[BackendStep]) -> None:
    """Compute the new row and column means of every factored group, and give its entries their factors.

    Called after gradients, scalars and the clip factor of the step are set. The states are not changed.
    """
    for backend_step in backend_steps:
        if backend_step.fused_group.spec.factored is not None:
            _compute_factors(backend_step)
            backend_step.release_tables()  # those of the norm have no addresses of factors yet


def store_means(fused_group: FusedGroup) -> None:
    """Write the new row and column means of the step that was taken into the states."""
    for dim, new in fused_group.new_means.items():
        old = [entry.means[dim] for entry in fused_group.entries]
        if fused_group.enabled is not None:
            new = torch.where(fused_group.enabled, new, torch.cat(old))
        torch._foreach_copy_(old, new.split(list(map(Tensor.numel, old))))


def _compute_factors(backend_step: BackendStep) -> None:
    group, found = backend_step.fused_group, backend_step.matrix_sums()
    entries, vectors = group.entries, group.mean_vectors
    sums = [found[k] if k in found else _matrix_sums(group, k) for k in range(len(entries))]
    _sum_each_over_shards(group, [each.of_rows for each in sums], -1)
    _sum_each_over_shards(group, [each.of_columns for each in sums], -2)
    rows, columns = group.matrix_sizes.unbind(1)
    values = group.scalars.to(group.device, non_blocking=True).unbind(1)
    scalars = dict(zip(group.spec.scalars, values, strict=True))

    def new_means(dim: int, parts: list[Tensor], counts: Tensor, repeat: Callable[[Tensor], Tensor]) -> Tensor:
        old, mean = torch.cat([each.means[dim] for each in entries]), (torch.cat(parts) / repeat(counts)).float()
        return old * repeat(scalars["beta2"]) + mean * repeat(scalars["gain2"])

    row_means = new_means(-1, [each.of_rows for each in sums], columns, vectors.for_rows)
    column_means = new_means(-2, [each.of_columns for each in sums], rows, vectors.for_columns)
    totals = vectors.sums_of_rows(row_means.double())
    _sum_each_over_shards(group, totals.split(vectors.matrices), -2)
    means = (totals / vectors.for_matrices(rows)).float()
    means = torch.maximum(means, vectors.for_matrices(scalars["least"]))
    row_factors = (row_means.double() / vectors.rows_of_matrices(means.double())).sqrt().float()
    column_factors = column_means.double().sqrt().float()
    group.new_means = {-1: row_means, -2: column_means}
    factors = zip(row_factors.split(vectors.rows), column_factors.split(vectors.columns), strict=True)
    for entry, of_entry in zip(entries, factors, strict=True):
        entry.factors = of_entry


def _matrix_sums(group: FusedGroup, k: int) -> MatrixSums:
    """The sums of `spec.factored` over rows and columns of this rank's part of an entry, by torch's operations."""
    weight, spec = group.entries[k].weight, group.spec
    assert spec.factored is not None
    *before, rows, columns = weight.shape
    shapes = (math.prod(before), rows, 1), (math.prod(before), 1, columns)
    sums = MatrixSums(*(torch.zeros(shape, dtype=torch.float64, device=weight.device) for shape in shapes))
    size = _chunk(weight.device)
    together, rows_at_once = max(size // max(rows * columns, 1), 1), max(size // max(columns, 1), 1)
    for first in range(0, math.prod(before), together):
        some = slice(first, first + together)
        for row in range(0, rows, rows_at_once):
            part = slice(row, row + rows_at_once)
            shape = sums.of_rows[some, part].shape[:2]
            start = (first * rows + row) * columns
            elements = group.elements(k, slice(start, start + math.prod(shape) * columns))
            terms = evaluate(spec.factored, spec, *elements).view(*shape, columns)
            sums.of_rows[some, part] = terms.sum(-1, keepdim=True, dtype=torch.float64)
            sums.of_columns[some] += terms.sum(-2, keepdim=True, dtype=torch.float64)
    return MatrixSums(sums.of_rows.view(-1), sums.of_columns.view(-1))


def _sum_each_over_shards(group: FusedGroup, values: Sequence[Tensor], dim: int) -> None:
    """Sum `values`, one of each entry, in place over the ranks that share dimension `dim`."""
    by_sharding: dict[Sharding, list[Tensor]] = defaultdict(list)
    for value, entry in zip(values, group.entries, strict=True) if group.sharding is not None else ():
        if (sharding := sharding_of(entry.param, dim)) is not None:
            by_sharding[sharding].append(value)
    for sharding, together in by_sharding.items():
        total = sum_over_shards(torch.cat(together), sharding)
        torch._foreach_copy_(together, total.split(list(map(len, together))))


# Orthogonalized matrices.


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
    if fused_group.lr_scales is None or fused_group.lr_scales[0] != values:
        column = torch.tensor(values, dtype=torch.float32, device=fused_group.device)[:, None]
        fused_group.lr_scales = values, column
    return fused_group.lr_scales[1]


def _compute_momentum_matrix(slot: Tensor, algorithm: MatrixAlgorithm, fused_group: FusedGroup, k: int) -> None:
    """Write this rank's part of what is orthogonalized for entry number `k` into `slot`."""
    size = _chunk(slot.device)
    for start in range(0, slot.numel(), size):
        chunk = slice(start, start + size)
        elements = fused_group.elements_without_weight(k, chunk)
        slot.view(-1)[chunk] = momentum_matrix(algorithm.momentum_matrix, fused_group.spec, *elements)


def _batches(fused_group: FusedGroup, entries: range) -> list[list[int]]:
    """Some entries in batches: small matrices of the same shape and parameter group, or single entries.

    They are the same on all ranks, which gather their matrices in this order.
    """
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


def _chunk(device: torch.device) -> int:
    return min(CHUNK, _CPU_CHUNK) if device.type == "cpu" else CHUNK
