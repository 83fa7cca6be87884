"""The arithmetic of one step as torch code: load → update → round → store.

`fused_step` is the only place where an algorithm, a rounding mode and the random bits meet. The `eager` backend runs
it on tensors; the other backends compile a trace of it (see `backends/trace.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.step.kernel_spec import CLIP, KernelSpec
from hf_lowprec.rounding import MODES, random_word, round_nearest, round_stochastic
from hf_lowprec.rounding.block_floats import decode, encode
from hf_lowprec.rounding.modes import DrawBits, StoredState
from hf_lowprec.rounding.random_bits import lane, word_of


def fused_step(
    spec: KernelSpec,
    weight: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
    index: Tensor,
    keys: Mapping[int, tuple[Any, Any]],
    only_states: Collection[str] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the new weight and states of some elements.

    Args:
        spec: what to compute.
        weight: FP32 tensor of the elements' stored weights.
        grad: FP32 tensor of their gradients.
        state: FP32 tensors by state name, int32 for states that are stored as integers; and `orthogonalized` if the
            spec has it, or the factors of its row and column.
        scalars: FP32 scalars by name (numbers, or tensors that broadcast).
        index: int32 tensor, the low 32 bits of the elements' global indices.
        keys: the step keys `(key0, key1)` by random word.
        only_states: names of the states to return; None returns all. To return states in 8 bits, the elements must be
            whole blocks.

    Returns:
        `(weight', state')`: FP32 or int32 tensors whose values the storage dtypes represent exactly.
    """
    draw = _draw_bits(index, keys)
    loaded, decoded = _load_weight(spec, weight, state), load_states(spec, state)
    update, new_state = _call(spec.update, spec, decoded, scalars, loaded, _load_gradient(spec, grad, scalars))
    if spec.param_dtype == torch.float32:
        new_weight = loaded + update
    else:
        new_weight, auxiliary = MODES[spec.rounding].add(loaded, update, state, draw, spec.param_dtype)
        if spec.feed_back:
            values = SimpleNamespace(**{**decoded, **new_state}), SimpleNamespace(**scalars)
            new_state = new_state | spec.feed_back(loaded + update - new_weight, *values, **dict(spec.options))
        new_state = {**new_state, **auxiliary}
    rounded: dict[str, Tensor] = {}
    for stored in spec.states:
        if stored.scale_of is None and (only_states is None or stored.name in only_states):
            rounded |= _store(spec, stored, new_state[stored.name], draw)
    return new_weight, rounded


def _draw_bits(index: Tensor, keys: Mapping[int, tuple[Any, Any]]) -> DrawBits:
    """Return a function from a role to its random bits (see `random_bits.py`). Roles that share a word draw it once.

    Args:
        index: the global index of each element.
        keys: the keys of the step, by word.
    """
    words: dict[int, Tensor] = {}

    def draw(role: int) -> Tensor:
        word = word_of(role)
        if word not in words:
            words[word] = random_word(index, *keys[word])
        return lane(words[word], role)

    return draw


def _store(spec: KernelSpec, stored: StoredState, value: Tensor, draw: DrawBits) -> dict[str, Tensor]:
    """Convert the new value of a state to its stored form, by name: rounded, or as codes and scales."""
    if stored.name in spec.scales:
        code, scale = encode(value, draw(stored.role), stored.nonnegative)
        return {stored.name: code, spec.scales[stored.name]: scale}
    if stored.dtype.is_floating_point:
        if stored.stochastic:
            return {stored.name: round_stochastic(value, draw(stored.role))}
        return {stored.name: round_nearest(value, stored.dtype)}
    return {stored.name: value}


def evaluate(
    formula: Callable[..., Any],
    spec: KernelSpec,
    weight: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
) -> Any:
    """Evaluate one of the algorithm's elementwise formulas, `update` or one of `tensor_means`, before any rounding.

    All of them see the weight as the rounding mode loads it, and the gradient after clipping and, with `maximize`,
    after its change of sign. The arguments are those of `fused_step`.
    """
    loaded = _load_weight(spec, weight, state), _load_gradient(spec, grad, scalars)
    return _call(formula, spec, load_states(spec, state), scalars, *loaded)


def momentum_matrix(
    formula: Callable[..., Any], spec: KernelSpec, grad: Tensor, state: Mapping[str, Tensor], scalars: Mapping[str, Any]
) -> Tensor:
    """Evaluate an algorithm's formula `momentum_matrix`, which sees what `update` sees except for the weight."""
    matrix: Tensor = _call(formula, spec, load_states(spec, state), scalars, _load_gradient(spec, grad, scalars))
    return matrix


def _load_gradient(spec: KernelSpec, grad: Tensor, scalars: Mapping[str, Any]) -> Tensor:
    """Return the gradient that the formulas see: after clipping and, with `maximize`, after its change of sign."""
    if spec.clipped:
        grad = grad * scalars[CLIP]
    return -grad if spec.maximize else grad


def _load_weight(spec: KernelSpec, weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return the FP32 weight that the formulas see, see `Mode.load`."""
    return weight if spec.param_dtype == torch.float32 else MODES[spec.rounding].load(weight, state)


def load_states(spec: KernelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the states that the formulas see: those in 8 bits decoded, all others as they are."""
    decoded = dict(state)
    for stored in spec.states:
        if stored.name in spec.scales:
            decoded[stored.name] = decode(state[stored.name], state[spec.scales[stored.name]], stored.nonnegative)
    return decoded


def _call(
    formula: Callable[..., Any],
    spec: KernelSpec,
    state: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
    *tensors: Tensor,
) -> Any:
    return formula(*tensors, SimpleNamespace(**state), SimpleNamespace(**scalars), **dict(spec.options))
