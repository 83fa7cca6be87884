"""Compute the mean or the orthogonalized matrix of whole tensors that some algorithms need before the fused step.

A sharded tensor counts as one: sums are taken over all its shards, and every rank orthogonalizes the full matrix, which
takes no further communication and gives all of them the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm_interface import Algorithm, Formula, ParamGroup
from hf_lowprec.optim.sharding import full_tensor, shard_like, sum_over_shards
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.fused_group import CHUNK, FusedGroup, LrScales
from hf_lowprec.optim.step.fused_step import evaluate


class MatrixAlgorithm(Protocol):
    """An algorithm whose `update` takes `state.orthogonalized` and multiplies it by `scalars.lr_scale`.

    Attributes:
        momentum_matrix: the elementwise formula of the matrix that is orthogonalized; takes the arguments of `update`.
    """

    momentum_matrix: Formula

    def orthogonalize(self, group: ParamGroup, matrix: Tensor) -> Tensor:
        """The orthogonalized `matrix`, which is BF16 and has the shape of the full parameter; of the same shape."""

    def lr_scale(self, group: ParamGroup, shape: torch.Size) -> float:
        """The factor of the learning rate for a parameter of `shape`."""


def compute_per_tensor(optimizer: Algorithm, backend_steps: Iterable[BackendStep]) -> None:
    """Give every fused group the means or orthogonalized matrices that its formula needs, for the coming step.

    Called after gradients, scalars and the clip factor of the step are set, since the formulas use them.
    """
    for backend_step in backend_steps:
        fused_group = backend_step.fused_group
        if fused_group.spec.tensor_mean is not None:
            sums = sum_over_shards(backend_step.tensor_sums(), fused_group.sharding)
            fused_group.per_param_scalars = (sums / fused_group.full_sizes).float()[:, None]
        if fused_group.spec.orthogonalizes:
            algorithm = cast(MatrixAlgorithm, optimizer)
            fused_group.per_param_scalars = _lr_scales(algorithm, fused_group)
            entries = range(len(fused_group.entries))
            fused_group.set_orthogonalized([_orthogonalized(algorithm, fused_group, k) for k in entries])
            backend_step.release_tables()  # they may hold no addresses of these matrices yet


def _lr_scales(algorithm: MatrixAlgorithm, fused_group: FusedGroup) -> Tensor:
    """`lr_scale` of each entry, FP32 of shape (entries, 1) on the group's device; sent there when one has changed."""
    values = [algorithm.lr_scale(entry.group, entry.param.shape) for entry in fused_group.entries]
    if fused_group.lr_scales is None or fused_group.lr_scales.values != values:
        column = torch.tensor(values, dtype=torch.float32, device=fused_group.device)[:, None]
        fused_group.lr_scales = LrScales(values, column)
    return fused_group.lr_scales.column


def _orthogonalized(algorithm: MatrixAlgorithm, fused_group: FusedGroup, k: int) -> Tensor:
    """This rank's part of the orthogonalized matrix of entry number `k`, BF16 and contiguous."""
    entry = fused_group.entries[k]
    matrix = torch.empty_like(entry.weight, dtype=torch.bfloat16)
    for start in range(0, matrix.numel(), CHUNK):
        chunk = slice(start, start + CHUNK)
        matrix.view(-1)[chunk] = evaluate(algorithm.momentum_matrix, fused_group.spec, *fused_group.elements(k, chunk))
    return shard_like(algorithm.orthogonalize(entry.group, full_tensor(matrix, entry.param)), entry.param)
