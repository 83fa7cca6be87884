"""The change that an algorithm makes to sampled weights before any rounding, for the optimizers of this package.

The formula is evaluated once on the samples of a whole fused group, whose per-parameter scalars are columns. What only
the values of whole tensors give (clip factors, means, orthogonalized matrices) is computed as in the step itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_lowprec.monitor.parameter_samples import ParameterSamples
from hf_lowprec.monitor.step_precision import unbiased_variance
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.sharding import global_places
from hf_lowprec.optim.state.fp32_weights import low_bits_state
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.fused_group import FusedGroup, load, place_of_factor
from hf_lowprec.optim.step.fused_step import algorithm_update, fused_step, load_states
from hf_lowprec.optim.step.kernel_spec import COLUMN_FACTOR, ORTHOGONALIZED, ROW_FACTOR
from hf_lowprec.optim.step.whole_tensor_quantities import parts_to_step
from hf_lowprec.rounding import MODES, step_keys
from hf_lowprec.rounding.block_floats import BLOCK, code_spacing, decode, intended_bias
from hf_lowprec.rounding.low_bits import fp64_value
from hf_lowprec.rounding.modes import LOW_BITS_STATES

SECOND_MOMENTS = ("exp_avg_sq", "variance")
"""Names of states that average squared gradients."""


@dataclass
class SecondMoment:
    """The sampled second moments of a step, FP64.

    Attributes:
        name: of the state.
        before: their values before the step.
        after: the exact values after it. For 8 bits, they include the bias of their rounding, see `block_floats.py`.
        code_spacing: in 8 bits, the distances to the next smaller codes.
    """

    name: str
    before: Tensor
    after: Tensor
    code_spacing: Tensor | None = None


@dataclass
class ExactUpdate:
    """The exact change of the sampled elements by a step, all of shape (tensors, sample).

    Attributes:
        weight: the weights before the step, FP32.
        stored: what is stored of them before the step: FP64, the compensation or remainder included.
        update: the exact change, FP64.
        random_weights: whether the weights, or their compensations, are rounded stochastically.
        random_states: whether the second moments may be.
        second_moment: the second moments, if there are any.
        decay: the part of `update` that is due to weight decay, FP64, if it was asked for and there is one.
        stored_without_decay: what would be stored after the step without weight decay, rounded by the same random bits.
    """

    weight: Tensor
    stored: Tensor
    update: Tensor
    random_weights: bool = True
    random_states: bool = True
    second_moment: SecondMoment | None = None
    decay: Tensor | None = None
    stored_without_decay: Tensor | None = None


class FusedGroupUpdates:
    """Computes exact updates of the parameters of a fused group.

    Args:
        optimizer: the optimizer that steps them.
        backend_step: how the parameters are stepped, with their fused group.
        samples: the samples of the group's entries.
    """

    def __init__(self, optimizer: LowPrecisionOptimizer, backend_step: BackendStep, samples: ParameterSamples) -> None:
        self.optimizer = optimizer
        self.fused_group = backend_step.fused_group
        self._backend_step = backend_step
        self.samples = samples
        self._index: tuple[Tensor, Tensor] | None = None

    def compute(self, with_decay: bool) -> ExactUpdate:
        """Compute the exact update of the coming step, whose plan has gradients, scalars and tensor means.

        Args:
            with_decay: whether to compute the part of the weight decay.
        """
        group, spec = self.fused_group, self.fused_group.spec
        weight = self.samples.gather(group.weights, "weight").float()
        grad = self.samples.gather([entry.tensors["grad"] for entry in group.entries]).float()
        state = {stored.name: load(self._gather(stored.name)) for stored in spec.states}
        for name in (ROW_FACTOR, COLUMN_FACTOR) if spec.factored else ():
            state[name] = self._factors(name)
        if spec.orthogonalizes:
            state[ORTHOGONALIZED] = self._orthogonalized()
        scalars = self._scalar_columns(group.scalars)
        update, new_state = algorithm_update(spec, weight, grad, state, scalars)
        stochastic = {stored.name for stored in spec.states if stored.stochastic}
        exact = ExactUpdate(
            weight=weight,
            stored=self._stored_value(weight, state),
            update=update.double(),
            random_weights=MODES[spec.rounding].random or not stochastic.isdisjoint(LOW_BITS_STATES),
            random_states=not stochastic.isdisjoint(SECOND_MOMENTS),
            second_moment=self._second_moment(state, new_state),
        )
        if with_decay and any(entry.group.get("weight_decay") for entry in group.entries):
            undecayed = self._scalar_columns(_scalars_without_decay(self.optimizer, group))
            without, _ = algorithm_update(spec, weight, grad, state, undecayed)
            exact.decay = exact.update - without.double()
            index, keys = self._random_keys()
            new_weight, low_bits = fused_step(spec, weight, grad, state, undecayed, index, keys, LOW_BITS_STATES)
            exact.stored_without_decay = self._stored_value(new_weight, low_bits)
        return exact

    def _second_moment(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> SecondMoment | None:
        """The second moment among the states `before` the step, as they are stored, and `after` it, in FP32."""
        spec = self.fused_group.spec
        name = next((name for name in SECOND_MOMENTS if name in before), None)
        if name is None:
            return None
        old, new = load_states(spec, before)[name].double(), after[name].double()
        if name not in spec.scales:
            return SecondMoment(name, old, new)
        grid = code_spacing(before[name], before[spec.scales[name]], nonnegative=True).double()
        return SecondMoment(name, old, new + intended_bias(unbiased_variance(new - old, grid), new), grid)

    def _stored_value(self, weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """The FP64 sum of weights and their low bits in `state`, both given in FP32."""
        dtypes = self.fused_group.spec.tensors
        low_bits = {name: value.to(dtypes[name]) for name, value in state.items() if name in LOW_BITS_STATES}
        return fp64_value(weight, low_bits_state(low_bits))

    def _orthogonalized(self) -> Tensor:
        """The samples of the orthogonalized matrices, which are computed part by part; FP32."""
        entries = self.fused_group.entries
        rows: dict[int, Tensor] = {}
        for part in parts_to_step(self.optimizer, self._backend_step):
            rows |= {k: self.samples.gather_row(k, entries[k].tensors[ORTHOGONALIZED]) for k in part}
        return torch.stack([rows[k] for k in range(len(entries))]).float()

    def _factors(self, name: str) -> Tensor:
        """The row or column factors of the samples, FP32; zeros for padding."""
        factors = torch.zeros(self.samples.positions.shape, dtype=torch.float32, device=self.fused_group.device)
        for row, (entry, count) in enumerate(zip(self.fused_group.entries, self.samples.counts, strict=True)):
            places = place_of_factor(name, self.samples.positions[row, :count], entry.weight.shape)
            factors[row, :count] = entry.tensors[name][places]
        return factors

    def _gather(self, name: str) -> Tensor:
        """The samples of a state as it is stored, which may be codes, or those of the scales."""
        tensors = [entry.states[name] for entry in self.fused_group.entries]
        if name in self.fused_group.spec.per_block_tensors:
            return self.samples.gather_of_blocks(tensors, BLOCK)
        return self.samples.gather(tensors, name)

    def stored_state(self, name: str) -> Tensor | None:
        """Gather the values of a state as it is stored now; None if there is none of that name.

        They have the dtype of the state, or FP32 if it is stored in 8 bits.
        """
        spec = self.fused_group.spec
        if name in spec.scales:
            code, scale = (load(self._gather(each)) for each in (name, spec.scales[name]))
            (stored,) = (each for each in spec.states if each.name == name)
            return decode(code, scale, stored.nonnegative)
        return self._gather(name) if name in self.fused_group.entries[0].states else None

    def _scalar_columns(self, scalars: Tensor) -> dict[str, Tensor]:
        """The step's scalars by name, each of shape (entries, 1)."""
        group = self.fused_group
        columns = group.all_scalars(scalars.to(group.device))
        return dict(zip(group.spec.all_scalars, (column[:, None] for column in columns.unbind(1)), strict=True))

    def _random_keys(self) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
        """The low words of the elements' global indices, and the coming step's keys by random word."""
        group = self.fused_group
        if self._index is None:
            self._index = _global_index(group, self.samples)
        low, high = self._index
        step = (group.counts.to(group.device)[:, None] + 1).to(torch.int32)
        streams = _stream_keys(group)[:, :, None].to(group.device, torch.int32).unbind(1)
        pairs = zip(streams[::2], streams[1::2], strict=True)
        return low, {
            word: step_keys(*pair, step, high) for word, pair in zip(group.spec.random_words, pairs, strict=True)
        }


def _scalars_without_decay(optimizer: LowPrecisionOptimizer, fused_group: FusedGroup) -> Tensor:
    """The coming step's scalars as they would be without weight decay, FP32 of shape (entries, scalars)."""
    rows: dict[tuple[int, int], list[float]] = {}
    table = []
    for entry, count in zip(fused_group.entries, fused_group.counts.tolist(), strict=True):
        key = id(entry.group), count
        if key not in rows:
            group = {**entry.group, "weight_decay": 0.0}
            rows[key] = list(optimizer.scalars(group, float(group["lr"]), count + 1).values())
        table.append(rows[key])
    return torch.tensor(table, dtype=torch.float32, device="cpu")


def _stream_keys(fused_group: FusedGroup) -> Tensor:
    """The stream keys of each entry, int64 of shape (entries, 2 × random words)."""
    segments = fused_group.segments
    streams = torch.zeros(len(fused_group.entries), segments.streams.shape[1], dtype=torch.int64, device="cpu")
    streams[segments.entry_index] = segments.streams  # the same in all segments of an entry
    return streams


def _global_index(fused_group: FusedGroup, samples: ParameterSamples) -> tuple[Tensor, Tensor]:
    """The low and the high words of the sampled elements' indices in the full parameters, int32."""
    index = samples.positions.to("cpu", copy=True)
    for row, entry in enumerate(fused_group.entries):
        index[row] = global_places(entry.param, index[row])
    return index.to(fused_group.device, torch.int32), (index >> 32).to(fused_group.device, torch.int32)
