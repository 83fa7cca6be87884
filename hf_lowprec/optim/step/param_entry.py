"""One parameter of a step: its tensors in plain memory, and where the optimizer keeps them.

Kernels read and write by address. *Plain memory* has a tensor's elements one after the other, with their real values.
Other tensors are copied: those that are not contiguous; those that torch marks instead of computing (`is_neg()`: memory
has the other sign; zeros without memory, which `torch.sgn` leaves as gradients); those that communication has yet to
write; and subclasses of Tensor that wrap other tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_lowprec.optim.algorithm_interface import Algorithm, ParamGroup
from hf_lowprec.optim.param_groups import number_of
from hf_lowprec.optim.sharding import is_sharded, local_shard, placements_of_mean, when_written
from hf_lowprec.optim.state.fp32_weights import start_with_low_bits, states_of_other_modes
from hf_lowprec.optim.state.states import convert_factored, state_tensors, zeros_apart
from hf_lowprec.optim.step.kernel_spec import COLUMN_FACTOR, ORTHOGONALIZED, ROW_FACTOR, KernelSpec
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.rounding.attached_low_bits import low_bits_belong, remove_low_bits
from hf_lowprec.rounding.modes import AUXILIARY_STATES

_LOW = 1 << 36
"""The address of a tensor without memory is its offset, which is below this number. Other tensors may be there, too."""


class PlainCopy(NamedTuple):
    """A parameter or state that is not in plain memory, and the copy that is stepped instead."""

    original: Tensor
    copy: Tensor


class ParamEntry:
    """One parameter's tensors and settings, as a step needs them. Building it creates missing states.

    Attributes:
        group: its param group.
        number: the parameter's number in the random stream: its position in the optimizer, counted from the group's
            `first_parameter`.
        optimizer_state: its entry in `optimizer.state`.
        param: the user's parameter, which may be a DTensor.
        weight: this rank's part of it.
        stored: its states.
        states: this rank's part of each state of the parameter's shape, by name and in the order of the spec.
        means: this rank's part of the states that are means over rows or columns, flat, by the dimension: -1 and -2.
        plain_copies: copies of the tensors above that are not in plain memory.
        grad_dtype: the dtype of its gradient.
        grad: this rank's part of the gradient; None outside a step, so that it is not kept alive.
        orthogonalized: the BF16 matrix that the algorithm made from the momentum, of the shape of `weight`, from when
            it is computed until the entry is stepped; None at other times, and for other algorithms.
        factors: the row and column factors, FP32 and flat, during a step; None at other times, and for other
            algorithms.

    Args:
        optimizer: the optimizer.
        group: see above.
        position: the parameter's position in the group.
        index: its position in the optimizer.
        grad: its gradient.

    Raises:
        RuntimeError: the memory of a tensor was freed.
        ValueError: shapes, devices or placements do not match.
    """

    def __init__(self, optimizer: Algorithm, group: ParamGroup, position: int, index: int, grad: Tensor) -> None:
        self.group, self._position, self._index = group, position, index
        self.param: Tensor = group["params"][position]
        self.number = number_of(self.param, index, group)
        self.optimizer_state: dict[str, Any] = optimizer.state[self.param]
        self.plain_copies: list[PlainCopy] = []
        self._check_compensation()
        self.weight = self._in_plain_memory("the parameter itself", self.param)
        self.check_memory("its gradient", local_shard(grad))
        convert_factored(optimizer, group, self.param, self.optimizer_state)
        self.stored = state_tensors(optimizer, group, self.param)
        self._add_missing_states(optimizer)
        self._check_layouts(optimizer, grad)
        self.states: dict[str, Tensor] = {}
        self.means: dict[int, Tensor] = {}
        for state in self.stored:
            part = self._in_plain_memory(f"its state {state.key!r}", self.optimizer_state[state.key])
            if state.mean_over is None:
                self.states[state.name] = part
            else:
                self.means[state.mean_over] = part.view(-1)
        self.grad_dtype = local_shard(grad).dtype
        self.grad: Tensor | None = None
        self.orthogonalized: Tensor | None = None
        self.factors: tuple[Tensor, Tensor] | None = None

    def with_weight(self, weight: Tensor) -> ParamEntry:
        """Return a copy that steps `weight` instead, and counts its own steps."""
        entry = copy.copy(self)
        entry.weight, entry.optimizer_state = weight, dict(self.optimizer_state)
        return entry

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, in the order of `KernelSpec.tensors`; some inputs only once they are computed."""
        assert self.grad is not None, "outside of a step there is no gradient"
        inputs = {"grad": self.grad} | ({} if self.orthogonalized is None else {ORTHOGONALIZED: self.orthogonalized})
        factors = {} if self.factors is None else dict(zip((ROW_FACTOR, COLUMN_FACTOR), self.factors, strict=True))
        return {"param": self.weight, **inputs, **factors, **self.states}

    @property
    def layout(self) -> tuple[Any, ...]:
        """Return what its spec depends on. Parameters of one optimizer with equal layouts have the same spec."""
        states = ((state.name, state.dtype) for state in self.stored)
        return id(self.group), self.param.dtype, self.grad_dtype, *states

    def spec(self, optimizer: Algorithm, clipped: bool) -> KernelSpec:
        """Return how `optimizer` steps it; `clipped` says whether gradients are clipped."""
        group = self.group
        feeds_back = self.param.dtype in LOW_PRECISION_DTYPES and optimizer.feeds_back(group)
        return KernelSpec(
            update=type(optimizer).update,
            options=tuple(sorted(optimizer.options(group).items())),
            scalars=tuple(optimizer.scalars(group, 0.0, 1)),
            rounding=group["rounding"],
            param_dtype=self.param.dtype,
            grad_dtype=self.grad_dtype,
            states=tuple(state for state in self.stored if state.mean_over is None),
            maximize=bool(group["maximize"]),
            clipped=clipped,
            tensor_means=tuple(optimizer.tensor_means(group).items()),
            orthogonalizes=optimizer.orthogonalizes(group),
            factored=optimizer.averaged_square if self.means else None,
            feed_back=optimizer.feed_back if feeds_back else None,
        )

    def check_memory(self, what: str, part: Tensor) -> None:
        """Raise RuntimeError if the memory of `part`, called `what` in the message, was freed."""
        layout = () if part.is_contiguous() else zip(part.shape, part.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in layout) if layout else part.numel() - 1
        needed = (part.storage_offset() + last + 1) * part.element_size() if part.numel() else 0
        available = part.untyped_storage().nbytes()
        if available < needed:
            name = f" ({self.group['param_names'][self._position]})" if "param_names" in self.group else ""
            raise RuntimeError(
                f"parameter {self._index}{name} cannot be stepped: the memory of {what} was freed (its storage has "
                f"{available} bytes and {needed} are needed), as with untyped_storage().resize_(0); call step() before "
                "it is freed"
            )

    def _check_compensation(self) -> None:
        """Raise ValueError if the parameter was cast to FP32 after steps with a compensation or remainder.

        An FP32 parameter is stepped without them, so their content would be lost silently.
        """
        for name in AUXILIARY_STATES.keys() & self.optimizer_state.keys() if self.param.dtype == torch.float32 else ():
            joined = f"hf_lowprec.rounding.fp32_value(param.data, optimizer.state[param].pop({name!r}))"
            raise ValueError(
                f"parameter {self._index} is float32 and its state has a {name!r}: it was cast after its first step. "
                f"Merge them, param.data.copy_({joined}), or build a new optimizer"
            )

    def _in_plain_memory(self, what: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of a parameter or state or, if not in plain memory, a copy that steps write back."""
        part = local_shard(tensor)
        self.check_memory(what, part)
        stepped = in_plain_memory(part)
        if stepped is not part:
            self.plain_copies.append(PlainCopy(part, stepped))
        return stepped

    def _add_missing_states(self, optimizer: Algorithm) -> None:
        """Create missing states, with their initial values.

        A compensation or remainder that replaces another one is left at zero, see `convert_states`.
        """
        missing: dict[str, Any] = {}
        if "step" not in self.optimizer_state:
            missing["step"] = torch.zeros((), dtype=torch.int64, device="cpu")
        for k, state in enumerate(self.stored):
            if state.key not in self.optimizer_state:
                device = optimizer.state_device(self.param)
                missing[state.key] = zeros_apart(self.param, state, k, len(self.stored), device)
                if state.holds_low_bits and not states_of_other_modes(self.group, self.optimizer_state):
                    start_with_low_bits(missing[state.key], self.param)
        # All at once and filled: if memory runs out earlier, the next step finds none and begins again.
        self.optimizer_state.update(missing)
        remove_low_bits(self.param)
        low_bits_belong(self.param)

    def _check_layouts(self, optimizer: Algorithm, grad: Tensor) -> None:
        """Raise ValueError unless the gradient and states have their shapes, devices and placements."""
        param, device = self.param, optimizer.state_device(self.param)
        own = {state.key: (state.shape_for(param.shape), state.mean_over) for state in self.stored}
        former = states_of_other_modes(self.group, self.optimizer_state)
        layouts = {name: own.get(name, (param.shape, None)) for name in (*sorted(former), *own)}
        of_states = ((self.optimizer_state[name], *layout, device) for name, layout in layouts.items())
        of_grad = grad, param.shape, None, optimizer.gradient_device(param)
        for tensor, shape, mean_over, expected_device in (of_grad, *of_states):
            if tensor.shape != shape or tensor.device != expected_device:
                tensors = {
                    "grad": grad,
                    **{name: value for name, value in self.optimizer_state.items() if name != "step"},
                }
                listed = ", ".join(f"{name} {tuple(t.shape)} on {t.device}" for name, t in tensors.items())
                raise ValueError(
                    f"parameter {self._index} has shape {tuple(param.shape)} on {param.device} and {listed}: it was "
                    "resized or moved after its first step; build a new optimizer, or change its state accordingly"
                )
            self._check_placement(tensor, mean_over)

    def _check_placement(self, tensor: Tensor, mean_over: int | None) -> None:
        """Raise ValueError unless a gradient or state is placed like the parameter and has shards of its shape.

        A mean over the dimension `mean_over` is not sharded there.
        """
        param, actual = self.param, getattr(tensor, "placements", None)
        expected = placements_of_mean(param, mean_over) if is_sharded(param) else None
        if actual != expected:
            raise ValueError(
                f"parameter {self._index} is placed as {expected or 'a plain tensor'} and its gradient or a state as "
                f"{actual or 'a plain tensor'}; these must agree (reduce the gradient first, or build a new optimizer)"
            )
        shard, own = local_shard(tensor), local_shard(param)
        if mean_over is None and tensor.shape == param.shape and shard.shape != own.shape:
            raise ValueError(
                f"parameter {self._index} of shape {tuple(param.shape)} has a shard of shape {tuple(own.shape)} here, "
                f"and its gradient or a state has one of {tuple(shard.shape)}; these must agree"
            )


def in_plain_memory(tensor: Tensor) -> Tensor:
    """Return `tensor` if it is in plain memory; otherwise, wait for communication that writes it, and copy it."""
    tensor = when_written(tensor)
    if tensor.is_contiguous() and not tensor.is_neg() and (Tensor.data_ptr(tensor) >= _LOW or _has_memory(tensor)):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def are_in_plain_memory(tensors: Sequence[Tensor], addresses: Sequence[int]) -> bool:
    """Return whether all tensors at these addresses are in plain memory; runs in C if no address is low."""
    return (
        all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
        and (min(addresses, default=_LOW) >= _LOW or all(map(_has_memory, tensors)))
    )


def may_be_freed(tensors: Sequence[Tensor], addresses: Sequence[int]) -> bool:
    """Return whether the memory of a tensor may have been freed; `ParamEntry.check_memory` makes sure."""
    return min(addresses, default=_LOW) < _LOW and any(
        address == tensor.storage_offset() * tensor.element_size() and tensor.numel() > 0
        for tensor, address in zip(tensors, addresses, strict=True)
    )


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and not tensor._is_zerotensor()
