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
from hf_lowprec.optim.hidden_matrices import check_matrix
from hf_lowprec.optim.sharding import Sharding, is_sharded, local, sharding_of
from hf_lowprec.optim.step.clipping import clip_factor
from hf_lowprec.optim.step.fused import StepSpec, StoredState
from hf_lowprec.optim.step.fused_group import FusedGroup
from hf_lowprec.optim.step.param_entry import ParamEntry
from hf_lowprec.optim.step.state_allocation import zeros_apart
from hf_lowprec.rounding import State

if TYPE_CHECKING:
    from hf_lowprec.optim.algorithm import Algorithm, ParamGroup


_KIND = operator.attrgetter("dtype", "shape", "layout")

_LOW = 1 << 36
"""Freed memory begins at 0, so a tensor there lies at its offset, below this address. Others may lie there, too."""

Alike = dict[tuple[StepSpec, torch.device, Sharding | None], list[ParamEntry]]
"""What is stepped together: entries by step_spec, device, and how they are spread over ranks."""


class Plan:
    """The fused_groups of an optimizer's steps, while the same parameters have gradients of the same kind.

    Attributes:
        fused_groups: what is stepped together.
        strided: `(tensor, contiguous copy that is stepped)` of what is not contiguous.
        norm: of the coming step's gradients, where it is needed.

    Raises:
        RuntimeError: a gradient is sparse, complex or not floating point.
        ValueError: a parameter, mode or dtype is not supported. States may have been created, nothing else is changed.
    """

    def __init__(self, optimizer: Algorithm) -> None:
        for k, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                validation.check_param(param, group, f"param group {k}")
                if optimizer.orthogonalizes(group):
                    check_matrix(param)
                if param.grad is not None:
                    validation.check_gradient(param.grad)
        self._works: list[ParamEntry] = []
        self._tensors: list[Tensor] = []
        self.strided: list[tuple[Tensor, Tensor]] = []
        self.norm: Tensor | None = None
        alike: Alike = defaultdict(list)
        first = 0
        for group in optimizer.param_groups:
            self._add_group(optimizer, group, first, alike)
            first += len(group["params"])
        device_scalars = optimizer.capturable or optimizer.skip_nonfinite
        self.fused_groups = [FusedGroup(*key, entries, device_scalars) for key, entries in alike.items()]

        self._sharded = any(map(is_sharded, self._tensors))
        # Identities mean something as long as the objects are there.
        self._alive = [(param, state.copy()) for param, state in optimizer.state.items() if isinstance(state, dict)]
        self._fingerprint, _ = self._look(optimizer)

    def _add_group(self, optimizer: Algorithm, group: ParamGroup, first: int, alike: Alike) -> None:
        """Add the entries of one group, whose first parameter has the index `first`."""
        specs = {dtype: optimizer.stored_states(group, dtype) for dtype in validation.PARAM_DTYPES}
        step_specs: dict[tuple, StepSpec] = {}
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
            if dtypes not in step_specs:
                step_specs[dtypes] = _step_spec(optimizer, group, specs[param.dtype], dtypes)
            parts = [local(tensor) for tensor in (param, *states)]
            names = [spec.name for spec in specs[param.dtype]]
            for name, part in zip(names, parts[1:], strict=True):
                validation.check_memory(group, index - first, index, f"its state {name!r}", part)
            entry = ParamEntry(
                index + operator.index(validation.first_parameter(group)),
                group,
                state,
                param,
                [part.contiguous() for part in parts],
                names,
            )
            alike[step_specs[dtypes], param.device, sharding_of(param)].append(entry)
            self._works.append(entry)
            self._tensors += (param, *states)
            pairs = zip(parts, entry.written, strict=True)
            self.strided += [(part, dense) for part, dense in pairs if dense is not part]

    def collect(self, optimizer: Algorithm) -> bool:
        """Give every entry its gradient for the coming step.

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
        for entry, part, address in zip(self._works, contiguous, addresses, strict=True):
            entry.grad, entry.grad_address = part, address
        for tensor, dense in self.strided:
            dense.copy_(tensor)
        return True

    def _check_gradients(self, optimizer: Algorithm) -> None:
        index = 0
        for group in optimizer.param_groups:
            for place, param in enumerate(group["params"]):
                if param.grad is not None:
                    validation.check_memory(group, place, index, "its gradient", local(param.grad))
                index += 1

    def _look(self, optimizer: Algorithm) -> tuple[tuple, list[Tensor]]:
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
        for fused_group in self.fused_groups:
            if max_norm is not None and factor is not None:
                fused_group.clip = factor.to(fused_group.device)
            if skip_nonfinite:
                fused_group.enabled = self.norm.isfinite().to(fused_group.device)

    def copy_back(self) -> None:
        """Write what was stepped in a contiguous copy where it belongs."""
        for tensor, dense in self.strided:
            tensor.copy_(dense)

    def release(self) -> None:
        """Let go of what belongs to one step."""
        for fused_group in self.fused_groups:
            fused_group.release()


def _is_freed(part: Tensor, address: int) -> bool:
    return address == part.storage_offset() * part.element_size() and part.numel() > 0


def _initialized_state(
    optimizer: Algorithm, param: Tensor, group: ParamGroup, specs: tuple[State, ...]
) -> dict[str, Any]:
    state = optimizer.state[param]
    if "step" not in state:
        state["step"] = torch.tensor(0, dtype=torch.int64, device="cpu")
    for place, spec in enumerate(specs):
        if spec.name not in state:
            dtype = validation.state_dtype(spec.name, param.dtype, group)
            state[spec.name] = zeros_apart(param, dtype, place, len(specs))
    return state


def _settings(optimizer: Algorithm) -> list[tuple]:
    """What shapes the entry on each group, apart from its parameters; learning rates and the like may change."""
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


def _step_spec(
    optimizer: Algorithm, group: ParamGroup, specs: tuple[State, ...], dtypes: tuple[torch.dtype, ...]
) -> StepSpec:
    """The step_spec of a parameter whose tensors (itself, gradient, states) have `dtypes`."""
    param_dtype, grad_dtype, *state_dtypes = dtypes
    return StepSpec(
        update=type(optimizer).update,
        options=tuple(sorted(optimizer.options(group).items())),
        scalars=tuple(optimizer.scalars(group, 0.0, 1)),
        rounding=group["rounding"],
        param_dtype=param_dtype,
        grad_dtype=grad_dtype,
        states=tuple(
            StoredState.of(spec, dtype, group["state_rounding"])
            for spec, dtype in zip(specs, state_dtypes, strict=True)
        ),
        maximize=bool(group["maximize"]),
        clipped=optimizer.limit is not None,
        tensor_mean=optimizer.tensor_mean,
        orthogonalizes=optimizer.orthogonalizes(group),
    )
