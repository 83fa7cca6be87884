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

from hf_lowprec.optim.algorithm import Formula, ParamGroup
from hf_lowprec.optim.backends.eager import CHUNK
from hf_lowprec.optim.sharding import gathered, part_of, sum_over_shards
from hf_lowprec.optim.step.fused import evaluate
from hf_lowprec.optim.step.fused_group import FusedGroup


class MatrixAlgorithm(Protocol):
    """An algorithm whose `update` takes a `state.orthogonalized`, and multiplies it with `scalars.lr_scale`.

    Attributes:
        momentum_matrix: the elementwise formula of what the direction is made of; takes what `update` takes.
    """

    momentum_matrix: Formula

    def orthogonalize(self, group: ParamGroup, matrix: Tensor) -> Tensor:
        """The direction, of the shape of the whole parameter, of a BF16 `matrix` of that shape."""

    def lr_scale(self, group: ParamGroup, shape: torch.Size) -> float:
        """What the step of a parameter of `shape` is multiplied by."""


def compute(optimizer: Any, fused_group: FusedGroup, tensor_sums: Callable[[FusedGroup], Tensor]) -> None:
    """Give `fused_group` what its formula must know of whole tensors, for the coming step.

    Args:
        optimizer: the optimizer.
        fused_group: its gradients are final and the clip factor is known.
        tensor_sums: the backend's sums of the `tensor_mean` formula.
    """
    if fused_group.spec.tensor_mean is not None:
        sums = sum_over_shards(tensor_sums(fused_group), fused_group.sharding)
        fused_group.per_param_scalars = (sums / _sizes(fused_group)).float()[:, None]
    if fused_group.spec.orthogonalizes:
        algorithm = cast(MatrixAlgorithm, optimizer)
        lr_scales = [algorithm.lr_scale(entry.group, entry.param.shape) for entry in fused_group.entries]
        if fused_group.kept.get("lr_scales", ((), None))[0] != lr_scales:
            fused_group.kept["lr_scales"] = (
                lr_scales,
                torch.tensor(lr_scales, dtype=torch.float32, device=fused_group.device)[:, None],
            )
        fused_group.per_param_scalars = fused_group.kept["lr_scales"][1]
        fused_group.take_orthogonalized(
            [_orthogonalized(algorithm, fused_group, k) for k in range(len(fused_group.entries))]
        )


def _sizes(fused_group: FusedGroup) -> Tensor:
    """Elements of each full parameter, FP64 of shape (entries) on the fused_group's device."""
    if "sizes" not in fused_group.kept:
        counts = [max(math.prod(entry.param.shape), 1) for entry in fused_group.entries]
        fused_group.kept["sizes"] = torch.tensor(counts, dtype=torch.float64, device=fused_group.device)
    sizes: Tensor = fused_group.kept["sizes"]
    return sizes


def _orthogonalized(algorithm: MatrixAlgorithm, fused_group: FusedGroup, k: int) -> Tensor:
    """This rank's part of the direction of entry number `k`, BF16."""
    entry = fused_group.entries[k]
    part = torch.empty_like(entry.written[0], dtype=torch.bfloat16)
    for start in range(0, part.numel(), CHUNK):
        piece = slice(start, start + CHUNK)
        part.view(-1)[piece] = evaluate(algorithm.momentum_matrix, fused_group.spec, *fused_group.elements(k, piece))
    return part_of(algorithm.orthogonalize(entry.group, gathered(part, entry.param)), entry.param)
