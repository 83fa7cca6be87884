"""What stays from step to step: which parameters are stepped together, and their tables.

Building a plan validates every parameter and creates its state, which takes microseconds each; a step on a standing
plan only looks whether anything it was built on has changed.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_lowprec.optim import validation
from hf_lowprec.optim.step import Layout, Stored
from hf_lowprec.optim.work import Batch, Group, Work
from hf_lowprec.rounding import State

if TYPE_CHECKING:
    from hf_lowprec.optim.base import LowPrecisionOptimizer


class Plan:
    """The batches of an optimizer's steps, while the same parameters have gradients of the same kind.

    Raises:
        RuntimeError: a gradient is sparse, complex or not floating point.
        ValueError: a parameter, mode or dtype is not supported. States may have been created, nothing else is changed.
    """

    def __init__(self, optimizer: LowPrecisionOptimizer) -> None:
        self._optimizer = optimizer
        self._settings = _settings(optimizer)
        self._idle: list[Tensor] = []
        self._works: list[Work] = []
        self._kinds: list[tuple] = []
        self._counts: list[Tensor] = []

        for k, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                validation.check_param(param, group, f"param group {k}")
                if param.grad is not None:
                    validation.check_gradient(param.grad)
        alike: dict[tuple[Layout, torch.device], list[Work]] = defaultdict(list)
        first = 0
        for group in optimizer.param_groups:
            self._add_group(group, first, alike)
            first += len(group["params"])
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        self.batches = [Batch(layout, device, works) for (layout, device), works in alike.items()]
        self._counts = [work.state["step"] for work in self._works]

    def _add_group(self, group: Group, first: int, alike: dict[tuple[Layout, torch.device], list[Work]]) -> None:
        """Add the works of one group, whose first parameter has the index `first`."""
        specs = {dtype: self._optimizer.stored_states(group, dtype) for dtype in validation.PARAM_DTYPES}
        layouts: dict[tuple, Layout] = {}
        for index, param in enumerate(group["params"], first):
            if param.grad is None:
                self._idle.append(param)
                continue
            names = tuple(spec.name for spec in specs[param.dtype])
            state = self._initialized_state(param, group, specs[param.dtype])
            tensors = [param, param.grad, *[state[name] for name in names]]
            for tensor in tensors:
                if tensor.shape != param.shape or tensor.device != param.device:
                    validation.refuse_mismatch(index, param, state)
            dtypes = tuple(tensor.dtype for tensor in tensors)
            if dtypes not in layouts:
                layouts[dtypes] = _layout(self._optimizer, group, specs[param.dtype], dtypes)
            work = Work(param, index, group, state, names)
            alike[layouts[dtypes], param.device].append(work)
            self._works.append(work)
            self._kinds.append((_kind(param), _kind(param.grad), tensors[2:], [t.data_ptr() for t in tensors[2:]]))

    def _initialized_state(self, param: Tensor, group: Group, specs: tuple[State, ...]) -> dict[str, Any]:
        state = self._optimizer.state[param]
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
        for spec in specs:
            if spec.name not in state:
                dtype = validation.state_dtype(spec.name, param.dtype, group)
                state[spec.name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)
        return state

    def collect(self) -> bool:
        """Give every work its tensors for the coming step.

        Returns:
            False if something that the plan was built on has changed: parameters, which of them have gradients, their
            dtypes, shapes and devices, states that were replaced, settings that shape the arithmetic.
        """
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        if (
            len(params) != len(self._params)
            or not all(map(operator.is_, params, self._params))
            or self._settings != _settings(self._optimizer)
            or any(param.grad is not None for param in self._idle)
        ):
            return False
        states = self._optimizer.state
        for work, (param_kind, grad_kind, tensors, addresses), count in zip(
            self._works, self._kinds, self._counts, strict=True
        ):
            grad, state = work.param.grad, work.state
            if (
                grad is None
                or _kind(grad) != grad_kind
                or _kind(work.param) != param_kind
                or states.get(work.param) is not state
                or state.get("step") is not count
                or not all(map(operator.is_, tensors, map(state.get, work.names)))
            ):
                return False
            work.collect(grad)
            if work.addresses[2:] != addresses and not work.copied:
                return False
        return True

    def release(self) -> None:
        """Let go of gradients and copies."""
        for work in self._works:
            work.release()


def _kind(tensor: Tensor) -> tuple:
    return tensor.dtype, tensor.shape, tensor.device, tensor.layout


def _settings(optimizer: LowPrecisionOptimizer) -> list[tuple]:
    """What shapes the arithmetic of each group, beside its parameters; learning rates and the like may change."""
    return [
        (
            len(group["params"]),
            group["rounding"],
            group["state_rounding"],
            group["seed"],
            group["maximize"],
            optimizer.options(group),
        )
        for group in optimizer.param_groups
    ]


def _layout(
    optimizer: LowPrecisionOptimizer, group: Group, specs: tuple[State, ...], dtypes: tuple[torch.dtype, ...]
) -> Layout:
    """The layout of a parameter whose tensors (itself, gradient, states) have `dtypes`."""
    param_dtype, grad_dtype, *state_dtypes = dtypes
    return Layout(
        update=type(optimizer).update,
        options=tuple(sorted(optimizer.options(group).items())),
        scalars=tuple(optimizer.scalars(group, 0.0, 1)),
        rounding=group["rounding"],
        param_dtype=param_dtype,
        grad_dtype=grad_dtype,
        states=tuple(
            Stored.of(spec, dtype, group["state_rounding"]) for spec, dtype in zip(specs, state_dtypes, strict=True)
        ),
        maximize=bool(group["maximize"]),
    )
