"""Predicts what each rounding mode does to the updates of each part of a model in a planned run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hf_lowprec.integrations.checkpoint_files.stored_tensors import StoredTensors
from hf_lowprec.rounding import MODES
from hf_lowprec.tensor_names import PARAMETER_KINDS, parameter_kinds
from hf_lowprec.tools.doctor.planned_run import PlannedRun
from hf_lowprec.tools.doctor.rounded_updates import RoundedUpdates, count_spacings, round_updates
from hf_lowprec.tools.doctor.update_sizes import ALL, LION, measured_directions, noise_directions

VANISHING = 0.5
"""Updates vanish in a step that loses this share of them."""
EVALUATED_STEPS = 256
"""A longer run is predicted at this many steps, evenly spaced."""


class WeightCounts(NamedTuple):
    """The weights of one kind that are stored in 16 bits.

    Attributes:
        decayed: counts of the spacings of those with weight decay.
        not_decayed: counts of the spacings of the others.
    """

    decayed: Tensor
    not_decayed: Tensor


class ModelWeights(NamedTuple):
    """The weights of a model.

    Attributes:
        parameters: their number, by kind.
        everything: the weights of each kind, all of them in 16 bits, as after `model.to(torch.bfloat16)`.
        cast: those that `cast_model` stores in 16 bits; without kinds of which it stores none.
    """

    parameters: dict[str, int]
    everything: dict[str, WeightCounts]
    cast: dict[str, WeightCounts]


class ModePrediction(NamedTuple):
    """Effects of one rounding mode, or of several by phases, on the updates of one part of the model.

    Attributes:
        steps: the steps for which `rounded` holds values, ascending.
        rounded: the sums over the part's weights.
    """

    steps: list[int]
    rounded: RoundedUpdates

    @property
    def lost(self) -> list[float]:
        """The lost share of updates in each of `steps`, as `lost_updates` in the training log."""
        return (1 - self.rounded.stored / self.rounded.square).nan_to_num(nan=0.0).tolist()

    @property
    def lost_in_run(self) -> float:
        """The lost share of all updates of the run."""
        square = float(self.rounded.square.sum())
        return 1 - float(self.rounded.stored.sum()) / square if square else 0.0

    @property
    def vanishing(self) -> list[tuple[int, int]]:
        """The first and last steps of each stretch of steps in which updates vanish."""
        stretches: list[tuple[int, int]] = []
        previous = False
        for step, lost in zip(self.steps, self.lost, strict=True):
            vanishes = lost >= VANISHING
            if vanishes:
                stretches = [*stretches[:-1], (stretches[-1][0], step)] if previous else [*stretches, (step, step)]
            previous = vanishes
        return stretches

    @property
    def vanishing_share(self) -> float:
        """The share of steps in which updates vanish."""
        return sum(lost >= VANISHING for lost in self.lost) / len(self.steps)

    @property
    def noise(self) -> float:
        """Root mean square of the noise that rounding adds during the run, relative to that of the displacement."""
        displacement = float(self.rounded.displacement.sum())
        return (float(self.rounded.noise.sum()) / displacement) ** 0.5 if displacement else 0.0

    @property
    def blurs_from(self) -> int | None:
        """The first step from which on the rest of the run adds more noise than displacement; None if there is none."""
        noise, displacement = (part.flip(0).cumsum(0).flip(0) for part in self.rounded[2:])
        blurred = noise > displacement
        return next((step for step, is_blurred in zip(self.steps, blurred.tolist(), strict=True) if is_blurred), None)


class Prediction(NamedTuple):
    """The prediction for a run.

    Attributes:
        run: the run.
        parameters: the number of weights of each kind in the model, and of "all" of them.
        by_mode: for each rounding mode, the prediction for each kind, and for "all". Kinds that stay in FP32 have none.
            Under "nearest" these are none of a run with an optimizer of another library.
        requested: the same for the modes of `run`, phase by phase.
        measured: whether the sizes of updates are those of a checkpoint.
    """

    run: PlannedRun
    parameters: dict[str, int]
    by_mode: dict[str, dict[str, ModePrediction]]
    requested: dict[str, ModePrediction]
    measured: bool


@torch.no_grad()
def count_weights(weights: StoredTensors, kept_in_fp32: Mapping[str, bool] | None = None) -> ModelWeights:
    """Read all floating-point weights, tensor by tensor, and count their spacings by kind.

    Args:
        weights: of a model or checkpoint.
        kept_in_fp32: by name, whether `cast_model` keeps a tensor in FP32. Of others, it is assumed to keep norms.

    Raises:
        ValueError: there are none.
    """
    shapes = {name: info.shape for name, info in weights.infos.items() if info.dtype.is_floating_point}
    if not shapes:
        raise ValueError("the files contain no floating-point weights; pass a model that is not quantized")
    parameters: dict[str, int] = {}
    everything: dict[str, WeightCounts] = {}
    cast: dict[str, WeightCounts] = {}
    for name, kind in parameter_kinds(shapes).items():
        counts = count_spacings(weights.read(name))
        is_kept = (kept_in_fp32 or {}).get(name, kind == "norms")
        for found in (everything,) if is_kept else (everything, cast):
            part = found.setdefault(kind, WeightCounts(torch.zeros_like(counts), torch.zeros_like(counts)))
            # As in Trainer, except for the rare matrices that are named as a bias or norm.
            (part.decayed if len(shapes[name]) > 1 else part.not_decayed).add_(counts)
        parameters[kind] = parameters.get(kind, 0) + shapes[name].numel()
    return ModelWeights({kind: parameters[kind] for kind in PARAMETER_KINDS if kind in parameters}, everything, cast)


def predict_rounding(
    weights: ModelWeights, run: PlannedRun, directions: Mapping[str, Tensor] | None = None
) -> Prediction:
    """Predict what rounding does in `run`.

    Args:
        weights: those with which it begins.
        run: the planned run.
        directions: of an algorithm with Adam's moments, sampled by kind, see `saved_directions`; noise is assumed
            without.
    """
    if run.algorithm == LION:
        directions = None
    steps = [round(step) for step in torch.linspace(1, run.steps, min(run.steps, EVALUATED_STEPS)).tolist()]
    by_mode: dict[str, dict[str, ModePrediction]] = {}
    for mode in MODES:
        is_stock = mode == "nearest" and not run.is_ours
        rounded = _round_kinds(weights.everything if is_stock else weights.cast, mode, run, steps, directions)
        by_mode[mode] = {kind: ModePrediction(steps, of_kind) for kind, of_kind in rounded.items()}
    modes = [run.rounding.mode(step - 1, run.steps) for step in steps]
    requested = {
        kind: _by_phase({mode: by_mode[mode][kind] for mode in set(modes)}, modes) for kind in by_mode[modes[0]]
    }
    parameters = {**weights.parameters, ALL: sum(weights.parameters.values())}
    return Prediction(run, parameters, by_mode, requested, measured=bool(directions))


def _round_kinds(
    counts: Mapping[str, WeightCounts],
    mode: str,
    run: PlannedRun,
    steps: list[int],
    measured: Mapping[str, Tensor] | None,
) -> dict[str, RoundedUpdates]:
    """The rounding of each kind, and of "all"."""
    rates = [run.learning_rates[step - 1] for step in steps]
    decay = 0.0 if run.decay_is_separate else run.weight_decay
    rounded: dict[str, RoundedUpdates] = {}
    for kinds in [[kind] for kind in counts] if measured or not counts else [[*counts]]:  # those with equal directions
        directions = (
            measured_directions(measured.get(kinds[0], measured[ALL]), run.algorithm, run.betas)
            if measured
            else noise_directions(run.algorithm, run.betas)
        )
        decayed, not_decayed = (torch.stack([getattr(counts[k], part) for k in kinds]) for part in _PARTS)
        sums = round_updates(decayed, directions, rates, steps, decay, run.storage(mode))
        sums += round_updates(not_decayed, directions, rates, steps, 0.0, run.storage(mode))
        rounded |= {kind: RoundedUpdates(*(part[k] for part in sums)) for k, kind in enumerate(kinds)}
    if rounded:
        rounded[ALL] = RoundedUpdates(*(torch.stack(parts).sum(0) for parts in zip(*rounded.values(), strict=True)))
    return rounded


_PARTS = ("decayed", "not_decayed")


def _by_phase(predictions: Mapping[str, ModePrediction], modes: list[str]) -> ModePrediction:
    """The prediction of which each step has the mode in `modes`."""
    total: RoundedUpdates | None = None
    for mode, prediction in predictions.items():
        active = torch.tensor([other == mode for other in modes], dtype=torch.float64)
        part = RoundedUpdates(*(values * active for values in prediction.rounded))
        total = part if total is None else total + part
    assert total is not None
    return ModePrediction(next(iter(predictions.values())).steps, total)
