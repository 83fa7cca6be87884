"""Compute what some algorithms need from whole tensors before the fused step: means and factors.

A sharded tensor counts as one: sums are taken over all its shards.

Factored second moments are means of squared gradients over rows and over columns, instead of one moment per element.
The moment of an element is estimated as the product of its row's and its column's mean, divided by the mean of all
(Shazeer and Stern, arXiv:1804.04235, Alg. 2). The formulas get the root of that estimate as a product of two factors,
so that a kernel reads one number per row and one per column. Squares are rounded to FP32 and summed in FP64; the sums
are rounded to FP32. So results hardly depend on the order of summation, that is, on shards, devices and backends.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hf_lowprec.optim.sharding import Sharding, sharding_of, sum_over_shards
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.fused_group import CHUNK, FusedGroup
from hf_lowprec.optim.step.fused_step import evaluate
from hf_lowprec.optim.step.matrix_tiles import MatrixSums

_CPU_CHUNK = 1 << 17
"""The number of elements whose squares or momentum matrices a CPU computes at once; more FP32 values would not fit into
its caches."""


def compute_tensor_means(backend_steps: Iterable[BackendStep]) -> None:
    """Give every fused group the means that its formula needs, for the coming step.

    It is called after gradients, scalars and the clip factor of the step are set, since the formulas use them.
    """
    for backend_step in backend_steps:
        fused_group = backend_step.fused_group
        if fused_group.spec.tensor_means:
            sums = sum_over_shards(backend_step.tensor_sums(), fused_group.sharding)
            fused_group.per_param_scalars = (sums / fused_group.full_sizes[:, None]).float()


def compute_factors(backend_steps: Iterable[BackendStep]) -> None:
    """Compute the new row and column means of every factored group, and give its entries their factors.

    It is called after gradients, scalars and the clip factor of the step are set. The states are not changed.
    """
    for backend_step in backend_steps:
        if backend_step.fused_group.spec.factored is not None:
            _compute_factors(backend_step)
            backend_step.release_tables()  # the norm's tables lack the addresses of factors


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
    """Compute, in torch, the sums of `spec.factored` over rows and columns of this rank's part of an entry."""
    weight, spec = group.entries[k].weight, group.spec
    assert spec.factored is not None
    *before, rows, columns = weight.shape
    shapes = (math.prod(before), rows, 1), (math.prod(before), 1, columns)
    sums = MatrixSums(*(torch.zeros(shape, dtype=torch.float64, device=weight.device) for shape in shapes))
    size = chunk_size(weight.device)
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
    """Sum `values`, one per entry, in place over the ranks that share dimension `dim`."""
    by_sharding: dict[Sharding, list[Tensor]] = defaultdict(list)
    for value, entry in zip(values, group.entries, strict=True) if group.sharding is not None else ():
        if (sharding := sharding_of(entry.param, dim)) is not None:
            by_sharding[sharding].append(value)
    for sharding, together in by_sharding.items():
        total = sum_over_shards(torch.cat(together), sharding)
        torch._foreach_copy_(together, total.split(list(map(len, together))))


def chunk_size(device: torch.device) -> int:
    """Return the number of elements whose FP32 values torch computes at once on `device`."""
    return min(CHUNK, _CPU_CHUNK) if device.type == "cpu" else CHUNK
