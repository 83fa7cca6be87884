"""The plan of a step: which parameters are stepped together, and their tables; reused from step to step.

Building a plan checks every parameter and creates its states, which takes microseconds per parameter. A step with an
existing plan only checks that nothing the plan depends on has changed.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Set
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim import validation
from hf_lowprec.optim.algorithm_interface import Algorithm
from hf_lowprec.optim.sharding import Sharding, full_shape, sharding_of
from hf_lowprec.optim.state.fp32_weights import convert_states, states_of_other_modes
from hf_lowprec.optim.state.states import dtype_in, new_state_dtype
from hf_lowprec.optim.step import interrupts
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.fingerprint import Fingerprint
from hf_lowprec.optim.step.fused_group import FusedGroup
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.optim.step.param_entry import ParamEntry, are_in_plain_memory, in_plain_memory, may_be_freed
from hf_lowprec.rounding import dtype_name


class StepPlan:
    """The fused groups of an optimizer's steps, while the same parameters have gradients of the same kind.

    Building it creates missing states. If a group was given another rounding mode, it also converts weights and low
    bits to that mode, see `convert_states`. As a context manager, it releases what belongs to one step when its block
    ends.

    Attributes:
        fused_groups: the parameters, in groups that are stepped together. Groups of orthogonalized matrices come first,
            and those with the largest parameter before the others: their temporaries are the largest, and if memory
            runs out, nothing has been changed yet.
        backend_steps: the backend's step of each group, in the same order; set by the optimizer.
        plain_copies: parameters and states that are not in plain memory.

    Args:
        optimizer: an optimizer whose parameters have gradients.
        clipped: whether gradients are clipped.
        param_ids: identities of the parameters to step, if not all that have gradients; see `gradients/release.py`.

    Raises:
        RuntimeError: a gradient is sparse, complex or not floating point.
        ValueError: a parameter, mode or dtype is not supported. States may have been created, nothing else is changed.
    """

    def __init__(self, optimizer: Algorithm, clipped: bool, param_ids: Set[int] | None = None) -> None:
        self.backend_steps: list[BackendStep] = []
        entries = _entries(optimizer, param_ids)
        for entry in entries:
            if states_of_other_modes(entry.group, entry.optimizer_state):
                with interrupts.deferred():
                    convert_states(entry.optimizer_state, entry.param, entry.group, entry.number)
        specs: dict[Any, KernelSpec] = {}
        alike: dict[tuple[KernelSpec, torch.device, Sharding | None], list[ParamEntry]] = defaultdict(list)
        for entry in entries:
            if entry.layout not in specs:
                specs[entry.layout] = entry.spec(optimizer, clipped)
            alike[specs[entry.layout], entry.param.device, sharding_of(entry.param)].append(entry)
        fused_groups = [
            FusedGroup(*key, part, optimizer.skip_nonfinite)
            for key, same in alike.items()
            for part in _parts(same, optimizer.elements_at_once)
        ]
        self.fused_groups = sorted(fused_groups, key=_size_of_temporaries, reverse=True)
        self._entries = [entry for fused_group in self.fused_groups for entry in fused_group.entries]
        self.plain_copies = [plain for entry in entries for plain in entry.plain_copies]
        self._fingerprint = Fingerprint(
            optimizer,
            clipped,
            param_ids,
            stepped=[entry.param for entry in self._entries],
            states=[entry.optimizer_state[tensor.key] for entry in entries for tensor in entry.stored],
        )

    def warn_about_changed_dtypes(self, optimizer: Algorithm) -> None:
        """Warn if parameters have other dtypes than in this plan, and their states other dtypes than new states.

        Args:
            optimizer: an optimizer about to take a step; the states of its parameters with a gradient exist.
        """
        dtypes = {entry.param: group.spec.param_dtype for group in self.fused_groups for entry in group.entries}
        changed: list[tuple[Tensor, dict[str, torch.dtype]]] = []
        for group in optimizer.param_groups:
            for param in (param for param in group["params"] if dtypes.get(param, param.dtype) != param.dtype):
                existing = optimizer.state.get(param, {})  # parameters without gradient may have none
                stored = ((state, dtype_in(existing, state.name)) for state in optimizer.stored_states(group, param))
                old = {s.name: dtype for s, dtype in stored if dtype and dtype != new_state_dtype(s, group, param)}
                if old:
                    changed.append((param, old))
        if changed:
            param, old = changed[0]
            warnings.warn(
                f"{len(changed)} parameters were converted from {dtype_name(dtypes[param])} to "
                f"{dtype_name(param.dtype)} after their first step. Their states ({', '.join(old)}) stay in "
                f"{dtype_name(next(iter(old.values())))}. Call cast_model(model) before the first step; or build a new "
                "optimizer now, which starts with new states",
                RuntimeWarning,
                stacklevel=2,
            )

    def collect_gradients(
        self, optimizer: Algorithm, clipped: bool, param_ids: Set[int] | None = None, norm_only: bool = False
    ) -> bool:
        """Give every entry its gradient for the coming step, or for the norm before it.

        Args:
            optimizer: see the constructor.
            clipped: see the constructor.
            param_ids: see the constructor.
            norm_only: whether only the norm of the gradients is computed. Weights and states are not checked.

        Returns:
            False if something that the plan depends on has changed, see `fingerprint.py`.

        Raises:
            RuntimeError: the memory of a gradient was freed.
        """
        gradients = self._fingerprint.gradients(optimizer, clipped, param_ids, norm_only)
        if gradients is None:
            return False
        parts, addresses = gradients
        if may_be_freed(parts, addresses):
            for entry, part in zip(self._entries, parts, strict=True):
                entry.check_memory("its gradient", part)
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
        """Copy stepped copies back to their tensors."""
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


def _parts(entries: list[ParamEntry], most: float) -> Iterator[list[ParamEntry]]:
    """Yield consecutive entries with at most `most` elements together, or a single larger one."""
    first = elements = 0
    for k, entry in enumerate(entries):
        elements += entry.weight.numel()
        if elements > most and k > first:
            yield entries[first:k]
            first, elements = k, entry.weight.numel()
    yield entries[first:]


def _size_of_temporaries(fused_group: FusedGroup) -> tuple[bool, int]:
    """Return a key that sorts groups by the memory of their temporaries. All ranks compute the same key."""
    return fused_group.spec.orthogonalizes, max(full_shape(entry.param).numel() for entry in fused_group.entries)


def _entries(optimizer: Algorithm, param_ids: Set[int] | None) -> list[ParamEntry]:
    """Check all parameters, and return the entries of those to step."""
    with_gradient = []
    index = -1
    for k, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            index += 1
            if param_ids is not None and id(param) not in param_ids:
                continue
            validation.check_param(param, group, f"param group {k}")
            if optimizer.orthogonalizes(group):
                validation.check_matrix(param)
            if (grad := optimizer.gradient_of(param)) is not None:
                validation.check_gradient(grad)
                with_gradient.append((group, position, index, grad))
    validation.check_apart({index: group["params"][position] for group, position, index, _ in with_gradient})
    validation.warn_of_fp32_weights(optimizer)
    return [ParamEntry(optimizer, *each) for each in with_gradient]
