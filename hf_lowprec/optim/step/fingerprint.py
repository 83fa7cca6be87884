"""Records what the plan of a step depends on, and finds out if any of it has changed since the plan was built.

Every step checks thousands of tensors, so only functions written in C do it: `map` of an attribute or method takes some
50 ns per tensor, a loop in Python longer. Objects that existed when the plan was built are compared by identity: a
state that is the same object still has its dtype and shape, so only the address of its memory is checked.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from itertools import chain, repeat
from typing import Any

from torch import Tensor

from hf_lowprec.optim.algorithm_interface import Algorithm
from hf_lowprec.optim.param_groups import params_of
from hf_lowprec.optim.private_torch_apis import dtensor_specs, local_tensors, without_torch_function
from hf_lowprec.optim.sharding import is_sharded

_LAYOUT = operator.attrgetter("dtype", "shape")
_GROUP_SETTINGS = operator.itemgetter("rounding", "state_rounding", "seed", "maximize")


class Fingerprint:
    """Everything that a plan depends on, as it was when the plan was built.

    It keeps the objects that it compares alive, because new objects could get their identities otherwise.

    Args:
        optimizer: an optimizer whose parameters have gradients.
        clipped: whether gradients are clipped.
        param_ids: identities of the parameters to step, if not all that have gradients; see `gradients/release.py`.
        stepped: the parameters that the plan steps.
        states: their states, in any order.
    """

    def __init__(
        self,
        optimizer: Algorithm,
        clipped: bool,
        param_ids: Set[int] | None,
        stepped: Sequence[Tensor],
        states: Sequence[Tensor],
    ) -> None:
        self._gradient_of = optimizer.gradient_of
        self._param_ids = param_ids
        self._settings = _settings(optimizer, clipped)
        self._groups_and_params = _groups_and_params(optimizer)
        self._stepped = list(stepped)
        self._without_grad = [p for p in params_of(optimizer, param_ids) if self._gradient_of(p) is None]
        self._optimizer_states = self._current_states(optimizer)
        self._dictionaries = [state for state in self._optimizer_states if isinstance(state, dict)]
        self._state_values = self._current_state_values()

        grads = list(map(self._gradient_of, stepped))
        self._sharded = any(map(is_sharded, [*stepped, *states, *grads]))
        self._state_parts = local_tensors(states)
        self._grad_types = list(map(type, grads))
        self._grad_specs = dtensor_specs(grads) if self._sharded else []
        self._grad_layouts = list(map(_LAYOUT, self._parts(grads)))
        self._memory = self._current_memory()

    def gradients(
        self, optimizer: Algorithm, clipped: bool, param_ids: Set[int] | None, norm_only: bool = False
    ) -> tuple[list[Tensor], list[int]] | None:
        """Return this rank's parts of the stepped parameters' gradients, in their order, and their addresses.

        Return None if something has changed: param groups, parameters, which of them have gradients; types, dtypes,
        shapes and placements of gradients; settings that affect the arithmetic; and, unless `norm_only`, dtypes, shapes
        and contiguity of parameters, replaced states, and addresses of parameters and states.

        Args:
            optimizer: see the constructor.
            clipped: see the constructor.
            param_ids: see the constructor.
            norm_only: whether only the norm of the gradients is computed, for which weights and states do not matter.
        """
        if (
            self._param_ids != param_ids
            or self._settings != _settings(optimizer, clipped)
            or not _are_same(_groups_and_params(optimizer), self._groups_and_params)
        ):
            return None
        if not norm_only and not (
            _are_same(self._current_states(optimizer), self._optimizer_states)
            and _are_same(self._current_state_values(), self._state_values)
        ):
            return None
        with without_torch_function():
            gradients = self._gradients_if_unchanged()
            return gradients if norm_only or self._current_memory() == self._memory else None

    def _current_states(self, optimizer: Algorithm) -> list[Any]:
        """Return the dictionaries in `optimizer.state`; with `param_ids`, those of the stepped parameters."""
        if self._param_ids is None:
            return list(optimizer.state.values())
        return list(map(optimizer.state.get, self._stepped))

    def _current_state_values(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._dictionaries)))

    def _current_memory(self) -> tuple[list[Any], ...]:
        """Return the layouts of parameters, and the addresses of parameters and states.

        FSDP2 gives its parameters new local tensors when a model is moved. A state keeps its local tensor.
        """
        return (
            list(map(_LAYOUT, self._stepped)),
            list(map(Tensor.is_contiguous, self._stepped)),
            list(map(Tensor.data_ptr, chain(self._parts(self._stepped), self._state_parts))),
        )

    def _gradients_if_unchanged(self) -> tuple[list[Tensor], list[int]] | None:
        grads = list(map(self._gradient_of, self._stepped))
        if list(map(type, grads)) != self._grad_types or any(
            map(operator.is_not, map(self._gradient_of, self._without_grad), repeat(None))
        ):
            return None
        if self._sharded and dtensor_specs(grads) != self._grad_specs:
            return None
        parts = self._parts(grads)
        if list(map(_LAYOUT, parts)) != self._grad_layouts:
            return None
        try:
            return parts, list(map(Tensor.data_ptr, parts))
        except RuntimeError:  # sparse gradients have no address
            return None

    def _parts(self, tensors: list[Tensor]) -> list[Tensor]:
        return local_tensors(tensors) if self._sharded else tensors


def _groups_and_params(optimizer: Algorithm) -> list[Any]:
    return [*optimizer.param_groups, *params_of(optimizer)]


def _are_same(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects."""
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def _settings(optimizer: Algorithm, clipped: bool) -> list[tuple[Any, ...]]:
    """Return the settings, of all groups and of each, that affect the arithmetic. Learning rates may change."""
    of_groups = (
        (
            len(group["params"]),
            _GROUP_SETTINGS(group),
            group.get("first_parameter") or 0,
            group.get("factored"),
            optimizer.options(group),
            optimizer.feeds_back(group),
        )
        for group in optimizer.param_groups
    )
    return [(optimizer.backend, clipped, optimizer.skip_nonfinite), *of_groups]
