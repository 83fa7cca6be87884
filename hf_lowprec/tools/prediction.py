r"""Predicts what rounding does to the updates of a model in a planned run, and recommends an optimizer.

A planned run is a run before its start: its learning rates, and how its optimizer rounds. The sizes of its updates are
computed for gradients that are noise (`noise_directions`).

**Rounding to nearest** moves a stored weight of spacing `s` by `Δ = s·round(u/s)`. The lost share of updates is
`1 - E[u·Δ]/E[u²]`, as in the training log. For Gaussian `u` of standard deviation σ, integration by parts gives

    lost = 1 - (s/σ)·√(2/π)·Σ_{j≥0} exp(-((j+½)·s/σ)²/2)

and by Stein's lemma, a small drift inside `u`, such as weight decay, loses the same share. Half is lost at σ = s/3.8.
Here, the expectation is taken over a sample of directions, which need not be Gaussian.

**Stochastic rounding** loses nothing. Rounding `u` to a multiple of `s` adds noise of variance `s²·f·(1-f)`, where `f`
is the fractional part of `u/s`: about `s·|u|` for small updates. The noise of different steps is independent, so its
variances `v_t` add up. So do the variances of the updates' own displacement, `Σ_t E[u_t²]·persistence`. The ratio of
the two sums' roots is the *noise* of a run.

**Error feedback** (`Algorithm.feed_back`) adds `1-β` of the outstanding error to the weight in each step. With the
step's own rounding error `e`, the outstanding error becomes `O' = β·O + e`. Its variance is `E[e²]/(1-β²)`:

- Errors of the updates give `v/(1-β²)`, with the mean `v` of `v_t`.
- Corrections are rounded as well. If the exact weight is at a fraction `φ` of its spacing, the stored one jumps up with
  probability `(1-β)·φ`, and down with `(1-β)·(1-φ)`. So it is up with probability `φ`: it is the exact weight, rounded
  stochastically once, with variance `s²·φ·(1-φ)`. Weights begin on the grid, so `φ` is the fractional part of the
  displacement over `s`. If that is large, the mean is `s²/6`.
- Where the learning rate is below `LEAST_RATE` of its peak, only a share `p` is corrected. Corrections of corrections
  turn one error into `1/(1-p)`, and `1-p` of each is never corrected: together `(1-p)·v_t`.

The noise is the sum of the three, and never more than `Σ_t v_t`.

All of this depends only on a weight's spacing, the distance to the next BF16 number, which depends on its exponent. So
a histogram of 256 counts replaces a tensor.

**Split weights** are rounded like numbers with more bits: with a remainder of `n` bits, their spacing is `s/2^n`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from tempfile import gettempdir
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import SchedulerType, Trainer, TrainingArguments, get_scheduler

from hf_lowprec.integrations.checkpoint_files.stored_tensors import LazyTensors
from hf_lowprec.monitor.rules import LOST
from hf_lowprec.monitor.step_precision import unbiased_variance
from hf_lowprec.optim.algorithm_interface import LEAST_RATE
from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES
from hf_lowprec.rounding.nearest import EXPONENTS, spacings_by_exponent
from hf_lowprec.tensor_names import parameter_kinds

_ADAMS = ("adam", "adamw", "stableadamw")
_LION = "lion"
PREDICTED_ALGORITHMS = (*_ADAMS, "adafactor", _LION)
"""The algorithms whose updates have a size that does not depend on the gradients' size."""
_TORCH_ADAMW = ("adamw_torch", "adamw_torch_fused")
"""Names in transformers whose updates can be predicted: torch's AdamW, which rounds to nearest."""
PREDICTED_MODES = {"nearest": (1.0, False), "stochastic": (1.0, True), "split": (2.0**-16, False)}
"""The predicted modes: the spacing of what they store, relative to the weight's, and whether they are stochastic."""
MUCH_NOISE = 10.0
"""The noise above which a mode is not recommended. With noise up to 12 times the movement by updates, fine-tuning makes
94% and more of FP32's progress; with 21 and 37 times, FP32 itself progresses too little to compare. With 4 times,
reinforcement learning earns as much as with FP32. All are without error feedback (`docs/performance/evidence.md`,
learning rates and reinforcement learning)."""
SOME_NOISE = 0.5
"""The noise up to which stochastic rounding is recommended: weights move 12% further than by their updates (√1.25)."""
EVALUATED_STEPS = 256
"""A longer run is predicted at this many steps, evenly spaced."""
_SAMPLE = 512
"""The number of directions in a sample."""
CHUNK = 1 << 22
"""The number of elements converted at a time."""
_MANTISSA_BITS = 7


class PlannedRun(NamedTuple):
    """A planned run.

    Attributes:
        algorithm: one of `PREDICTED_ALGORITHMS`.
        betas: decay rates of the moments.
        learning_rates: the learning rates of all steps.
        weight_decay: the weight decay inside the update. torch's AdamW, unless fused, decays by a separate
            multiplication.
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
        ValueError: an argument is invalid, or the sizes of updates or the learning rates cannot be predicted.
    """
    valid = (*_TORCH_ADAMW, *(name for name in OPTIMIZER_NAMES if name.split("_bf16_")[0] in PREDICTED_ALGORITHMS))
    if optim not in valid:
        raise ValueError(f"--optim {optim}: the size of its updates cannot be predicted; valid are {', '.join(valid)}")
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
    """Return the learning rate of each of `args.max_steps` steps, from the scheduler that Trainer would build."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    try:
        warmup = args.get_warmup_steps(args.max_steps)
        scheduler: Any = get_scheduler(args.lr_scheduler_type, optimizer, warmup, args.max_steps)
    except (TypeError, ValueError) as error:
        name = SchedulerType(args.lr_scheduler_type).value
        raise ValueError(f"--scheduler {name}: {error}; choose one that needs no arguments") from None
    rates = []
    for _ in range(args.max_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@torch.no_grad()
def count_weights(weights: LazyTensors) -> Tensor:
    """Read the weights that training stores in 16 bits, all but norms, and count their spacings.

    Returns:
        FP64 of shape (2, 256): counts of the weights with weight decay, and of the others.

    Raises:
        ValueError: there are none.
    """
    shapes = {name: info.shape for name, info in weights.infos.items() if info.dtype.is_floating_point}
    counts = torch.zeros(2, EXPONENTS, dtype=torch.float64)
    for name, kind in parameter_kinds(shapes).items():
        if kind != "norms":  # Trainer decays all but norms and biases
            counts[int(len(shapes[name]) <= 1)] += count_spacings(weights.read(name))
    if not counts.any():
        raise ValueError("the files contain no floating-point weights; pass a model that is not quantized")
    return counts


def predict_rounding(weights: Tensor, run: PlannedRun) -> dict[str, RoundedUpdates]:
    """Predict what each of `PREDICTED_MODES` does in `run`, at up to `EVALUATED_STEPS` steps.

    Args:
        weights: the initial weights, see `count_weights`.
        run: the planned run.
    """
    directions, last = noise_directions(run.algorithm, run.betas), len(run.learning_rates)
    steps = [round(step) for step in torch.linspace(1, last, min(last, EVALUATED_STEPS)).tolist()]
    rates = [run.learning_rates[step - 1] for step in steps]
    decays = (run.weight_decay, 0.0)
    return {
        mode: round_updates(weights, directions, rates, steps, decays, *storage)
        for mode, storage in PREDICTED_MODES.items()
    }


def recommend(predicted: dict[str, RoundedUpdates], algorithm: str) -> str:
    """Return a sentence with the `TrainingArguments.optim` to use, and why; or what to do if no optimizer suits."""
    if predicted["stochastic"].noise <= SOME_NOISE:
        return (
            f'Use optim="{algorithm}_bf16_split", which loses no update, or "{algorithm}_bf16_sr",\n'
            "which takes 2 bytes less per parameter: its noise is small here."
        )
    if predicted["split"].lost > LOST:
        return "Raise the learning rate: updates are too small even for FP32 weights."
    return f'Use optim="{algorithm}_bf16_split": it stores the FP32 weights, so no update is lost.'


def suits(predicted: dict[str, RoundedUpdates], rounding: str) -> bool:
    """Return whether a mode neither loses half of the updates nor adds too much noise; Kahan summation does neither."""
    found = predicted.get(rounding)
    return found is None or (found.lost <= LOST and found.noise <= MUCH_NOISE)


def noise_directions(algorithm: str, betas: tuple[float, float]) -> Directions:
    """Return the directions of an algorithm of `PREDICTED_ALGORITHMS` if gradients are noise.

    Noise gradients are independent from step to step, Gaussian, and of constant variance.

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
    size = math.sqrt((1 - betas[0]) / (1 + betas[0]))  # root mean square after many steps
    grows = betas[0] if algorithm in _ADAMS else 0.0
    return Directions(size * _half_normal_sample(), grows, 1 / size**2, feedback=betas[0])


def _lion_persistence(beta1: float, beta2: float) -> float:
    """Return `Directions.persistence` of Lion, if gradients are noise."""
    tail = beta1 * (1 - beta2)
    tail_square = tail**2 / (1 - beta2**2)
    variance = (1 - beta1) ** 2 + tail_square
    lags = torch.arange(1, 1 + math.ceil(40 / (1 - beta2)), dtype=torch.float64)
    correlation = ((1 - beta1) * tail * beta2 ** (lags - 1) + tail_square * beta2**lags) / variance
    return 1 + 2 * float((2 / math.pi * correlation.asin()).sum())


def _half_normal_sample() -> Tensor:
    """Return absolute values of a standard normal variable at equally likely quantiles, with a mean square of 1."""
    quantiles = (torch.arange(_SAMPLE, dtype=torch.float64) + 0.5) / _SAMPLE
    values = math.sqrt(2) * torch.erfinv(quantiles)
    return values / values.square().mean().sqrt()


def magnitudes() -> Tensor:
    """Return the root mean square of the numbers with each exponent field, if they are uniform (FP64, 256 elements)."""
    return spacings_by_exponent(torch.bfloat16) * 2**_MANTISSA_BITS * (7 / 3) ** 0.5


def count_spacings(tensor: Tensor) -> Tensor:
    """Count the elements of a tensor by the spacing of the BF16 numbers around them.

    Numbers are twice as dense below a power of two, such as the 1.0 of a new norm, as above it, so a power of two
    counts half for each spacing. NaNs and infinities are left out.

    Args:
        tensor: any floating-point tensor; it is rounded to BF16 first.

    Returns:
        An FP64 tensor of 256 counts in the order of `spacings_by_exponent`.
    """
    counts = torch.zeros(2 * EXPONENTS, dtype=torch.int64)
    for chunk in tensor.detach().reshape(-1).split(CHUNK):
        bits = chunk.to(torch.bfloat16).view(torch.int16).int() & 0x7FFF
        is_power = (bits & 0x7F) == 0
        counts += torch.bincount((bits >> _MANTISSA_BITS) * 2 + is_power, minlength=2 * EXPONENTS).cpu()
    counts[-2:] = 0  # infinities and NaNs
    others, powers = counts.double().view(EXPONENTS, 2).unbind(1)
    below = powers / 2
    below[:2] = 0  # zero and the smallest normal number have the same spacing on both sides
    return others + powers - below + torch.cat((below[1:], below.new_zeros(1)))


class Directions(NamedTuple):
    """The directions of an optimizer's updates, whose sizes are in units of its learning rate.

    The update of a weight is `u = -lr·(r + wd·w)`, with the *direction* `r` and a decoupled weight decay `wd`.

    Attributes:
        sample: absolute values of directions, equally likely, with either sign (FP64).
        beta1: the decay rate that determines `growth`; 0 if directions have their final size from the first step.
        persistence: the variance of a sum of directions over many steps, per step, relative to that of a single one.
        feedback: the decay rate of the momentum through which rounding errors are fed back; 0 if they are not.
    """

    sample: Tensor
    beta1: float
    persistence: float
    feedback: float = 0.0

    def growth(self, steps: Tensor) -> Tensor:
        """Return the size of directions in each of `steps`, counted from 1, relative to the size after many steps."""
        decayed = self.beta1**steps
        return ((1 + decayed) / (1 - decayed)).sqrt()


class RoundedUpdates(NamedTuple):
    """Sums over weights, for each of some steps (FP64).

    Attributes:
        square: `Σ u²`.
        stored: `Σ u·Δ`.
        variance: the sum of the variances that stochastic rounding adds.
        displacement: the sum of the variances that these updates add to the weights' displacement.
    """

    square: Tensor
    stored: Tensor
    variance: Tensor
    displacement: Tensor

    @property
    def lost(self) -> float:
        """The lost share of all updates."""
        square = float(self.square.sum())
        return 1 - float(self.stored.sum()) / square if square else 0.0

    @property
    def noise(self) -> float:
        """Root mean square of the noise that rounding adds, relative to the displacement's."""
        displacement = float(self.displacement.sum())
        return (float(self.variance.sum()) / displacement) ** 0.5 if displacement else 0.0


@torch.no_grad()
def round_updates(
    counts: Tensor,
    directions: Directions,
    learning_rates: Sequence[float],
    steps: Sequence[int],
    weight_decays: Sequence[float],
    quantum: float,
    stochastic: bool,
) -> RoundedUpdates:
    """Predict the rounding of weights' updates.

    Args:
        counts: the number of weights by spacing (see `count_spacings`), one row for each weight decay.
        directions: the directions of the updates.
        learning_rates: the learning rate in each of `steps`.
        steps: steps counted from 1; evenly spaced up to the last of the run.
        weight_decays: decoupled weight decays inside the update; 0 if the decay is a separate operation.
        quantum: the spacing of what is stored, relative to the weight's.
        stochastic: whether it is rounded stochastically; otherwise, it is rounded to nearest.

    Returns:
        Sums over the weights, for each step.
    """
    rates = torch.tensor(learning_rates, dtype=torch.float64)[:, None]
    paid = (rates[:, 0] / (LEAST_RATE * rates.max())).nan_to_num().clamp(max=1) * (directions.feedback > 0)
    moved = directions.sample * (rates.square().mean() * steps[-1] * directions.persistence).sqrt()
    sample = directions.sample * directions.growth(torch.tensor(steps, dtype=torch.float64))[:, None]
    total = torch.zeros(4, len(steps), dtype=torch.float64)
    spacings, sizes, one = spacings_by_exponent(torch.bfloat16) * quantum, magnitudes(), total.new_ones(())
    for row, exponent in counts.nonzero().tolist():
        decay, spacing = weight_decays[row] * sizes[exponent], spacings[exponent]
        updates = rates / spacing * (torch.cat((sample + decay, decay - sample), dim=1) if decay else sample)
        square, variance = updates.square().mean(1), torch.zeros(len(steps), dtype=torch.float64)
        stored = square
        if stochastic:
            variance = unbiased_variance(updates, one).mean(1)
            owed = unbiased_variance(moved / spacing, one).mean() + variance / (1 - directions.feedback**2)
            variance = torch.minimum(variance, variance * (1 - paid) + owed / steps[-1])
        else:
            stored = (updates * updates.round()).mean(1)
        displacement = (rates / spacing * directions.sample).square().mean(1) * directions.persistence
        total += counts[row, exponent] * spacing**2 * torch.stack((square, stored, variance, displacement))
    return RoundedUpdates(*total)
