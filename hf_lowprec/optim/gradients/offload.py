"""Gradients on the host: they are copied there as soon as they are final, added up there, and wait for `step()`.

So the norm of all gradients and sums over micro-batches are exact, and the device holds one bucket of gradients.
Micro-batches are added up in the gradient's dtype, in their order, as autograd does: the sums have the same bits.

All gradients are taken by the end of a backward pass, so that none is added to a later one on the device. Only the
gradient of the smallest parameter stays until `step()`, so that foreign writes are noticed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim import validation
from hf_lowprec.optim.gradients.collector import GradientCollector, gradient_version
from hf_lowprec.optim.private_torch_apis import at_end_of_backward_pass, backward_pass, without_grad
from hf_lowprec.optim.sharding import dtensor_like, local_shard, place_gradients


class OffloadedGradients(GradientCollector):
    """Copies the gradients of an optimizer's parameters to the host, and frees them on the device."""

    argument = "offload_gradients=True"
    accumulates = True
    _without_that = (
        "already moved other gradients to the host. To clip, call optimizer.clip_grad_norm_ or set max_grad_norm"
    )

    def __init__(self, optimizer: Any) -> None:
        self._sums: dict[Tensor, Tensor] = {}  # gradients of the coming step on the host, placed like the parameters
        self.gradient_of = self._sums.get
        self._memory: dict[Tensor, Tensor] = {}  # the memory of the sums, which stays from step to step
        super().__init__(optimizer)

    def _begin_step(self) -> None:
        super()._begin_step()
        self._sentinel_is_fixed = False  # once the gradient of `_sentinel` is the sum of several passes
        self._copied: Any = None  # the version of the gradient of `_sentinel` that is on the host
        self._pass: int | None = None  # the last backward pass

    def gather(self) -> None:
        """Move all remaining gradients to the host, and wait until all are there and added up."""
        with self._lock:
            self._take_rest()
            self._check_sentinel()
            if self._sentinel is not None and self._copied != (version := self._versions[self._sentinel]):
                self._sums.pop(self._sentinel, None)
                self._copy("kept", [self._sentinel])  # its gradient stays, and is checked again in `step()`
                self._copied = version
            self._optimizer.finish_host_steps()

    def end_step(self) -> None:
        with self._lock:
            self._sums.clear()
            if self._sentinel is not None:
                self._sentinel.grad = None
            self.begin_anew()

    def zero(self, set_to_none: bool) -> None:
        if set_to_none:
            return self.end_step()
        with self._lock:
            self._optimizer.finish_host_steps()
            for total in self._sums.values():
                local_shard(total).zero_()
            if self._sentinel is not None and self._sentinel.grad is not None:
                self._versions[self._sentinel] = gradient_version(self._sentinel.grad)

    def check_take_over(self) -> None:
        if self._sums:
            raise RuntimeError(
                "an optimizer with offload_gradients=True holds gradients of these parameters on the host; call its "
                "step() or zero_grad() first"
            )

    # Backward passes, and the gradient that waits.

    def _before_final(self, param: Tensor) -> None:
        """If a backward pass has begun, note it, and take what waits at its end."""
        if self._pass == (current := backward_pass()):
            return
        self._pass = current
        self._sentinel_is_fixed = self._sentinel is not None
        if param is not self._sentinel:  # autograd has just added to the gradient of `param`
            self._check_sentinel()
        self._take_all_waiting()  # left by an interrupted pass
        taken = {other for other in self._taken if id(other) not in self._averaged_later}
        for other in self.params() if taken else ():
            if other.grad is not None and other in taken and other is not param:
                raise RuntimeError(self._second_gradient(other))
        if current is not None:
            at_end_of_backward_pass(functools.partial(_end_pass, weakref.ref(self), current))

    def _check_sentinel(self) -> None:
        """Raise RuntimeError if the gradient that waits was written to, or set to None, since autograd computed it."""
        if self._sentinel is None:
            return
        if self._sentinel.grad is None:
            raise RuntimeError(
                f"the gradient of {self._name(self._sentinel)} was set to None, as by model.zero_grad(), but "
                f"{self.argument} has taken other gradients before; to forget gradients, call optimizer.zero_grad()"
            )
        self._check_version(self._sentinel)

    def _enqueue(self, param: Tensor, key: Any = None) -> None:
        """Put a gradient into its bucket. The smallest parameter's stays on the device, for `_check_sentinel`."""
        former = self._sentinel
        is_smallest = former is None or (param.numel() <= former.numel() and not self._sentinel_is_fixed)
        if param is former or (is_smallest and param.numel()):
            self._sentinel = param
            if param.grad is not None and local_shard(param.grad)._is_view():  # into a large bucket of other code
                param.grad = param.grad.clone()
            self._versions[param] = gradient_version(param.grad)
            if former is None or former is param:
                return
            param = former  # is no longer the smallest
        super()._enqueue(param, key)
        if self._pass is None:  # no backward pass will end
            self._take_all_waiting()

    @without_grad
    def _take(self, key: Any, params: Sequence[Tensor]) -> None:
        """Move the gradients of `params` to the host, where a thread adds them to those of earlier micro-batches."""
        place_gradients(params)
        self._copy(key, params)
        for param in params:
            param.grad = None
        self._taken.update(params)

    @without_grad
    def _copy(self, key: Any, params: Sequence[Tensor]) -> None:
        """Copy the gradients of `params` to the host, and add them to the sums there."""
        whole = [param.grad for param in params if param.grad is not None]
        for grad in whole:
            validation.check_gradient(grad)
        grads = [*map(local_shard, whole)]
        sums = [self._sum(param, grad) for param, grad in zip(params, grads, strict=True)]
        host_steps = self._optimizer.host_steps
        copies, slot = host_steps.copies(params[0].device), host_steps.next_slot()
        staged = slot.tensors([(grad.dtype, grad.shape) for grad in grads], copies)

        def add() -> tuple[()]:
            for (total, is_first), grad in zip(sums, staged, strict=True):
                total.copy_(grad) if is_first else total.add_(grad)
            return ()

        fetched = host_steps.submit(copies, slot, zip(staged, grads, strict=True), add)
        if key == "means":  # views of a bucket that DDP writes to in the next backward pass
            copies.order_after(fetched)

    def _sum(self, param: Tensor, grad: Tensor) -> tuple[Tensor, bool]:
        """Return host memory for this rank's part of a sum of gradients, and whether `grad` is the first one.

        Args:
            param: the parameter.
            grad: this rank's part of its gradient.
        """
        is_first = param not in self._sums
        if is_first:
            memory = self._memory.get(param)
            if memory is None or (memory.shape, memory.dtype) != (grad.shape, grad.dtype):
                memory = self._memory[param] = torch.empty(grad.shape, dtype=grad.dtype, device="cpu")
            self._sums[param] = dtensor_like(memory.detach(), param)
        return local_shard(self._sums[param]), is_first

    def _second_gradient(self, param: Tensor) -> str:
        return (
            f"{self._name(param)} was given a gradient after offload_gradients=True had moved the one that autograd "
            "computed; set gradients before the backward pass, change them with param.register_hook, or call "
            "optimizer.zero_grad() first"
        )


def _end_pass(reference: weakref.ref[OffloadedGradients], number: int) -> None:
    """At the end of a backward pass, take what waits, unless the step is over."""
    collector = reference()
    if collector is not None and collector._pass == number:
        with collector._lock:
            collector._take_all_waiting()
