"""Gradients on the host: they are copied there as soon as they are final, added up there, and wait for `step()`.

So the norm of all gradients and sums over micro-batches are exact, and the device holds one bucket of gradients.
Micro-batches are added up in the gradient's dtype, in their order, as autograd does it: the sums have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim import validation
from hf_lowprec.optim.gradient_release.collector import GradientCollector, gradient_version
from hf_lowprec.optim.private_torch_apis import without_grad
from hf_lowprec.optim.sharding import dtensor_like, local_shard, place_gradients


class OffloadedGradients(GradientCollector):
    """Copies the gradients of an optimizer's parameters to the host, and frees them on the device.

    Attributes:
        sums: the gradients of the coming step, in host memory; placed like their parameters.

    Args:
        optimizer: the optimizer. It is referenced weakly; when it is deleted, the hooks are removed.
    """

    argument = "offload_gradients=True"
    accumulates = True
    _without_that = (
        "moved other gradients to the host without that. To clip, call optimizer.clip_grad_norm_ or set max_grad_norm"
    )

    def __init__(self, optimizer: Any) -> None:
        self.sums: dict[Tensor, Tensor] = {}
        self._memory: dict[Tensor, Tensor] = {}  # of the sums, kept from step to step
        self._copied: Any = None  # the version of the kept gradient that is on the host
        super().__init__(optimizer)

    def collect(self) -> None:
        """Move all gradients that are left to the host, and wait until all are there and added up."""
        with self._lock:
            self._take_rest()
            self.check_kept()
            kept = self._running.kept
            if kept is not None and self._copied != (copied := self._running.versions[id(kept)]):
                self._copy("kept", [kept], begin=True)  # its gradient stays, and is looked at again in `step()`
                self._copied = copied
            self._optimizer.finish_host_steps()

    def check_take_over(self) -> None:
        if self.sums:
            raise RuntimeError(
                "an optimizer with offload_gradients=True holds gradients of these parameters on the host; call its "
                "step() or zero_grad() first"
            )

    def zero(self) -> None:
        """Set all gradients that were moved to zero, as `zero_grad(set_to_none=False)` says."""
        with self._lock:
            self._optimizer.finish_host_steps()
            for total in self.sums.values():
                local_shard(total).zero_()
            kept = self._running.kept
            if kept is not None and kept.grad is not None:
                self._running.versions[id(kept)] = gradient_version(kept.grad)

    def end_step(self) -> None:
        """Forget the gradients, which have been stepped or are not wanted, as `zero_grad` says."""
        with self._lock:
            self.sums.clear()
            if self._running.kept is not None:
                self._running.kept.grad = None
            self._begin_step()
            self.watch_parameters()

    def _begin_step(self) -> None:
        super()._begin_step()
        self._copied = None

    @without_grad
    def _take(self, key: Any, bucket: Sequence[Tensor]) -> None:
        """Move the gradients of `bucket` to the host, where a thread adds them to those of earlier micro-batches."""
        place_gradients(bucket)
        self._copy(key, bucket)
        for param in bucket:
            param.grad = None
        self._running.taken.update(map(id, bucket))

    @without_grad
    def _copy(self, key: Any, bucket: Sequence[Tensor], begin: bool = False) -> None:
        """Copy the gradients of `bucket` to the host; `begin` new sums, or add them to those that are there."""
        whole = [param.grad for param in bucket if param.grad is not None]
        for grad in whole:
            validation.check_gradient(grad)
        grads = [*map(local_shard, whole)]
        sums = [self._sum(param, grad) for param, grad in zip(bucket, grads, strict=True)]
        host_steps = self._optimizer.host_steps
        copies, slot = host_steps.copies(bucket[0].device), host_steps.next_slot()
        staged = slot.tensors([(grad.dtype, grad.shape) for grad in grads], copies)

        def add() -> tuple[()]:
            for (total, is_first), grad in zip(sums, staged, strict=True):
                total.copy_(grad) if is_first or begin else total.add_(grad)
            return ()

        fetched = host_steps.submit(copies, slot, zip(staged, grads, strict=True), add)
        if key == "means":  # views of a bucket that DDP writes to in the next backward pass
            copies.order_after(fetched)

    def _sum(self, param: Tensor, grad: Tensor) -> tuple[Tensor, bool]:
        """Host memory for the sum of gradients of `param`, this rank's part; and whether `grad` is the first of them.

        Args:
            param: the parameter.
            grad: this rank's part of its gradient.
        """
        is_first = param not in self.sums
        if is_first:
            memory = self._memory.get(param)
            if memory is None or (memory.shape, memory.dtype) != (grad.shape, grad.dtype):
                memory = self._memory[param] = torch.empty(grad.shape, dtype=grad.dtype, device="cpu")
            self.sums[param] = dtensor_like(memory.detach(), param)
        return local_shard(self.sums[param]), is_first

    def _second_gradient(self, param: Tensor) -> str:
        return (
            f"{self._name(param)} was given a gradient after offload_gradients=True had moved the one that autograd "
            "computed; set gradients before the backward pass, change them with param.register_hook, or call "
            "optimizer.zero_grad() first"
        )
