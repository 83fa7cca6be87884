"""Finds what is wrong with a planned run, and recommends an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hf_lowprec.integrations.transformers.optim_args import option_strings
from hf_lowprec.monitor.findings_catalogue import Finding
from hf_lowprec.tools.doctor.prediction import ModePrediction, Prediction
from hf_lowprec.tools.doctor.update_sizes import ALL

TOLERATED_STEPS = 0.1
"""Updates may vanish in this share of the steps: at the ends of a schedule, learning rates are small anyway."""
MUCH_NOISE = 10.0
"""A problem. With up to 7 times as much noise as updates move weights, fine-tuning makes 93% and more of FP32's
progress, with 12 times 91%, with 21 times 87%, with 37 times 41%; with 4 times, reinforcement learning earns what FP32
does (`docs/performance/evidence.md`, learning rates and reinforcement learning)."""
SOME_NOISE = 0.5
"""Up to here stochastic rounding is recommended: weights then move 12% further than their updates move them (√1.25)."""
TOLERATED_LOSS = 0.5
"""The share of the updates that split weights may lose, as FP32 weights do."""
END_OF_RUN = 0.95
"""Split weights are not worth their memory for the steps after this share of the run."""
HALF_A_SPACING = 2.0**-9
"""Half the distance between BF16 numbers, relative to the largest that has this distance."""


class Advice(NamedTuple):
    """A recommended optimizer.

    Attributes:
        optim: `TrainingArguments.optim`; None if no optimizer suits.
        optim_args: `TrainingArguments.optim_args`.
        reason: why, as a sentence.
    """

    optim: str | None
    optim_args: str | None
    reason: str

    def __str__(self) -> str:
        if self.optim is None:
            return self.reason
        settings = f'optim="{self.optim}"' + (f', optim_args="{self.optim_args}"' if self.optim_args else "")
        return f"Use {settings}. {self.reason}"


def find_problems(prediction: Prediction) -> list[Finding]:
    """What is wrong with the requested optimizer, without remedies: that is what `recommend` returns."""
    run, parts = prediction.run, _parts(prediction.requested)
    evidence: dict[str, str] = {}
    kinds_by_steps: dict[str, list[str]] = {}
    for kind, part in parts.items():
        if part.vanishing_share > TOLERATED_STEPS:
            kinds_by_steps.setdefault(_describe(part.vanishing, run.steps), []).append(kind)
    if kinds_by_steps:
        where = "; ".join(f"{', '.join(kinds)} {steps}" for steps, kinds in kinds_by_steps.items())
        evidence["updates_lost"] = f"half of them or more, of {where}"
    noisy = {kind: part.noise for kind, part in parts.items() if part.noise > MUCH_NOISE}
    if noisy:
        evidence["too_much_noise"] = ", ".join(f"{kind} {noise:.1f} times as much" for kind, noise in noisy.items())
    decays = [rate * run.weight_decay for rate in run.learning_rates]
    lost_decays = sum(decay < HALF_A_SPACING for decay in decays) / run.steps
    if run.decay_is_separate and run.weight_decay and lost_decays > TOLERATED_STEPS:
        evidence["weight_decay_lost"] = (
            f"in {lost_decays:.0%} of the steps. optim={run.optim!r} multiplies BF16 weights by 1 - lr·wd, which "
            f"changes none if lr·wd is less than 2^-9 (it is at most {max(decays):.2g})"
        )
    if run.rounds_second_moment_to_nearest and 1 - run.betas[1] < HALF_A_SPACING:
        evidence["second_moment_frozen"] = (
            "BF16 numbers rounded to nearest stay the same if they lose a share of "
            f"1 - beta2 = {1 - run.betas[1]:.3g}, less than 2^-9"
        )
    return [Finding.of(code, text, remedy="") for code, text in evidence.items()]


def recommend(prediction: Prediction, optim_args: str | None = None) -> Advice:
    """Recommend an optimizer.

    Args:
        prediction: for a run.
        optim_args: those that the user has given; the recommendation keeps all but the rounding, and none of another
            library's optimizer.
    """
    run = prediction.run
    kept = [
        f"{key}={value}"
        for key, value in (option_strings(optim_args or "") if run.is_ours else {}).items()
        if key not in _ROUNDING_OPTIONS
    ]
    stochastic, split = (prediction.by_mode[mode] for mode in ("stochastic", "split"))
    noise = max((part.noise for part in stochastic.values()), default=0.0)
    if noise <= SOME_NOISE:
        switch = min((part.blurs_from or run.steps + 1 for part in _parts(stochastic).values()), default=run.steps + 1)
        share = int(100 * (switch - 1) / run.steps) / 100
        reason = (
            "It needs no remainder or compensation, and the noise of stochastic rounding is "
            f"{noise:.2g} times what the updates move"
        )
        if 0 < share < END_OF_RUN:
            schedule = f"rounding=stochastic:{share:g}|split"
            reason += f"; from step {switch} on it would exceed what is still to come, so split weights take over."
            return Advice(f"{run.algorithm}_bf16_sr", ",".join([schedule, *kept]), reason)
        return Advice(f"{run.algorithm}_bf16_sr", ",".join(kept) or None, f"{reason}.")
    if max((part.lost_in_run for part in split.values()), default=0.0) > TOLERATED_LOSS:
        return Advice(None, None, "Updates are too small even for FP32 weights; raise the learning rate.")
    reason = (
        "It stores the FP32 weights, so no update is lost. Stochastic rounding would add noise of "
        f"{noise:.2g} times what the updates move."
    )
    return Advice(f"{run.algorithm}_bf16_split", ",".join(kept) or None, reason)


_ROUNDING_OPTIONS = ("rounding", "state_rounding")


def _describe(stretches: list[tuple[int, int]], steps: int) -> str:
    """Stretches of steps in words, such as "from step 80 on", for a run of `steps`."""
    if stretches == [(1, steps)]:
        return "in all steps"
    words = []
    for first, last in stretches:
        if last == steps:
            words.append(f"from step {first} on")
        elif first == 1:
            words.append(f"up to step {last}")
        else:
            words.append(f"in steps {first} to {last}")
    return " and ".join(words)


def _parts(predictions: Mapping[str, ModePrediction]) -> dict[str, ModePrediction]:
    return {kind: prediction for kind, prediction in predictions.items() if kind != ALL}
