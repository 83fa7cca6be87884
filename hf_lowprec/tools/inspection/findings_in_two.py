"""Findings in two checkpoints of a model: weights, decay and second moments that did not follow training."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import torch

from hf_lowprec.monitor.findings_catalogue import Finding
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.tensor_names import layer, name_pattern
from hf_lowprec.tools.inspection.comparison import Comparison, SecondMomentChange
from hf_lowprec.tools.inspection.findings_in_one import finding, low_precision_training
from hf_lowprec.tools.inspection.optimizer_states import SECOND_MOMENT, ParameterState
from hf_lowprec.tools.inspection.tensor_facts import TensorChange

_FEWEST_MOVERS = 20.0
"""Elements that should have moved before it is reported that none did: by chance that happens once in e^20 tensors."""
_SMALL_UPDATE = 0.1
"""An update of Adam relative to the learning rate, estimated low."""
_MOST = 0.9
_NEARLY_ALL, _NEARLY_NONE = 0.8, 0.02
"""Shares of weights that moved, of a magnitude and of four times that. If weights move by normally distributed amounts
before they are rounded, and 0.8 of a magnitude move, 0.3 of four times the magnitude do."""
_FEWEST_IN_BIN = 100
_FEWEST_LOST = 0.05
"""A share of weights that did not follow updates, below which it is not reported."""


def findings_in_two(comparison: Comparison) -> list[Finding]:
    """Everything that is wrong between two checkpoints; what is wrong in each alone is not repeated.

    Args:
        comparison: the two checkpoints.
    """
    moved = {name: comparison.has_moved(name) for name in comparison.changes}
    if not any(moved.values()):
        return _nothing_moved(comparison)
    trained = _trained_but_unmoved(comparison, moved)
    unmoved = dict.fromkeys([*trained, *_odd_ones_out(comparison, moved), *_all_norms(comparison, moved)])
    kinds = comparison.later.kinds
    norms = [name for name in unmoved if kinds[name] == "norms"]
    others = [name for name in unmoved if kinds[name] != "norms"]
    return [
        *finding(
            "norms_never_moved",
            norms,
            "{count} ({names}), while other weights did",
            _remedy(comparison, norms, "Check requires_grad and the param groups", "norms in 16 bits"),
            noun="norm",
        ),
        *finding(
            "never_moved",
            others,
            "{count} ({names}), while the weights around moved",
            _remedy(
                comparison,
                others,
                "Check requires_grad, the param groups, and that the loss depends on them",
                "16-bit weights whose optimizer rounds to nearest",
            ),
        ),
        *_updates_lost(comparison),
        *_weight_decay_lost(comparison),
        *_second_moment_frozen(comparison),
    ]


def _remedy(comparison: Comparison, names: list[str], check: str, rounded: str) -> str:
    """What to check, and if one of the tensors is in 16 bits, how to train them."""
    low = any(comparison.later.tensors[name].dtype in LOW_PRECISION_DTYPES for name in names)
    return f"{check}. For {rounded}: {low_precision_training(comparison.later)}" if low else check


def _nothing_moved(comparison: Comparison) -> list[Finding]:
    """No tensor differs at all."""
    if comparison.steps == 0:
        return []
    return finding(
        "nothing_moved",
        comparison.changes,
        "the two checkpoints are the same bit for bit in all of {count} that both have ({names})",
        "Check that the second one was saved after training. If it was trained in 16 bits with rounding to nearest: "
        + low_precision_training(comparison.later),
    )


def _trained_but_unmoved(comparison: Comparison, moved: Mapping[str, bool]) -> list[str]:
    """Tensors that did not move although an optimizer has applied gradients that should have moved some elements."""
    later, steps = comparison.later, comparison.steps
    found = []
    for name, state in later.state_of.items():
        if not steps or moved.get(name, True) or not later.was_stepped(state):
            continue
        last = later.step or steps
        rates = later.rate_sum(state.group, last - steps, last)
        distance = _SMALL_UPDATE * (rates or 0.0) / math.sqrt(steps)  # of a random walk
        if later.tensors[name].movers(distance, _dtype_of_steps(comparison.changes[name], state)) >= _FEWEST_MOVERS:
            found.append(name)
    return found


def _dtype_of_steps(change: TensorChange, state: ParameterState) -> torch.dtype:
    """The dtype whose spacing decides whether an element should have moved: FP32 if rounding to nearest is to blame."""
    return torch.float32 if state.group.rounding == "nearest" and not change.rounded else change.dtype


def _odd_ones_out(comparison: Comparison, moved: Mapping[str, bool]) -> list[str]:
    """Tensors that did not move, although their layer and the same tensors of other layers did.

    Frozen layers, frozen embeddings and merged adapters have a pattern that these do not have.
    """
    kinds = comparison.later.kinds
    patterns, layers, of_kind = defaultdict(list), defaultdict(list), defaultdict(list)
    for name in moved:
        if comparison.changes[name].dtype.is_floating_point:
            patterns[name_pattern(name)].append(name)
            layers[layer(name)].append(name)
            of_kind[kinds[name]].append(name)
    everything = [*moved]
    found = []
    for name in moved:
        change = comparison.changes[name]
        if moved[name] or kinds[name] == "embeddings" or not change.dtype.is_floating_point:
            continue
        peers = [other for other in patterns[name_pattern(name)] if other != name]
        peers = peers or [other for other in of_kind[kinds[name]] if other != name]
        peers = peers or of_kind["embeddings"] or everything  # a head that is frozen with the embeddings is ordinary
        around = layers[layer(name)] if layer(name) else everything
        expected = change.parameters * _median_share(comparison, around)
        if _share(peers, moved) > 0.5 and _share(around, moved) > 0.5 and expected >= _FEWEST_MOVERS:
            found.append(name)
    return found


def _all_norms(comparison: Comparison, moved: Mapping[str, bool]) -> list[str]:
    """All norms, if nearly none moved, but nearly all matrices did, in layers as well as in embeddings or the head.

    Adapters that were merged into the weights do not move embeddings and heads.
    """
    kinds = comparison.later.kinds
    by_kind = defaultdict(list)
    for name in moved:
        if len(comparison.later.tensors[name].shape) > 1 or kinds[name] == "norms":
            by_kind[kinds[name]].append(name)
    norms, matrices = by_kind["norms"], by_kind["attention"] + by_kind["mlp"] + by_kind["other"]
    ends = by_kind["embeddings"] + by_kind["head"]
    if not norms or _share(norms, moved) > 1 - _MOST or _share(matrices, moved) < _MOST:
        return []
    return [name for name in norms if not moved[name]] if any(moved[name] for name in ends) or not ends else []


def _share(names: list[str], moved: Mapping[str, bool]) -> float:
    return sum(moved[name] for name in names) / len(names) if names else 0.0


def _median_share(comparison: Comparison, names: list[str]) -> float:
    """The median share of elements that changed."""
    shares = sorted(
        change.moved / change.parameters for name in names if (change := comparison.changes[name]).parameters
    )
    return shares[len(shares) // 2] if shares else 0.0


def _updates_lost(comparison: Comparison) -> list[Finding]:
    """16-bit weights that moved if they are small, and did not if they are four times as large.

    The spacing of a number is proportional to it. Rounding to nearest loses every update that is smaller than half the
    spacing, so above some magnitude nothing moves. Stochastic rounding moves a weight of twice the spacing half as
    often, and Kahan summation half as far; FP32 weights that were rounded afterwards moved by amounts that differ much
    more from one another.
    """
    changes = {
        name: change
        for name, change in comparison.changes.items()
        if change.moved and change.dtype in LOW_PRECISION_DTYPES
    }
    if not changes:
        return []
    counts = torch.stack([change.exponents for change in changes.values()]).sum(0)
    shares = torch.stack([change.moved_exponents for change in changes.values()]).sum(0) / counts.clamp(min=1)
    sharp = (shares[:-2] > _NEARLY_ALL) & (shares[2:] < _NEARLY_NONE)
    sharp &= (counts[:-2] >= _FEWEST_IN_BIN) & (counts[2:] >= _FEWEST_IN_BIN)
    if not bool(sharp.any()):
        return []
    first_lost = int(sharp.nonzero()[-1]) + 2
    share = float(counts[first_lost:].sum() / counts.sum())
    return finding(
        "updates_lost",
        changes if share > _FEWEST_LOST else (),
        f"in 16-bit weights of {{count}} ({{names}}), nearly all small weights moved and none of those above "
        f"{2.0 ** (first_lost - 127):.2g}, {share:.1%} of all: their updates are smaller than half their spacing",
        low_precision_training(comparison.later),
    )


def _weight_decay_lost(comparison: Comparison) -> list[Finding]:
    """Tensors in which most elements that the decay alone should have changed are as they were."""
    lost = {
        name: change
        for name, change in comparison.changes.items()
        if change.shrunk >= 2 * _FEWEST_MOVERS and change.shrunk_not_moved > change.shrunk / 2
    }
    elements = sum(change.shrunk_not_moved for change in lost.values())
    low = all(change.dtype in LOW_PRECISION_DTYPES for change in lost.values())
    remedy = low_precision_training(comparison.later) if low else "Check that nothing resets the weights"
    return finding(
        "weight_decay_lost",
        lost,
        f"in {{count}}: {{names}}. It should have taken {elements:,} elements two spacings further by itself, and they "
        "are the same bit for bit",
        remedy,
    )


def _second_moment_frozen(comparison: Comparison) -> list[Finding]:
    states = {state.name: state for state in comparison.later.states}
    names = [name for name, change in comparison.second_moments.items() if _is_frozen(change, states[name])]
    return finding(
        "second_moment_frozen",
        names,
        "that of {count} did not decay anywhere between the two checkpoints: {names}. Elements with small gradients "
        "are the same bit for bit",
    )


_LARGEST_SPACING = 0.25
"""The largest distance of codes in 8 bits, relative to their values."""


def _is_frozen(change: SecondMomentChange, state: ParameterState) -> bool:
    """Return whether no element decreased, although as many as are unchanged could have.

    Where gradients become smaller, about as many elements decrease as stay the same by chance in 16 bits, if there are
    enough steps for a decay by one spacing: `steps * (1 - beta2)` of an element is its largest decay, and stochastic
    rounding takes an element a spacing further with the chance of the decay over the spacing.
    """
    if state.group.beta2 is None:
        return False
    dtype = state.dtypes[SECOND_MOMENT]
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else _LARGEST_SPACING
    chance = min(1.0, change.steps * (1 - state.group.beta2) / eps)
    return change.decreased == 0 and change.unchanged * chance >= _FEWEST_MOVERS
