"""The plan of a step: which parameters are stepped together, and their tables; reused from step to step.

Building a plan checks every parameter and creates its states, which takes microseconds per parameter. A step with an
existing plan only checks that nothing the plan depends on has changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_lowprec.optim import validation
from hf_lowprec.optim.algorithm_interface import Algorithm, ParamGroup
from hf_lowprec.optim.parameter_numbers import number_of
from hf_lowprec.optim.plain_memory import are_in_plain_memory, in_plain_memory, may_be_freed
from hf_lowprec.optim.sharding import Sharding, local_shard, sharding_of
from hf_lowprec.optim.state.fp32_weights import start_with_low_bits
from hf_lowprec.optim.state.mode_change import convert_states, states_of_other_modes
from hf_lowprec.optim.state.state_tensors import StateTensor, state_tensors, zeros_apart
from hf_lowprec.optim.state.states_in_8_bits import key_of
from hf_lowprec.optim.step import interrupts
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.fingerprint import Fingerprint, params_of
from hf_lowprec.optim.step.fused_group import FusedGroup
from hf_lowprec.optim.step.kernel_spec import KernelSpec, StoredState
from hf_lowprec.optim.step.param_entry import ParamEntry
from hf_lowprec.rounding import State
from hf_lowprec.rounding.attached_low_bits import low_bits_belong, remove_low_bits


class _GroupKey(NamedTuple):
    """Properties that parameters must share to be in one fused group."""

    spec: KernelSpec
    device: torch.device
    sharding: Sharding | None


@dataclass(frozen=True)
class PlainCopy:
    """A parameter or state that is not in plain memory, and the copy that is stepped in its place."""

    original: Tensor
    copy: Tensor


class StepPlan:
    """The fused groups of an optimizer's steps, while the same parameters have gradients of the same kind.

    Building it creates missing states. If a group was given another rounding mode, it also converts weights and low
    bits to that mode, see `mode_change.py`. As a context manager, it releases what belongs to one step when its block
    ends.

    Attributes:
        fused_groups: the parameters, in groups that are stepped together. Groups of orthogonalized matrices come first,
            and those with the largest parameter before the others: their temporaries are the largest, and if memory
            runs out, nothing has been changed yet.
        backend_steps: how each of them is stepped, in the same order; set by the optimizer.
        plain_copies: parameters and states that are not in plain memory.
        param_dtypes: the dtypes of the parameters that are stepped, by parameter.

    Args:
        optimizer: whose parameters have gradients.
        clipped: whether gradients are clipped.
        param_ids: identities of the parameters to step, if not all that have gradients; see `gradient_release/`.

    Raises:
        RuntimeError: a gradient is sparse, complex or not floating point.
        ValueError: a parameter, mode or dtype is not supported. States may have been created, nothing else is changed.
    """

    def __init__(self, optimizer: Algorithm, clipped: bool, param_ids: Set[int] | None = None) -> None:
        _check_params(optimizer, set(map(id, params_of(optimizer, param_ids))))
        self.backend_steps: list[BackendStep] = []
        self.plain_copies: list[PlainCopy] = []
        self._in_new_mode: list[ParamEntry] = []
        entries_by_key: dict[_GroupKey, list[ParamEntry]] = defaultdict(list)
        first = 0
        for group in optimizer.param_groups:
            self._add_param_group(optimizer, group, first, clipped, param_ids, entries_by_key)
            first += len(group["params"])
        for entry in self._in_new_mode:  # all entries have been checked
            with interrupts.deferred():
                convert_states(optimizer, entry.param, entry.group, entry.number)
        fused_groups = [FusedGroup(*key, entries, optimizer.skip_nonfinite) for key, entries in entries_by_key.items()]
        self.fused_groups = sorted(fused_groups, key=_size_of_temporaries, reverse=True)

        entries = [entry for fused_group in self.fused_groups for entry in fused_group.entries]
        self.param_dtypes = {entry.param: entry.param.dtype for entry in entries}
        self._fingerprint = Fingerprint(
            optimizer,
            clipped,
            param_ids,
            stepped=[entry.param for entry in entries],
            states=[
                entry.optimizer_state[key_of(name, part.dtype)]
                for entry in entries
                for name, part in (entry.states | entry.means).items()
            ],
        )

    def _add_param_group(
        self,
        optimizer: Algorithm,
        group: ParamGroup,
        first: int,
        clipped: bool,
        param_ids: Set[int] | None,
        entries_by_key: dict[_GroupKey, list[ParamEntry]],
    ) -> None:
        """Add the entries of one parameter group, whose first parameter has the position `first` in the optimizer."""
        specs: dict[Any, KernelSpec] = {}
        for index, param in enumerate(group["params"], first):
            grad = optimizer.gradient_of(param)
            if grad is None or (param_ids is not None and id(param) not in param_ids):
                continue
            validation.check_compensation(index, param, optimizer.state[param])
            validation.check_memory(group, index - first, index, "the parameter itself", local_shard(param))
            validation.check_memory(group, index - first, index, "its gradient", local_shard(grad))
            states = state_tensors(optimizer, group, param)
            number = number_of(param, index, group)
            optimizer_state = _initialized_state(optimizer, param, group, states)
            former = states_of_other_modes(group, optimizer_state)
            _check_shapes(optimizer, index, param, grad, states, sorted(former))
            parts = {tensor.key: local_shard(optimizer_state[tensor.key]) for tensor in states}
            of_elements = [tensor for tensor in states if tensor.state.mean_over is None]
            for name, part in parts.items():
                validation.check_memory(group, index - first, index, f"its state {name!r}", part)
            dtypes = (param.dtype, local_shard(grad).dtype, *(parts[tensor.key].dtype for tensor in of_elements))
            stored = tuple(tensor.state for tensor in of_elements)
            means = tuple(tensor.state.name for tensor in states if tensor.state.mean_over is not None)
            if (stored, dtypes, means) not in specs:
                specs[stored, dtypes, means] = step_spec(optimizer, group, stored, dtypes, clipped, bool(means))
            entry = ParamEntry(
                number=number,
                group=group,
                optimizer_state=optimizer_state,
                param=param,
                weight=self._stepped(local_shard(param)),
                states={tensor.state.name: self._stepped(parts[tensor.key]) for tensor in of_elements},
                means={name: self._stepped(parts[name]).view(-1) for name in means},
            )
            entries_by_key[_GroupKey(specs[stored, dtypes, means], param.device, sharding_of(param))].append(entry)
            if former:
                self._in_new_mode.append(entry)

    def _stepped(self, tensor: Tensor) -> Tensor:
        """`tensor` if it is in plain memory; else a copy that every step begins with and writes back."""
        stepped = in_plain_memory(tensor)
        if stepped is not tensor:
            self.plain_copies.append(PlainCopy(tensor, stepped))
        return stepped

    def collect_gradients(
        self, optimizer: Algorithm, clipped: bool, param_ids: Set[int] | None = None, norm_only: bool = False
    ) -> bool:
        """Give every entry its gradient for the coming step, or for the norm before it.

        Args:
            optimizer: as the constructor's, like the next two.
            clipped: see there.
            param_ids: see there.
            norm_only: whether only the norm of the gradients is computed. Weights and states are not looked at.

        Returns:
            False if something that the plan was built on has changed, see `fingerprint.py`.

        Raises:
            RuntimeError: the memory of a gradient was freed.
        """
        gradients = self._fingerprint.gradients(optimizer, clipped, param_ids, norm_only)
        if gradients is None:
            return False
        parts, addresses = gradients
        if may_be_freed(parts, addresses):
            _check_gradient_memory(optimizer)
        if not are_in_plain_memory(parts, addresses):
            parts = list(map(in_plain_memory, parts))
            addresses = list(map(Tensor.data_ptr, parts))
        first = 0
        for fused_group in self.fused_groups:
            end = first + len(fused_group.entries)
            fused_group.set_gradients(parts[first:end], addresses[first:end])
            first = end
        if not norm_only:
            for plain in self.plain_copies:
                plain.copy.copy_(plain.original)
        return True

    def copy_back(self) -> None:
        """Copy the stepped copies back to their tensors."""
        for plain in self.plain_copies:
            plain.original.copy_(plain.copy)

    def release(self) -> None:
        """Release what belongs to a single step."""
        for backend_step in self.backend_steps:
            backend_step.release_tables()
        for fused_group in self.fused_groups:
            fused_group.release()

    def __enter__(self) -> StepPlan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def _size_of_temporaries(fused_group: FusedGroup) -> tuple[bool, int]:
    """A key that sorts groups by the memory their temporaries take. All ranks compute the same one."""
    return fused_group.spec.orthogonalizes, max(entry.param.numel() for entry in fused_group.entries)


def _check_params(optimizer: Algorithm, param_ids: Set[int]) -> None:
    """Raise RuntimeError or ValueError unless the parameters with these identities can be stepped."""
    with_grad = {
        index: param
        for index, param in enumerate(params_of(optimizer))
        if id(param) in param_ids and optimizer.gradient_of(param) is not None
    }
    validation.check_apart(with_grad)
    validation.warn_of_fp32_weights(optimizer)
    for k, group in enumerate(optimizer.param_groups):
        for param in (param for param in group["params"] if id(param) in param_ids):
            validation.check_param(param, group, f"param group {k}")
            if optimizer.orthogonalizes(group):
                validation.check_matrix(param)
            if (grad := optimizer.gradient_of(param)) is not None:
                validation.check_gradient(grad)


def _check_gradient_memory(optimizer: Algorithm) -> None:
    """Raise RuntimeError, naming the parameter, if the memory of a gradient was freed."""
    index = 0
    for group in optimizer.param_groups:
        for position, param in enumerate(group["params"]):
            if (grad := optimizer.gradient_of(param)) is not None:
                validation.check_memory(group, position, index, "its gradient", local_shard(grad))
            index += 1


def _check_shapes(
    optimizer: Algorithm, index: int, param: Tensor, grad: Tensor, states: list[StateTensor], former: list[str]
) -> None:
    """Raise ValueError unless the gradient and states of `param` have their shapes, devices and placements.

    Args:
        optimizer: the optimizer of `param`.
        index: the parameter's position in the optimizer.
        param: the parameter.
        grad: its gradient.
        states: the states that it has.
        former: names of those that it had in another rounding mode.
    """
    optimizer_state, state_device = optimizer.state[param], optimizer.state_device(param)
    shapes: dict[str, tuple[torch.Size, int | None]] = dict.fromkeys(former, (param.shape, None))
    shapes |= {tensor.key: (tensor.shape, tensor.state.mean_over) for tensor in states}
    of_states = ((optimizer_state[name], *each, state_device) for name, each in shapes.items())
    of_grad = grad, param.shape, None, optimizer.gradient_device(param)
    for tensor, shape, mean_over, device in (of_grad, *of_states):
        if tensor.shape != shape or tensor.device != device:
            validation.raise_mismatch(index, param, grad, optimizer_state)
        validation.check_placement(index, param, tensor, mean_over)


def _initialized_state(
    optimizer: Algorithm, param: Tensor, group: ParamGroup, states: list[StateTensor]
) -> dict[str, Any]:
    """The parameter's entry in `optimizer.state`, with initial values where `states` are missing.

    A compensation or remainder that takes the place of another one is left at zero, see `mode_change.py`.

    Args:
        optimizer: the optimizer.
        param: the parameter.
        group: its group.
        states: the states that it has.
    """
    optimizer_state: dict[str, Any] = optimizer.state[param]
    missing: dict[str, Any] = {}
    if "step" not in optimizer_state:
        missing["step"] = torch.zeros((), dtype=torch.int64, device="cpu")
    for k, tensor in enumerate(states):
        state, key = tensor.state, tensor.key
        if key not in optimizer_state:
            missing[key] = zeros_apart(param, tensor, k, len(states), optimizer.state_device(param))
            if state.holds_low_bits and not states_of_other_modes(group, optimizer_state):
                start_with_low_bits(missing[state.name], param)
    # All at once and filled: if memory runs out before, the next step finds none and begins again.
    optimizer_state.update(missing)
    remove_low_bits(param)
    low_bits_belong(param)
    return optimizer_state


def step_spec(
    optimizer: Algorithm,
    group: ParamGroup,
    states: tuple[State, ...],
    dtypes: tuple[torch.dtype, ...],
    clipped: bool,
    factored: bool,
) -> KernelSpec:
    """The spec of parameters whose tensors (themselves, gradient, states of their shape) have `dtypes`."""
    param_dtype, grad_dtype, *state_dtypes = dtypes
    return KernelSpec(
        update=type(optimizer).update,
        options=tuple(sorted(optimizer.options(group).items())),
        scalars=tuple(optimizer.scalars(group, 0.0, 1)),
        rounding=group["rounding"],
        param_dtype=param_dtype,
        grad_dtype=grad_dtype,
        states=tuple(
            StoredState.of(state, dtype, group["state_rounding"])
            for state, dtype in zip(states, state_dtypes, strict=True)
        ),
        maximize=bool(group["maximize"]),
        clipped=clipped,
        tensor_means=tuple(optimizer.tensor_means(group).items()),
        orthogonalizes=optimizer.orthogonalizes(group),
        factored=optimizer.factored if factored else None,
    )
