"""Predicts what rounding does to the updates of a model in a planned run, and recommends an optimizer.

A planned run is a training run that is not started: its learning rates, and how its optimizer rounds. The sizes of its
updates are those for gradients that are noise (`noise_directions`).
"""

from __future__ import annotations

import math
from tempfile import gettempdir
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import SchedulerType, Trainer, TrainingArguments, get_scheduler

from hf_lowprec.integrations.checkpoint_files.stored_tensors import StoredTensors
from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES
from hf_lowprec.tensor_names import parameter_kinds
from hf_lowprec.tools.doctor.rounded_updates import Directions, RoundedUpdates, count_spacings, round_updates

_ADAMS = ("adam", "adamw", "stableadamw")
_LION = "lion"
PREDICTED_ALGORITHMS = (*_ADAMS, "adafactor", _LION)
"""The algorithms whose updates have a size that does not depend on that of the gradients."""
_STOCK = ("adamw_torch", "adamw_torch_fused")
"""Names of transformers whose updates can be predicted: torch's AdamW, which rounds to nearest."""
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
_SAMPLE = 512
"""Directions in a sample."""


class PlannedRun(NamedTuple):
    """A planned run.

    Attributes:
        algorithm: one of `PREDICTED_ALGORITHMS`.
        betas: decay rates of the moments.
        learning_rates: of all steps.
        weight_decay: what is part of the update. torch's AdamW, unless fused, decays by a multiplication of its own.
        rounding: the rounding mode.
    """

    algorithm: str
    betas: tuple[float, float]
    learning_rates: list[float]
    weight_decay: float
    rounding: str


def plan_run(
    optim: str, learning_rate: float, steps: int, scheduler: str, warmup_steps: float = 0.0, weight_decay: float = 0.0
) -> PlannedRun:
    """Plan a run from the arguments of `TrainingArguments` with these names.

    Raises:
        ValueError: an argument is invalid, or the sizes of updates or learning rates cannot be known beforehand.
    """
    valid = (*_STOCK, *(name for name in OPTIMIZER_NAMES if name.split("_bf16_")[0] in PREDICTED_ALGORITHMS))
    if optim not in valid:
        raise ValueError(f"--optim {optim}: the sizes of its updates are not predicted; valid are {', '.join(valid)}")
    if not learning_rate > 0:
        raise ValueError(f"--lr {learning_rate:g} is not positive")
    args = TrainingArguments(
        gettempdir(),
        optim=optim,
        learning_rate=learning_rate,
        lr_scheduler_type=scheduler,
        warmup_steps=warmup_steps,
        max_steps=steps,
        weight_decay=weight_decay,
        use_cpu=True,
        report_to=[],
    )
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    group = cls([torch.zeros(1, requires_grad=True)], **kwargs).param_groups[0]
    decays_in_update = optim != "adamw_torch" and group.get("decoupled_weight_decay", True)
    return PlannedRun(
        algorithm=optim.partition("_")[0],
        betas=tuple(group.get("betas") or (group["beta1"] or 0.0, 0.0)),
        learning_rates=_learning_rates(args),
        weight_decay=weight_decay if decays_in_update else 0.0,
        rounding=group.get("rounding", "nearest"),
    )


def _learning_rates(args: TrainingArguments) -> list[float]:
    """The learning rate of each of `args.max_steps` steps, from the scheduler that Trainer would build."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    try:
        warmup = args.get_warmup_steps(args.max_steps)
        scheduler: Any = get_scheduler(args.lr_scheduler_type, optimizer, warmup, args.max_steps)
    except (TypeError, ValueError) as error:
        name = SchedulerType(args.lr_scheduler_type).value
        raise ValueError(f"--scheduler {name}: {error}; name one that needs no arguments") from None
    rates = []
    for _ in range(args.max_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


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


def noise_directions(algorithm: str, betas: tuple[float, float]) -> Directions:
    """The directions of an algorithm of `PREDICTED_ALGORITHMS` if gradients are noise.

    Such gradients are independent from step to step, Gaussian, and of constant variance.

    **Adam, AdamW, StableAdamW**: `r = m̂/√v̂`. With step weights `a_k = (1-β1)·β1^(t-k)/(1-β1^t)`, which add up to 1,
    `m̂ = Σ a_k·g_k`. For β2 near 1, `v̂` is the mean of all `g_k²`. A vector of Gaussian numbers has a uniform
    direction, so `E[r²] = E[(Σ a_k·g_k)² / mean(g_k²)] = Σ a_k²`, exactly and for every `t`:

        ρ_t² = (1-β1)·(1+β1^t) / ((1+β1)·(1-β1^t))

    It is 1 in the first step and `(1-β1)/(1+β1)` in the end: ρ = 0.23 for β1 = 0.9. From about the tenth step on, `r`
    is close to Gaussian. `Σ_t r_t` over many steps has the variance of `Σ_t g_t/σ`: 1 per step. So directions persist:
    the variance of the displacement is `1/ρ²` times what independent updates of that size would give.

    **Adafactor** without `relative_step` and `scale_parameter`: the same, but with the final size from the first step,
    and without `beta1` as for β1 = 0. The RMS of `r` is then 1, the limit above which it clips.

    **Lion**: `r = sign(c)`, whose size is 1. `c = Σ w_k·g_(t-k)` with `w_0 = 1-β1` and `w_k = β1·(1-β2)·β2^(k-1)`. The
    signs of two Gaussian numbers with correlation κ have correlation `(2/π)·asin(κ)`, which gives the persistence.

    What real gradients add:

    - Gradients that agree from step to step (large batches, the beginning of training) make `r` larger. 0.2 to 0.4 is
      usual (Liu et al., arXiv:2502.16982, section 2.2), up to 1 for small heads. Then updates vanish later than
      predicted.
    - Gradients that shrink faster than `v̂` forgets (β2 = 0.999: a thousand steps) make `r` smaller, and a denominator
      in which `eps` counts as well. Then updates vanish earlier.
    """
    if algorithm == _LION:
        return Directions(torch.ones(1, dtype=torch.float64), 0.0, _lion_persistence(*betas))
    size = _adam_size(betas[0])
    return Directions(size * _half_normal_sample(), betas[0] if algorithm in _ADAMS else 0.0, 1 / size**2)


def _adam_size(beta1: float) -> float:
    """Root mean square of the directions of Adam after many steps, if gradients are noise."""
    return math.sqrt((1 - beta1) / (1 + beta1))


def _lion_persistence(beta1: float, beta2: float) -> float:
    """`Directions.persistence` of Lion, if gradients are noise."""
    tail = beta1 * (1 - beta2)
    tail_square = tail**2 / (1 - beta2**2)
    variance = (1 - beta1) ** 2 + tail_square
    lags = torch.arange(1, 1 + math.ceil(40 / (1 - beta2)), dtype=torch.float64)
    correlation = ((1 - beta1) * tail * beta2 ** (lags - 1) + tail_square * beta2**lags) / variance
    return 1 + 2 * float((2 / math.pi * correlation.asin()).sum())


def _half_normal_sample() -> Tensor:
    """Absolute values of a standard normal variable at equally likely quantiles, of mean square 1."""
    quantiles = (torch.arange(_SAMPLE, dtype=torch.float64) + 0.5) / _SAMPLE
    values = math.sqrt(2) * torch.erfinv(quantiles)
    return values / values.square().mean().sqrt()
