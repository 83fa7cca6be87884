"""Compare two checkpoints of a model: a pass over each pair of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError
from hf_lowprec.tools.inspection.checkpoint import Checkpoint
from hf_lowprec.tools.inspection.hyperparameters import Hyperparameters
from hf_lowprec.tools.inspection.one_checkpoint import CheckpointFacts, StateFacts, is_decayed_by_trainer
from hf_lowprec.tools.inspection.optimizer_states import SECOND_MOMENT, ParameterState
from hf_lowprec.tools.inspection.tensor_change import TensorChange, tensor_change
from hf_lowprec.tools.inspection.tensor_facts import CHUNK

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

    earlier: CheckpointFacts
    later: CheckpointFacts
    changes: dict[str, TensorChange]
    missing: list[str]
    added: list[str]
    reshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    second_moments: dict[str, SecondMomentChange]
    steps: int | None
    notes: list[str]

    def has_moved(self, name: str) -> bool:
        """Return whether a tensor has changed, or has a compensation, which holds changes that are still to come."""
        state = self.later.state_of().get(name)
        pending = self.steps != 0 and state is not None and state.compensation
        return self.changes[name].moved > 0 or pending


def compare_checkpoints(
    earlier: tuple[Checkpoint, CheckpointFacts],
    later: tuple[Checkpoint, CheckpointFacts],
    hyperparameters: Hyperparameters,
    progress: Callable[[str], None] = lambda name: None,
) -> Comparison:
    """Compare all tensors that both checkpoints have.

    Args:
        earlier: the earlier checkpoint and its facts.
        later: the later one.
        hyperparameters: those that the user has named.
        progress: called with the name of each tensor before it is compared.

    Raises:
        InputError: they have no tensor of equal name and shape in common, or the second one is the earlier.
    """
    (before, before_facts), (after, after_facts) = earlier, later
    steps = _steps_between(before_facts, after_facts, hyperparameters)
    pairs = _pairs(before_facts.tensors, after_facts.tensors)
    if not pairs:
        raise InputError(
            f"{before.name!r} and {after.name!r} have no tensor name in common: they are not of the same model"
        )
    states, changes, reshaped = after_facts.state_of(), {}, {}
    for name, earlier_name in pairs.items():
        shapes = tuple(before_facts.tensors[earlier_name].shape), tuple(after_facts.tensors[name].shape)
        if shapes[0] != shapes[1]:
            reshaped[name] = shapes
            continue
        progress(name)
        decay = _decay(name, states.get(name), after_facts, hyperparameters, steps)
        changes[name] = tensor_change(before.weights.read(earlier_name), after.weights.read(name), decay)
    if not changes:
        name, (old, new) = next(iter(reshaped.items()))
        raise InputError(
            f"{before.name!r} and {after.name!r} have no tensor of the same shape in common, such as {name}, which is "
            f"{old} in the first and {new} in the second: they are not of the same model"
        )
    return Comparison(
        before_facts,
        after_facts,
        changes,
        [name for name in before_facts.tensors if name not in {*pairs.values()}],
        [name for name in after_facts.tensors if name not in pairs],
        reshaped,
        _second_moment_changes(before.states, after.states),
        steps,
        _rounding_note(changes, before_facts, after_facts),
    )


def _pairs(earlier: Iterable[str], later: Iterable[str]) -> dict[str, str]:
    """The name in the earlier checkpoint of each tensor of the later one, where there is one.

    Names may differ by wrappers (DDP, torch.compile, FSDP) and by the prefix of a base model.
    """
    short: dict[str, str] = {_WRAPPERS.sub("", name).lstrip("."): name for name in earlier}
    pairs = {name: short[key] for name in later if (key := _WRAPPERS.sub("", name).lstrip(".")) in short}
    if pairs:
        return pairs
    without = {name.partition(".")[2]: original for name, original in short.items()}
    candidates = {name: (name.partition(".")[2], name) for name in later}
    return {
        name: short.get(inner) or without[outer]
        for name, (inner, outer) in candidates.items()
        if inner in short or outer in without
    }


def _steps_between(earlier: CheckpointFacts, later: CheckpointFacts, hyperparameters: Hyperparameters) -> int | None:
    """The number of steps from the earlier to the later; a model folder without a step counts as the beginning."""
    if hyperparameters.steps is not None:
        return hyperparameters.steps
    if later.step is None:
        return None
    steps = later.step - (earlier.step or 0)
    if steps < 0:
        raise InputError(
            f"{later.name!r} was saved at step {later.step}, before {earlier.name!r} at step {earlier.step}; name the "
            "earlier checkpoint first"
        )
    return steps


def _decay(
    name: str, state: StateFacts | None, facts: CheckpointFacts, hyperparameters: Hyperparameters, steps: int | None
) -> float:
    """The share of a tensor that weight decay should have taken away."""
    if not steps or (facts.states and (state is None or not state.step)):
        return 0.0
    group = state.group if state else None
    last = facts.step or steps
    rates = hyperparameters.rate_sum(group, facts.record, last - steps, last)
    decayed = is_decayed_by_trainer(name, facts.kinds[name])
    return min(1.0, (rates or 0.0) * hyperparameters.decay_rate(group, decayed))


def _second_moment_changes(
    earlier: Iterable[ParameterState], later: Iterable[ParameterState]
) -> dict[str, SecondMomentChange]:
    before: Mapping[str, ParameterState] = {state.name: state for state in earlier}
    changes = {}
    for state in later:
        old = before.get(state.name)
        if (
            old is None
            or SECOND_MOMENT not in old.infos
            or old.infos.get(SECOND_MOMENT) != state.infos.get(SECOND_MOMENT)
        ):
            continue
        steps = (state.step or 0) - (old.step or 0)
        if steps > 0:
            changes[state.name] = _second_moment_change(steps, old.read(SECOND_MOMENT), state.read(SECOND_MOMENT))
    return changes


def _second_moment_change(steps: int, earlier: Tensor, later: Tensor) -> SecondMomentChange:
    elements = unchanged = decreased = 0
    for before, after in zip(earlier.reshape(-1).split(CHUNK), later.reshape(-1).split(CHUNK), strict=True):
        filled = before >= 2.0**-100  # smaller numbers may not decay in FP32 either
        elements += int(filled.sum())
        unchanged += int((filled & (before == after)).sum())
        decreased += int((filled & (after < before)).sum())
    return SecondMomentChange(steps, elements, unchanged, decreased)


def _rounding_note(changes: Mapping[str, TensorChange], earlier: CheckpointFacts, later: CheckpointFacts) -> list[str]:
    rounded = [change for change in changes.values() if change.rounded]
    if not rounded:
        return []
    dtypes = sorted({str(change.dtype).removeprefix("torch.") for change in rounded})
    return [
        f"{len(rounded)} tensors have different dtypes in the two checkpoints. They are compared after rounding to "
        f"{' or '.join(dtypes)}; changes smaller than its spacing do not show."
    ]
