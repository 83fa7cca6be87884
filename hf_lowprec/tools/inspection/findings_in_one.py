"""Findings in one checkpoint. Ordinary things, such as a model that was never trained, give none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch

from hf_lowprec.casting.cast_plan import make_plan
from hf_lowprec.integrations.checkpoint_files.input_errors import InputError, explain_input_errors
from hf_lowprec.monitor.findings_catalogue import FAULTS, Finding
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, dtype_name, recommended_mode
from hf_lowprec.tensor_names import layer, listed, name_pattern
from hf_lowprec.tools.inspection.checkpoint import Checkpoint
from hf_lowprec.tools.inspection.optimizer_states import SECOND_MOMENT, ParameterState
from hf_lowprec.tools.inspection.tensor_facts import TensorFacts
from hf_lowprec.tools.user_inputs.empty_model import build_empty_model, load_config

_COARSE_SHARE = 0.5
"""The share of weights whose spacing exceeds the learning rate, from which on rounding to nearest is reported."""


def findings_in_one(checkpoint: Checkpoint, compared: Collection[str] = ()) -> list[Finding]:
    """Everything that is wrong in a checkpoint.

    Args:
        checkpoint: the checkpoint.
        compared: tensors of which an earlier checkpoint tells whether they moved.
    """
    return [
        *_not_finite(checkpoint),
        *_norms_never_moved(checkpoint, compared),
        *_never_moved(checkpoint),
        *_left_in_fp32(checkpoint),
        *_norms_of_16_bits(checkpoint),
        *_not_trained(checkpoint),
        *_second_moment_frozen(checkpoint),
        *_updates_lost(checkpoint),
        *_weight_decay_lost(checkpoint),
    ]


def counted(count: int, noun: str) -> str:
    """A number with its noun, as in "1 tensor", "2 tensors"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def finding(
    code: str, tensors: Iterable[str], evidence: str, remedy: str | None = None, noun: str = "tensor"
) -> list[Finding]:
    """One finding about some tensors, none if there are no tensors.

    Args:
        code: see `Finding.of`.
        tensors: see `Finding.of`.
        evidence: see `Finding.of`; with `{names}` for the first few names, and `{count}` for "3 tensors".
        remedy: see `Finding.of`.
        noun: what to count instead of tensors.
    """
    names = list(dict.fromkeys(tensors))
    if not names:
        return []
    shown = evidence.format(names=listed(names), count=counted(len(names), noun))
    return [Finding.of(code, shown, names, remedy)]


def low_precision_training(checkpoint: Checkpoint) -> str:
    """The advice to train with an optimizer that loses no updates; FP16 weights cannot be split."""
    mode = recommended_mode({tensor.dtype for tensor in checkpoint.tensors.values()})
    return f'Train with optim="adamw_bf16_{mode}" (hf_lowprec.AdamW with rounding="{mode}"), whose norms stay in FP32'


def _not_finite(checkpoint: Checkpoint) -> list[Finding]:
    return finding(
        "not_finite",
        (name for name, tensor in checkpoint.tensors.items() if tensor.nonfinite),
        "in {count}: {names}",
        FAULTS["not_finite"].remedy + '; optim_args="skip_nonfinite=True" skips such steps',
    )


def _norms_never_moved(checkpoint: Checkpoint, compared: Collection[str]) -> list[Finding]:
    """Norms that still have their initial value in a model that was trained."""
    norms, states = checkpoint.norms, checkpoint.state_of
    at_start = [name for name, norm in norms.items() if norm.at_initial_value]
    stepped = [name for name in at_start if name in states and checkpoint.was_stepped(states[name])]
    if stepped:
        return finding(
            "norms_never_moved",
            stepped,
            "{count} stayed at the initial value although gradients arrived: {names}. In 16 bits, a norm at 1.0 "
            "does not move by updates smaller than half its spacing (0.002 below 1.0 in BF16)",
            low_precision_training(checkpoint),
            noun="norm",
        )
    if {*at_start} <= {*compared}:
        return []
    weights = [name for name in norms if not name.endswith("bias")]
    still = [name for name in weights if name in at_start and _layer_was_trained(checkpoint, name)]
    changed = len([name for name in weights if name not in at_start])
    if changed:
        return finding(
            "norms_never_moved",
            still,
            f"{{count}} stayed at the initial value, while {changed} other norms have been trained: {{names}}",
            "Check that they were in the optimizer and had requires_grad=True; if they were trained in 16 bits, keep "
            "norms in FP32",
            noun="norm",
        )
    if still and not looks_untrained(checkpoint):
        return finding(
            "norms_never_moved",
            still,
            "every norm is at its initial value, although the other weights have been trained: {names}. This happens "
            "if norms are trained in 16 bits with rounding to nearest",
            low_precision_training(checkpoint),
            noun="norm",
        )
    return []


def _layer_was_trained(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether the optimizer holds tensors of the layer that `name` is in, as far as the checkpoint tells."""
    states = checkpoint.state_of
    return not states or any(layer(other) == layer(name) for other, state in states.items() if state.has_gradients)


def _never_moved(checkpoint: Checkpoint) -> list[Finding]:
    """Tensors other than norms that are all 0.0 or 1.0 although the optimizer has stepped them."""
    norms, states = checkpoint.norms, checkpoint.state_of
    names = [
        name
        for name, tensor in checkpoint.tensors.items()
        if name not in norms and tensor.at_initial_value and name in states and checkpoint.was_stepped(states[name])
    ]
    return finding(
        "never_moved",
        names,
        "{count} stayed at the initial value although gradients arrived: {names}",
        "Check that nothing resets them or sets their learning rate to zero",
    )


def looks_untrained(checkpoint: Checkpoint) -> bool:
    """Return whether matrices of one shape are equally large in all layers. Training makes them differ."""
    sizes: dict[tuple[str, torch.Size], list[TensorFacts]] = defaultdict(list)
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) > 1 and tensor.is_floating and tensor.rms:
            sizes[name_pattern(name), tensor.shape].append(tensor)
    return not any(_sizes_differ(of_name) for of_name in sizes.values())


def _sizes_differ(tensors: list[TensorFacts]) -> bool:
    """Return whether root mean squares differ by more than chance.

    That of n normal numbers scatters by 1/√(2n); six times that is exceeded in one of 10⁹ cases. Some initializations
    are not normal, hence the 1%.
    """
    sizes = [tensor.rms for tensor in tensors]
    scatter = 6 * (2 * min(tensor.parameters for tensor in tensors)) ** -0.5
    return max(sizes) / min(sizes) - 1 > 0.01 + 2 * scatter


def _left_in_fp32(checkpoint: Checkpoint) -> list[Finding]:
    """Matrices in FP32 in a model whose other matrices are in 16 bits."""
    matrices = {
        name: tensor for name, tensor in checkpoint.tensors.items() if len(tensor.shape) > 1 and tensor.is_floating
    }
    low = sum(tensor.parameters for tensor in matrices.values() if tensor.dtype in LOW_PRECISION_DTYPES)
    high = [
        name
        for name, tensor in matrices.items()
        if tensor.dtype == torch.float32 and checkpoint.kinds[name] not in ("norms", "adapters")
    ]
    if not high or 2 * low < sum(tensor.parameters for tensor in matrices.values()):
        return []
    cast = cast_to_16_bits(checkpoint.folder)
    names = [name for name in high if (checkpoint.kinds[name] != "other" if cast is None else name in cast)]
    extra = 2 * sum(matrices[name].parameters for name in names) / 2**20
    return finding(
        "left_in_fp32",
        names,
        f"{{names}} ({{count}}) take {extra:,.1f} MiB more than in 16 bits, and three times as much again for gradient "
        "and moments",
    )


def _norms_of_16_bits(checkpoint: Checkpoint) -> list[Finding]:
    """Norms in 16 bits in a model whose other norms are FP32."""
    norms = checkpoint.norms
    low = [name for name, norm in norms.items() if norm.dtype in LOW_PRECISION_DTYPES]
    high = sum(norm.dtype == torch.float32 for norm in norms.values())
    return finding(
        "norms_of_16_bits",
        low if high >= len(low) else [],
        f"{{count}} in 16 bits, while {high} are FP32: {{names}}",
        noun="norm",
    )


def _not_trained(checkpoint: Checkpoint) -> list[Finding]:
    return finding(
        "not_trained",
        (s.name for s in checkpoint.states if SECOND_MOMENT in s.dtypes and not s.has_gradients and (s.step or 0) > 1),
        "the second moment of {count} is zero everywhere after training: {names}. Their gradients were zero in every "
        "step, or so small that their squares are not stored",
        "Check that they take part in the loss",
    )


def _second_moment_frozen(checkpoint: Checkpoint) -> list[Finding]:
    """Second moments in 16 bits whose decay rounding to nearest undoes in every element.

    Half a spacing is at least eps/4 of a number; a smaller relative change is rounded away.
    """
    frozen = [state for state in checkpoint.states if _is_frozen(state)]
    if not frozen:
        return []
    beta2, dtype = frozen[0].group.beta2, dtype_name(frozen[0].dtypes[SECOND_MOMENT])
    return finding(
        "second_moment_frozen",
        (state.name for state in frozen),
        f"that of {{count}} ({{names}}) is stored in {dtype} and rounded to nearest, where a factor of "
        f"beta2={beta2:g} changes nothing",
    )


def _is_frozen(state: ParameterState) -> bool:
    dtype, beta2 = state.dtypes.get(SECOND_MOMENT), state.group.beta2
    if dtype not in LOW_PRECISION_DTYPES or beta2 is None or not (state.step or 0) > 1:
        return False
    return state.group.rounds_states_to_nearest and 1 - beta2 < torch.finfo(dtype).eps / 4


def _rounded_to_nearest(checkpoint: Checkpoint) -> Iterator[tuple[TensorFacts, ParameterState]]:
    """The 16-bit weights that an Adam is known to round to nearest, without compensation."""
    states = checkpoint.state_of
    for name, state in states.items():
        tensor, is_adam = checkpoint.tensors[name], SECOND_MOMENT in state.dtypes and state.has_gradients
        is_nearest = state.group.rounding == "nearest" and not state.compensation
        if tensor.dtype in LOW_PRECISION_DTYPES and is_nearest and is_adam:
            yield tensor, state


def _updates_lost(checkpoint: Checkpoint) -> list[Finding]:
    """Weights rounded to nearest whose spacing is too large for the learning rate, about the size of Adam's updates."""
    names, coarse, total, highest = [], 0, 0, 0.0
    for tensor, state in _rounded_to_nearest(checkpoint):
        rate = checkpoint.highest_rate(state.group)
        if rate:
            names.append(state.name)
            highest = max(highest, rate)
            coarse += tensor.coarser_than(rate)
            total += tensor.parameters
    if not names or coarse < _COARSE_SHARE * total:
        return []
    return finding(
        "updates_lost",
        names,
        f"{coarse / total:.1%} of the 16-bit weights of {{count}} ({{names}}) have a spacing of more than twice the "
        f"highest learning rate, {highest:.2g}, and their optimizer rounds to nearest",
        low_precision_training(checkpoint),
    )


def _weight_decay_lost(checkpoint: Checkpoint) -> list[Finding]:
    """Weights in 16 bits that are multiplied by `1 - lr * weight_decay`, which rounding to nearest undoes in all."""
    names, factor = [], 1.0
    for tensor, state in _rounded_to_nearest(checkpoint):
        rate = checkpoint.highest_rate(state.group)
        decay = (rate or 0.0) * state.group.weight_decay
        if state.group.decays_in_a_step_of_its_own and 0 < decay < torch.finfo(tensor.dtype).eps / 4:
            names.append(state.name)
            factor = min(factor, 1 - decay)
    return finding(
        "weight_decay_lost",
        names,
        f"in {{count}}: {{names}}. The optimizer multiplies their 16-bit weights by 1 - lr * weight_decay, at least "
        f"{factor:.8g}, and rounding to nearest gives the same weights again",
        f"{low_precision_training(checkpoint)}, where decay and update are rounded together",
    )


def cast_to_16_bits(folder: Path) -> set[str] | None:
    """The names of the tensors that `cast_model` would cast; None if the model cannot be built from its config.json."""
    try:
        model = build_empty_model(*load_config(str(folder)))
        with explain_input_errors("no plan"):
            plan = make_plan(model)
    except InputError:
        return None
    return {tensor.name for tensor in plan.tensors if tensor.dtype != torch.float32 and tensor.action != "leave"}
