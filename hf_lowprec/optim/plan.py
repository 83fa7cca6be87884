"""What stays from step to step: which parameters are stepped together, and their tables.

Building a plan validates every parameter and creates its state, which takes microseconds each; a step on a standing
plan only looks whether anything it was built on has changed.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_lowprec.optim import validation
from hf_lowprec.optim.allocation import zeros_apart
from hf_lowprec.optim.batch import Batch
from hf_lowprec.optim.clipping import clip_factor
from hf_lowprec.optim.matrices import check_matrix
from hf_lowprec.optim.shards import Spread, is_sharded, local, spread
from hf_lowprec.optim.step import Layout, Stored
from hf_lowprec.optim.work import Group, Work
from hf_lowprec.rounding import State

if TYPE_CHECKING:
    from hf_lowprec.optim.base import LowPrecisionOptimizer


_KIND = operator.attrgetter("dtype", "shape", "layout")

_LOW = 1 << 36
"""Freed memory begins at 0, so a tensor there lies at its offset, below this address. Others may lie there, too."""

Alike = dict[tuple[Layout, torch.device, Spread | None], list[Work]]
"""What is stepped together: works by layout, device, and how they are spread over ranks."""


class Plan:
    """The batches of an optimizer's steps, while the same parameters have gradients of the same kind.

    Attributes:
        batches: what is stepped together.
        strided: `(tensor, contiguous copy that is stepped)` of what is not contiguous.
        norm: of the coming step's gradients, where it is needed.

    Raises:
        RuntimeError: a gradient is sparse, complex or not floating point.
        ValueError: a parameter, mode or dtype is not supported. States may have been created, nothing else is changed.
    """

    def __init__(self, optimizer: LowPrecisionOptimizer) -> None:
        for k, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                validation.check_param(param, group, f"param group {k}")
                if optimizer.directed(group):
                    check_matrix(param)
                if param.grad is not None:
                    validation.check_gradient(param.grad)
        self._works: list[Work] = []
        self._tensors: list[Tensor] = []
        self.strided: list[tuple[Tensor, Tensor]] = []
        self.norm: Tensor | None = None
        alike: Alike = defaultdict(list)
        first = 0
        for group in optimizer.param_groups:
            self._add_group(optimizer, group, first, alike)
            first += len(group["params"])
        deferred = optimizer.capturable or optimizer.skip_nonfinite
        self.batches = [Batch(*key, works, deferred) for key, works in alike.items()]

        self._sharded = any(map(is_sharded, self._tensors))
        # Identities mean something as long as the objects are there.
        self._alive = [(param, state.copy()) for param, state in optimizer.state.items() if isinstance(state, dict)]
        self._fingerprint, _ = self._look(optimizer)

    def _add_group(self, optimizer: LowPrecisionOptimizer, group: Group, first: int, alike: Alike) -> None:
        """Add the works of one group, whose first parameter has the index `first`."""
        specs = {dtype: optimizer.stored_states(group, dtype) for dtype in validation.PARAM_DTYPES}
        layouts: dict[tuple, Layout] = {}
        for index, param in enumerate(group["params"], first):
            grad = param.grad
            if grad is None:
                continue
            validation.check_compensation(index, param, optimizer.state[param])
            validation.check_memory(group, index - first, index, "the parameter itself", local(param))
            validation.check_memory(group, index - first, index, "its gradient", local(grad))
            state = _initialized_state(optimizer, param, group, specs[param.dtype])
            states = [state[spec.name] for spec in specs[param.dtype]]
            for tensor in (grad, *states):
                if tensor.shape != param.shape or tensor.device != param.device:
                    validation.refuse_mismatch(index, param, state)
                validation.check_placement(index, param, tensor)
            dtypes = (param.dtype, grad.dtype, *[tensor.dtype for tensor in states])
            if dtypes not in layouts:
                layouts[dtypes] = _layout(optimizer, group, specs[param.dtype], dtypes)
            parts = [local(tensor) for tensor in (param, *states)]
            names = [spec.name for spec in specs[param.dtype]]
            for name, part in zip(names, parts[1:], strict=True):
                validation.check_memory(group, index - first, index, f"its state {name!r}", part)
            work = Work(
                index + operator.index(validation.first_parameter(group)),
                group,
                state,
                param,
                [part.contiguous() for part in parts],
                names,
            )
            alike[layouts[dtypes], param.device, spread(param)].append(work)
            self._works.append(work)
            self._tensors += (param, *states)
            pairs = zip(parts, work.written, strict=True)
            self.strided += [(part, dense) for part, dense in pairs if dense is not part]

    def collect(self, optimizer: LowPrecisionOptimizer) -> bool:
        """Give every work its gradient for the coming step.

        Returns:
            False if something that the plan was built on has changed: parameters, which of them have gradients, their
            dtypes, shapes and addresses, states that were replaced, settings that shape the arithmetic.

        Raises:
            RuntimeError: the memory of a gradient was freed.
        """
        found, grads = self._look(optimizer)
        if found != self._fingerprint:
            return False
        parts = list(map(local, grads)) if self._sharded else grads
        addresses = list(map(Tensor.data_ptr, parts))
        if min(addresses, default=_LOW) < _LOW and any(map(_is_freed, parts, addresses)):
            self._check_gradients(optimizer)
        contiguous = list(map(Tensor.contiguous, parts))
        if any(map(operator.is_not, parts, contiguous)):
            addresses = list(map(Tensor.data_ptr, contiguous))
        for work, part, address in zip(self._works, contiguous, addresses, strict=True):
            work.grad, work.grad_address = part, address
        for tensor, dense in self.strided:
            dense.copy_(tensor)
        return True

    def _check_gradients(self, optimizer: LowPrecisionOptimizer) -> None:
        index = 0
        for group in optimizer.param_groups:
            for place, param in enumerate(group["params"]):
                if param.grad is not None:
                    validation.check_memory(group, place, index, "its gradient", local(param.grad))
                index += 1

    def _look(self, optimizer: LowPrecisionOptimizer) -> tuple[tuple, list[Tensor]]:
        """What decides whether the plan still holds, and the gradients; a dozen calls per parameter, all from C."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        maybe = [param.grad for param in params]
        grads = [grad for grad in maybe if grad is not None]
        states = optimizer.state.values()
        try:
            stored = list(map(id, chain.from_iterable(map(dict.values, states))))
        except TypeError:  # hooks may leave something else there, under keys that are no parameters
            stored = [id(tensor) for state in states if isinstance(state, dict) for tensor in state.values()]
        tensors = [local(tensor) for tensor in self._tensors] if self._sharded else self._tensors
        found = (
            _settings(optimizer),
            list(map(id, optimizer.param_groups)),
            list(map(id, params)),
            [grad is None for grad in maybe],
            list(map(_KIND, params)),
            list(map(_KIND, grads)),
            list(map(Tensor.is_contiguous, params)),
            list(map(Tensor.data_ptr, tensors)),
            list(map(id, states)),
            stored,
            [getattr(grad, "placements", None) for grad in grads] if self._sharded else None,
        )
        return found, grads

    def limit(self, max_norm: float | None, factor: Tensor | None, skip_nonfinite: bool) -> None:
        """Clip the coming step by `factor`, if it is known, else by what `norm` and `max_norm` give; let `norm` decide
        whether the step is taken.
        """
        assert self.norm is not None
        if max_norm is not None and factor is None:
            factor = clip_factor(self.norm, max_norm)
        for batch in self.batches:
            if max_norm is not None and factor is not None:
                batch.clip = factor.to(batch.device)
            if skip_nonfinite:
                batch.enabled = self.norm.isfinite().to(batch.device)

    def copy_back(self) -> None:
        """Write what was stepped in a contiguous copy where it belongs."""
        for tensor, dense in self.strided:
            tensor.copy_(dense)

    def release(self) -> None:
        """Let go of what belongs to one step."""
        for batch in self.batches:
            batch.release()


def _is_freed(part: Tensor, address: int) -> bool:
    return address == part.storage_offset() * part.element_size() and part.numel() > 0


def _initialized_state(
    optimizer: LowPrecisionOptimizer, param: Tensor, group: Group, specs: tuple[State, ...]
) -> dict[str, Any]:
    state = optimizer.state[param]
    if "step" not in state:
        state["step"] = torch.tensor(0, dtype=torch.int64, device="cpu")
    for place, spec in enumerate(specs):
        if spec.name not in state:
            dtype = validation.state_dtype(spec.name, param.dtype, group)
            state[spec.name] = zeros_apart(param, dtype, place, len(specs))
    return state


def _settings(optimizer: LowPrecisionOptimizer) -> list[tuple]:
    """What shapes the work on each group, apart from its parameters; learning rates and the like may change."""
    return [
        (
            optimizer.backend,
            optimizer.capturable,
            optimizer.limit is None,
            optimizer.skip_nonfinite,
            len(group["params"]),
            group["rounding"],
            group["state_rounding"],
            group["seed"],
            validation.first_parameter(group),
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
        clipped=optimizer.limit is not None,
        measure=optimizer.measure,
        directed=optimizer.directed(group),
    )
