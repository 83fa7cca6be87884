"""Clipping by the gradient norm of the step before, for gradients that never exist all at once.

The squares of every bucket are added up in FP64, in the order of the buckets, which is that of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_lowprec.optim.sharding import Sharding, sum_over_shards
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.clipping import clip_factor


class DelayedClipping:
    """The gradient norm of the step before, and the sum of squares of the running one.

    Attributes:
        norm_before: FP32 scalar; 0, with which nothing is clipped, before the first step has ended.
    """

    def __init__(self) -> None:
        self.resume(0.0)

    def resume(self, norm_before: float) -> None:
        """Start a step after one whose gradient norm was `norm_before`."""
        self.norm_before = torch.tensor(norm_before, dtype=torch.float32, device="cpu")
        self._forget_squares()

    def _forget_squares(self) -> None:
        self._squares: dict[tuple[Sharding | None, torch.device], Tensor] = {}
        self._norm: Tensor | None = None

    def clip(self, backend_steps: Iterable[BackendStep], max_norm: float) -> None:
        """Set the clip factors of a bucket's groups, and add up their squares."""
        for step in backend_steps:
            group = step.fused_group
            group.clip_factor = clip_factor(self.norm_before.to(group.device), max_norm)
            key = group.sharding, group.device
            squares = step.square_sum()
            self._squares[key] = self._squares[key] + squares if key in self._squares else squares

    def norm(self) -> Tensor:
        """The norm of the running step's gradients before clipping, over all shards; called after the last bucket.

        A collective, if parameters are sharded: all ranks must call it.
        """
        if self._norm is None:
            keys = sorted(self._squares, key=lambda key: str(key[1]))  # threads of several devices have no fixed order
            sums = [sum_over_shards(self._squares[key], key[0]) for key in keys]
            if not sums:
                return torch.zeros((), dtype=torch.float32, device="cpu")
            self._norm = torch.stack([part.to(sums[0].device) for part in sums]).sum().sqrt().float()
        return self._norm

    def end_step(self) -> Tensor:
        """End the running step, and return its norm."""
        self.norm_before = self.norm()
        self._forget_squares()
        return self.norm_before
