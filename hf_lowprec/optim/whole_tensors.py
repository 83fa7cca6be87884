"""What some formulas must know of whole tensors before the elementwise step: a mean, or a direction made of a matrix.

A sharded tensor is looked at as one: sums are taken over all its shards, and every rank makes the direction of the full
matrix, which takes no further communication and gives all of them the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from hf_lowprec.optim.batch import Batch
from hf_lowprec.optim.eager import CHUNK
from hf_lowprec.optim.shards import gathered, part_of, sum_over_shards
from hf_lowprec.optim.step import Formula, evaluate
from hf_lowprec.optim.work import Group


class Directed(Protocol):
    """An algorithm whose `update` takes a `state.direction`, and multiplies it with `scalars.ratio`.

    Attributes:
        approach: the elementwise formula of what the direction is made of; takes what `update` takes.
    """

    approach: Formula

    def direction(self, group: Group, matrix: Tensor) -> Tensor:
        """The direction, of the shape of the whole parameter, of a BF16 `matrix` of that shape."""

    def ratio(self, group: Group, shape: torch.Size) -> float:
        """What the step of a parameter of `shape` is multiplied by."""


def look(optimizer: Any, batch: Batch, measure: Callable[[Batch], Tensor]) -> None:
    """Give `batch` what its formula must know of whole tensors, for the coming step.

    Args:
        optimizer: the optimizer.
        batch: its gradients are final and the clip factor is known.
        measure: the backend's sums of the algorithm's measure.
    """
    if batch.layout.measure is not None:
        sums = sum_over_shards(measure(batch), batch.spread)
        batch.own = (sums / _sizes(batch)).float()[:, None]
    if batch.layout.directed:
        algorithm = cast(Directed, optimizer)
        ratios = [algorithm.ratio(work.group, work.param.shape) for work in batch.works]
        if batch.kept.get("ratios", ((), None))[0] != ratios:
            batch.kept["ratios"] = ratios, torch.tensor(ratios, dtype=torch.float32, device=batch.device)[:, None]
        batch.own = batch.kept["ratios"][1]
        batch.direct([_direction(algorithm, batch, k) for k in range(len(batch.works))])


def _sizes(batch: Batch) -> Tensor:
    """Elements of each full parameter, FP64 of shape (works) on the batch's device."""
    if "sizes" not in batch.kept:
        counts = [max(math.prod(work.param.shape), 1) for work in batch.works]
        batch.kept["sizes"] = torch.tensor(counts, dtype=torch.float64, device=batch.device)
    sizes: Tensor = batch.kept["sizes"]
    return sizes


def _direction(algorithm: Directed, batch: Batch, k: int) -> Tensor:
    """This rank's part of the direction of work number `k`, BF16."""
    work = batch.works[k]
    part = torch.empty_like(work.written[0], dtype=torch.bfloat16)
    for start in range(0, part.numel(), CHUNK):
        piece = slice(start, start + CHUNK)
        part.view(-1)[piece] = evaluate(algorithm.approach, batch.layout, *batch.elements(k, piece))
    return part_of(algorithm.direction(work.group, gathered(part, work.param)), work.param)
