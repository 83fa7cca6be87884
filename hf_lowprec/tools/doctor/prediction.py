"""Predicts what rounding does to the updates of a model in a planned run, and recommends an optimizer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_lowprec.integrations.checkpoint_files.stored_tensors import StoredTensors
from hf_lowprec.tensor_names import parameter_kinds
from hf_lowprec.tools.doctor.planned_run import PlannedRun
from hf_lowprec.tools.doctor.rounded_updates import RoundedUpdates, count_spacings, round_updates
from hf_lowprec.tools.doctor.update_sizes import Directions, noise_directions

PREDICTED_MODES = {"nearest": (1.0, False), "stochastic": (1.0, True), "split": (2.0**-16, False)}
"""The predicted modes: the spacing of what they store, relative to the weight's, and whether it is stochastic."""
MUCH_NOISE = 10.0
"""Too much. With up to 7 times as much noise as updates move weights, fine-tuning makes 93% and more of FP32's
progress, with 12 times 91%, with 21 times 87%, with 37 times 41%; with 4 times, reinforcement learning earns what FP32
does (`docs/performance/evidence.md`, learning rates and reinforcement learning)."""
SOME_NOISE = 0.5
"""Up to here stochastic rounding is recommended: weights then move 12% further than their updates move them (√1.25)."""
MUCH_LOSS = 0.5
"""The share of updates from which on they count as lost, as in the training log."""
EVALUATED_STEPS = 256
"""A longer run is predicted at this many steps, evenly spaced."""


class WeightCounts(NamedTuple):
    """The weights of a model that training stores in 16 bits: all but norms.

    Attributes:
        decayed: counts of the spacings of those with weight decay.
        not_decayed: counts of the spacings of the others.
    """

    decayed: Tensor
    not_decayed: Tensor


@torch.no_grad()
def count_weights(weights: StoredTensors) -> WeightCounts:
    """Read the weights of a model, tensor by tensor, and count their spacings.

    Raises:
        ValueError: there are none.
    """
    shapes = {name: info.shape for name, info in weights.infos.items() if info.dtype.is_floating_point}
    counted = WeightCounts(*torch.zeros(2, 256, dtype=torch.float64))
    for name, kind in parameter_kinds(shapes).items():
        if kind != "norms":  # Trainer decays all but norms and biases
            (counted.decayed if len(shapes[name]) > 1 else counted.not_decayed).add_(count_spacings(weights.read(name)))
    if not sum(map(torch.sum, counted)):
        raise ValueError("the files contain no floating-point weights; pass a model that is not quantized")
    return counted


def predict_rounding(
    weights: WeightCounts, run: PlannedRun, directions: Directions | None = None
) -> dict[str, RoundedUpdates]:
    """Predict what each of `PREDICTED_MODES` does in `run`, at up to `EVALUATED_STEPS` steps.

    Args:
        weights: those with which it begins.
        run: the planned run.
        directions: of its updates; those of gradients that are noise by default.
    """
    directions = directions or noise_directions(run.algorithm, run.betas)
    last = len(run.learning_rates)
    steps = [round(step) for step in torch.linspace(1, last, min(last, EVALUATED_STEPS)).tolist()]
    rates = [run.learning_rates[step - 1] for step in steps]
    return {
        mode: round_updates(weights.decayed, directions, rates, steps, run.weight_decay, *storage)
        + round_updates(weights.not_decayed, directions, rates, steps, 0.0, *storage)
        for mode, storage in PREDICTED_MODES.items()
    }


def recommend(predicted: dict[str, RoundedUpdates], algorithm: str) -> tuple[str | None, str]:
    """A value of `TrainingArguments.optim`, None if no optimizer suits, and a sentence that says why."""
    if predicted["stochastic"].noise <= SOME_NOISE:
        optim = f"{algorithm}_bf16_sr"
        return optim, f'Use optim="{optim}": it needs no remainder, and its noise is small.'
    if predicted["split"].lost > MUCH_LOSS:
        return None, "Raise the learning rate: updates are too small even for FP32 weights."
    optim = f"{algorithm}_bf16_split"
    return optim, f'Use optim="{optim}": it stores the FP32 weights, so no update is lost.'


def suits(predicted: dict[str, RoundedUpdates], rounding: str) -> bool:
    """Return whether a mode neither loses half of the updates nor adds much noise; Kahan summation does neither."""
    found = predicted.get(rounding)
    return found is None or (found.lost <= MUCH_LOSS and found.noise <= MUCH_NOISE)
