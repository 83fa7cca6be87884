"""Factored second moments: means of squared gradients over rows and over columns, in place of one per element.

The moment of an element is estimated as the product of its row's and its column's mean, divided by the mean of all
(Shazeer and Stern, arXiv:1804.04235, Alg. 2). The formulas get the inverse root of that estimate as a product of two
factors, so that a kernel reads one number per row and one per column.

Squares are rounded to FP32 and summed in FP64; the sums are rounded to FP32. So results hardly depend on the order in
which they are summed, that is on shards, devices and backends.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hf_lowprec.optim.sharding import Sharding, sharding_of_dim, sum_over_shards
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.fused_group import CHUNK, FusedGroup
from hf_lowprec.optim.step.fused_step import evaluate
from hf_lowprec.optim.step.matrix_tiles import MatrixSums

ROW_MEAN, COLUMN_MEAN = "row_var", "col_var"
"""Names of the states: the mean over each row, of shape (..., rows, 1), and over each column, (..., 1, columns)."""
_CPU_CHUNK = 1 << 17
"""Elements of which a CPU computes squares at once: the FP32 values of more do not fit into its caches."""


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
    pairs = [
        (entry.means[name], new)
        for entry, new_means in zip(fused_group.entries, fused_group.new_means, strict=False)
        for name, new in new_means.items()
    ]
    if fused_group.enabled is not None:
        pairs = [(old, torch.where(fused_group.enabled, new, old)) for old, new in pairs]
    if pairs:
        torch._foreach_copy_([old for old, _ in pairs], [new for _, new in pairs])


def _compute_factors(backend_step: BackendStep) -> None:
    group, found = backend_step.fused_group, backend_step.matrix_sums()
    entries, vectors = group.entries, group.mean_vectors
    sums = [found[k] if k in found else _matrix_sums(group, k) for k in range(len(entries))]
    _sum_each_over_shards(group, [each.of_rows for each in sums], -1)
    _sum_each_over_shards(group, [each.of_columns for each in sums], -2)
    rows, columns = group.matrix_sizes.unbind(1)
    values = group.scalars.to(group.device, non_blocking=True).unbind(1)
    scalars = dict(zip(group.spec.scalars, values, strict=True))

    def new_means(name: str, parts: list[Tensor], counts: Tensor, repeat: Callable[[Tensor], Tensor]) -> Tensor:
        old, mean = torch.cat([each.means[name] for each in entries]), torch.cat(parts) / repeat(counts)
        mean = (mean + repeat(scalars["square_eps"])).float()
        return old * repeat(scalars["beta2"]) + mean * repeat(scalars["gain2"])

    row_means = new_means(ROW_MEAN, [each.of_rows for each in sums], columns, vectors.for_rows)
    column_means = new_means(COLUMN_MEAN, [each.of_columns for each in sums], rows, vectors.for_columns)
    totals = vectors.sums_of_rows(row_means.double())
    _sum_each_over_shards(group, totals.split(vectors.matrices), -2)
    means = (totals / vectors.for_matrices(rows)).float()
    means = torch.maximum(means, vectors.for_matrices(scalars["min_mean"]))
    row_factors = (vectors.rows_of_matrices(means.double()) / row_means.double()).sqrt().float()
    column_factors = column_means.double().sqrt().reciprocal().float()
    by_entry = zip(row_means.split(vectors.rows), column_means.split(vectors.columns), strict=True)
    group.new_means = [{ROW_MEAN: row, COLUMN_MEAN: column} for row, column in by_entry]
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
    size = _CPU_CHUNK if weight.device.type == "cpu" else CHUNK
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
        if (sharding := sharding_of_dim(entry.param, dim)) is not None:
            by_sharding[sharding].append(value)
    for sharding, together in by_sharding.items():
        total = sum_over_shards(torch.cat(together), sharding)
        torch._foreach_copy_(together, total.split(list(map(len, together))))
