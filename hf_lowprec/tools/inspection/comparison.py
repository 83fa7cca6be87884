"""Compare two checkpoints of a model: a pass over each pair of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError
from hf_lowprec.rounding import dtype_name
from hf_lowprec.tools.inspection.checkpoint import Checkpoint
from hf_lowprec.tools.inspection.optimizer_states import SECOND_MOMENT, ParameterState
from hf_lowprec.tools.inspection.tensor_facts import TensorChange, chunks, tensor_change

_WRAPPERS = re.compile(
    r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)|\.default(?=\.)"
)


class SecondMomentChange(NamedTuple):
    """The change of a parameter's second moment, over elements that were not zero.

    Attributes:
        steps: number of steps between the checkpoints.
        elements: number of elements that were not zero.
        unchanged: how many of them are the same bit for bit.
        decreased: how many became smaller.
    """

    steps: int
    elements: int
    unchanged: int
    decreased: int


@dataclass(frozen=True)
class Comparison:
    """Two checkpoints of one model.

    Attributes:
        earlier: the first.
        later: the second.
        changes: how each tensor changed, by its name in the later checkpoint.
        missing: tensors of the earlier checkpoint that the later one lacks.
        added: tensors of the later checkpoint that the earlier one lacks.
        reshaped: tensors with another shape: the earlier shape and the later one.
        second_moments: how the second moments changed, by the parameter's name; empty unless both have them.
        steps: number of steps between the two; None if it is not known.
        notes: what the reader should know of the comparison.
    """

    earlier: Checkpoint
    later: Checkpoint
    changes: dict[str, TensorChange]
    missing: list[str]
    added: list[str]
    reshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    second_moments: dict[str, SecondMomentChange]
    steps: int | None
    notes: list[str]

    def has_moved(self, name: str) -> bool:
        """Return whether a tensor has changed, or has a compensation, which holds changes that are still to come."""
        state = self.later.state_of.get(name)
        pending = self.steps != 0 and state is not None and state.compensation
        return self.changes[name].moved > 0 or pending


def compare_checkpoints(
    earlier: Checkpoint, later: Checkpoint, progress: Callable[[str], None] = lambda name: None
) -> Comparison:
    """Compare all tensors that both checkpoints have.

    Args:
        earlier: the earlier checkpoint.
        later: the later one.
        progress: called with the name of each tensor before it is compared.

    Raises:
        InputError: they have no tensor of equal name and shape in common, or the second one is the earlier.
    """
    steps = _steps_between(earlier, later)
    pairs = _pairs(earlier.tensors, later.tensors)
    if not pairs:
        raise InputError(
            f"{earlier.name!r} and {later.name!r} have no tensor name in common: they are not of the same model"
        )
    changes: dict[str, TensorChange] = {}
    reshaped = {}
    for name, earlier_name in pairs.items():
        shapes = tuple(earlier.tensors[earlier_name].shape), tuple(later.tensors[name].shape)
        if shapes[0] != shapes[1]:
            reshaped[name] = shapes
            continue
        progress(name)
        before, after = earlier.weights.read(earlier_name), later.weights.read(name)
        changes[name] = tensor_change(before, after, later.decay(name, steps))
    if not changes:
        name, (old, new) = next(iter(reshaped.items()))
        raise InputError(
            f"{earlier.name!r} and {later.name!r} have no tensor of the same shape in common, such as {name}, which is "
            f"{old} in the first and {new} in the second: they are not of the same model"
        )
    return Comparison(
        earlier,
        later,
        changes,
        [name for name in earlier.tensors if name not in {*pairs.values()}],
        [name for name in later.tensors if name not in pairs],
        reshaped,
        _second_moment_changes(earlier.states, later.states),
        steps,
        _rounding_note(changes),
    )


def _pairs(earlier: Iterable[str], later: Iterable[str]) -> dict[str, str]:
    """Later name → earlier name, of each tensor that both checkpoints have.

    Names of wrappers (DDP, torch.compile, FSDP, PEFT's `.default`) do not count. If no name matches otherwise, the
    first component may be missing on one side, such as the `model` of a base model.
    """
    old, new = ({_WRAPPERS.sub("", name).lstrip("."): name for name in names} for names in (earlier, later))
    same = {name: old[key] for key, name in new.items() if key in old}
    if same:
        return same
    old_without_prefix = {key.partition(".")[2]: name for key, name in old.items()}
    pairs = {}
    for key, name in new.items():
        found = old.get(key.partition(".")[2]) or old_without_prefix.get(key)
        if found is not None:
            pairs[name] = found
    return pairs


def _steps_between(earlier: Checkpoint, later: Checkpoint) -> int | None:
    """The number of steps from the earlier to the later; a model folder without a step counts as the beginning."""
    if later.given.steps is not None:
        return later.given.steps
    if later.step is None:
        return None
    steps = later.step - (earlier.step or 0)
    if steps < 0:
        raise InputError(
            f"{later.name!r} was saved at step {later.step}, before {earlier.name!r} at step {earlier.step}; name the "
            "earlier checkpoint first"
        )
    return steps


def _second_moment_changes(
    earlier: Iterable[ParameterState], later: Iterable[ParameterState]
) -> dict[str, SecondMomentChange]:
    before = {state.name: state for state in earlier if SECOND_MOMENT in state.infos}
    changes = {}
    for state in later:
        old = before.get(state.name)
        if old is None or old.infos[SECOND_MOMENT] != state.infos.get(SECOND_MOMENT):
            continue
        steps = (state.step or 0) - (old.step or 0)
        if steps > 0:
            changes[state.name] = _second_moment_change(steps, old.read(SECOND_MOMENT), state.read(SECOND_MOMENT))
    return changes


def _second_moment_change(steps: int, earlier: Tensor, later: Tensor) -> SecondMomentChange:
    elements = unchanged = decreased = 0
    for before, after in zip(chunks(earlier), chunks(later), strict=True):
        filled = before >= 2.0**-100  # smaller numbers may not decay in FP32 either
        elements += int(filled.sum())
        unchanged += int((filled & (before == after)).sum())
        decreased += int((filled & (after < before)).sum())
    return SecondMomentChange(steps, elements, unchanged, decreased)


def _rounding_note(changes: Mapping[str, TensorChange]) -> list[str]:
    rounded = [change for change in changes.values() if change.rounded]
    if not rounded:
        return []
    return [
        f"{len(rounded)} tensors have different dtypes in the two checkpoints. They are compared after rounding to "
        f"{' or '.join(sorted({dtype_name(change.dtype) for change in rounded}))}; changes smaller than its spacing do "
        "not show."
    ]
