"""The change that an algorithm makes to sampled weights before any rounding, for the optimizers of this package.

The formula is evaluated once on the samples of a whole fused group, with per-parameter scalars as columns. What depends
on whole tensors (clip factors, means, orthogonalized matrices) is computed as in the step itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hf_lowprec.monitor.step_precision import COLUMN, SHARE_SUMS, second_moment_sums, share_sums, unbiased_variance
from hf_lowprec.monitor.watched_parameters import ParameterSamples
from hf_lowprec.once import cached_property
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.sharding import global_places
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.fused_group import load, place_of_factor
from hf_lowprec.optim.step.fused_step import evaluate, fused_step, load_states
from hf_lowprec.optim.step.kernel_spec import COLUMN_FACTOR, ORTHOGONALIZED, ROW_FACTOR
from hf_lowprec.optim.step.orthogonalization import parts_to_step
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, MODES, step_keys
from hf_lowprec.rounding.block_floats import BLOCK, code_spacing, decode, intended_bias
from hf_lowprec.rounding.low_bits import fp64_value
from hf_lowprec.rounding.modes import LOW_BITS_STATES
from hf_lowprec.rounding.nearest import spacing

SECOND_MOMENTS = ("exp_avg_sq", "variance")
"""Names of states that average squared gradients."""


class SecondMoment(NamedTuple):
    """The sampled second moments of a step, which are stored in 16 or 8 bits; FP64.

    Attributes:
        name: the name of the state.
        before: the values before the step.
        exact: the exact values after it. For 8 bits, they include the bias of the rounding, see `block_floats.py`.
        grid: the spacing of the stored values, in 8 bits the distances to the next smaller codes; None if rounding is
            not random.
    """

    name: str
    before: Tensor
    exact: Tensor
    grid: Tensor | None


class ExactUpdate(NamedTuple):
    """The exact change of the sampled elements by a step, all of shape (tensors, sample).

    Attributes:
        weight_before: the weights before the step, FP32.
        stored_before: their stored values before the step, compensation or remainder included, FP64.
        update: the exact change, FP64.
        second_moment: the second moments, if there are any of 16 or 8 bits.
        decay: the part of `update` that is due to weight decay, FP64, if it was requested and is not zero; and the
            values that would be stored after the step without weight decay, rounded with the same random bits.
    """

    weight_before: Tensor
    stored_before: Tensor
    update: Tensor
    second_moment: SecondMoment | None
    decay: tuple[Tensor, Tensor] | None


class FusedGroupUpdates:
    """The exact updates of the parameters of a fused group.

    Attributes:
        exact: the exact update of the running step.

    Args:
        optimizer: the optimizer that steps them.
        backend_step: the step of the parameters, with their fused group.
        samples: the samples of the group's entries.
    """

    exact: ExactUpdate

    def __init__(self, optimizer: LowPrecisionOptimizer, backend_step: BackendStep, samples: ParameterSamples) -> None:
        self._optimizer = optimizer
        self._backend_step = backend_step
        self._fused_group = backend_step.fused_group
        self._spec = self._fused_group.spec
        self._stochastic = {state.name for state in self._spec.states if state.stochastic}
        self._samples = samples

    def compute(self, with_decay: bool) -> None:
        """Compute the exact update of the coming step, whose plan has gradients, scalars and tensor means.

        Args:
            with_decay: whether to compute the part that is due to weight decay.
        """
        group, spec = self._fused_group, self._spec
        weight = self._samples.gather(group.weights, "weight").float()
        grad = self._samples.gather([entry.tensors["grad"] for entry in group.entries]).float()
        factors = (ROW_FACTOR, COLUMN_FACTOR) if spec.factored else ()
        state = {name: self._gather(name) for name in (*(stored.name for stored in spec.states), *factors)}
        if spec.orthogonalizes:
            state[ORTHOGONALIZED] = self._orthogonalized()
        update, new_state = evaluate(spec.update, spec, weight, grad, state, self._scalar_columns())
        decay = None
        if with_decay and any(entry.group.get("weight_decay") for entry in group.entries):
            undecayed = self._scalar_columns_without_decay()
            without, _ = evaluate(spec.update, spec, weight, grad, state, undecayed)
            index, _ = self._global_index
            parts = fused_step(spec, weight, grad, state, undecayed, index, self._random_keys(), LOW_BITS_STATES)
            decay = update.double() - without.double(), self._stored_value(*parts)
        stored = self._stored_value(weight, state)
        self.exact = ExactUpdate(weight, stored, update.double(), self._second_moment(state, new_state), decay)

    def compare(self, table: Tensor, stored_weight: Tensor, low_bits: Tensor | None) -> None:
        """Fill in the sums that compare the exact update with what is stored after the step.

        Args:
            table: FP64 of shape (parameters, len(SUMS)).
            stored_weight: the sampled weights.
            low_bits: their compensations or remainders.
        """
        exact, clear_padding = self.exact, self._samples.clear_padding
        stored, elements_per_sample = fp64_value(stored_weight, low_bits), self._samples.elements_per_sample
        grid = _spacing_of_stored(exact.weight_before, stored_weight.dtype, low_bits)
        is_random = MODES[self._spec.rounding].random or not self._stochastic.isdisjoint(LOW_BITS_STATES)
        wide = exact.weight_before.double()
        table[:, COLUMN["weight_square"]] = torch.linalg.vecdot(wide, wide) * elements_per_sample
        update, change = clear_padding(exact.update), stored - exact.stored_before
        sums = {"update": share_sums(update, change, grid if is_random else None, elements_per_sample)}
        if exact.second_moment is not None:
            name, before, after, moment_grid = exact.second_moment
            now = self._gather(name)
            if name in self._spec.scales:
                now = decode(now, self._gather(self._spec.scales[name]), nonnegative=True)
            sums["second_moment"] = second_moment_sums(before, after, now.double(), moment_grid, elements_per_sample)
        if exact.decay is not None:
            # `grid` in every mode: where nearest rounding sends a change as small as the decay depends on the rest.
            decay, stored_without_decay = exact.decay
            change = clear_padding(stored - stored_without_decay)
            sums["weight_decay"] = share_sums(clear_padding(decay), change, grid, elements_per_sample)
        for prefix, columns in sums.items():
            first = COLUMN[f"{prefix}_square"]
            table[:, first : first + len(SHARE_SUMS)] = columns
        del self.exact

    def _second_moment(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> SecondMoment | None:
        """Return the second moment from the states `before` the step, as stored, and `after` it, in FP32."""
        spec = self._spec
        name = next((name for name in SECOND_MOMENTS if name in before), None)
        if name is None or (name not in spec.scales and spec.tensors[name] not in LOW_PRECISION_DTYPES):
            return None
        start, exact = load_states(spec, before)[name].double(), after[name].double()
        grid: Tensor | None = None
        if name in spec.scales:
            grid = code_spacing(before[name], before[spec.scales[name]], nonnegative=True).double()
            exact += intended_bias(unbiased_variance(exact - start, grid), exact)
        elif name in self._stochastic:
            grid = spacing(start, spec.tensors[name])
        return SecondMoment(name, start, exact, grid)

    def _stored_value(self, weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return the FP64 sum of weights and their low bits in `state`, both given in FP32."""
        name = next((name for name in LOW_BITS_STATES if name in state), None)
        return fp64_value(weight, None if name is None else state[name].to(self._spec.tensors[name]))

    def _orthogonalized(self) -> Tensor:
        """Return the FP32 samples of the orthogonalized matrices, which are computed part by part."""
        entries = self._fused_group.entries
        # Replicas may not measure this step, so nothing is computed with them.
        parts = parts_to_step(self._optimizer, self._backend_step, without_replicas=True)
        rows = {k: self._samples.gather_row(k, entries[k].tensors[ORTHOGONALIZED]) for part in parts for k in part}
        return torch.stack([rows[k] for k in range(len(entries))]).float()

    def _gather(self, name: str) -> Tensor:
        """Return the samples of a state or factor as stored, FP32 or int32: values, codes, or scales of blocks."""
        entries = self._fused_group.entries
        if name in (ROW_FACTOR, COLUMN_FACTOR):
            factors, shapes = [entry.tensors[name] for entry in entries], [entry.weight.shape for entry in entries]
            return self._samples.gather_at(factors, lambda row, places: place_of_factor(name, places, shapes[row]))
        tensors = [entry.states[name] for entry in entries]
        if name in self._spec.per_block_tensors:
            return load(self._samples.gather_at(tensors, lambda row, places: places // BLOCK))
        return load(self._samples.gather(tensors, name))

    def _scalar_columns(self) -> dict[str, Tensor]:
        """Return the step's scalars by name, each of shape (entries, 1)."""
        columns = self._fused_group.all_scalars(self._fused_group.scalars.to(self._fused_group.device))
        return dict(zip(self._spec.all_scalars, columns.clone()[:, None].unbind(2), strict=True))

    def _scalar_columns_without_decay(self) -> dict[str, Tensor]:
        """Return the step's scalars as they would be without weight decay."""
        group, scalars = self._fused_group, self._fused_group.scalars.clone()
        try:
            formula = self._optimizer.scalars
            group.step_scalars.compute(lambda options, lr, step: formula({**options, "weight_decay": 0.0}, lr, step))
            return self._scalar_columns()
        finally:
            group.scalars.copy_(scalars)

    def _random_keys(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the coming step's keys by random word."""
        group, segments = self._fused_group, self._fused_group.segments
        step = (group.counts.to(group.device)[:, None] + 1).to(torch.int32)
        streams = torch.zeros(len(group.entries), segments.streams.shape[1], dtype=torch.int64, device="cpu")
        streams[segments.entry_index] = segments.streams  # the same in all segments of an entry
        columns = streams[:, :, None].to(group.device, torch.int32).unbind(1)
        pairs = zip(columns[::2], columns[1::2], strict=True)
        _, high = self._global_index
        return {word: step_keys(*pair, step, high) for word, pair in zip(self._spec.random_words, pairs, strict=True)}

    @cached_property
    def _global_index(self) -> tuple[Tensor, Tensor]:
        """The low and the high words of the sampled elements' indices in the full parameters, int32."""
        index = self._samples.positions.to("cpu", copy=True)
        for row, entry in enumerate(self._fused_group.entries):
            index[row] = global_places(entry.param, index[row])
        device = self._fused_group.device
        return index.to(device, torch.int32), (index >> 32).to(device, torch.int32)


def _spacing_of_stored(weight: Tensor, dtype: torch.dtype, low_bits: Tensor | None) -> Tensor:
    """Return the spacing of stored values: weights in `dtype`, compensations, or FP32 weights with remainders."""
    if low_bits is None:
        return spacing(weight, dtype)
    return spacing(low_bits, low_bits.dtype) if low_bits.is_floating_point() else spacing(weight, torch.float32)
