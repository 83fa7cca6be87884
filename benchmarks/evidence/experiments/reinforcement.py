"""Reinforcement learning at learning rates from 1e-6 on: who learns?

A small Llama learns in FP32 to add two digits from labels of which half are random, so that it is right half of the
time. TRL's stock GRPOTrainer then rewards right answers, at a constant rate. The reward that the policy can expect is
computed exactly, from the probabilities of all right answers. An update moves a weight by at most about the rate, which
suffices in a model of this width: all weights move together.

Reported so far: BF16 weights learn less (verl issue 5308, at 1e-6; NeMo-RL issue 2322; in supervised training at 6e-7,
torchtune issue 2254). FP32 weights become unstable where BF16 weights lose updates and do not (AReaL pull request 1634,
at 1.7e-5; NeMo-RL pull request 19).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from tempfile import gettempdir
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PrinterCallback, TrainerCallback

from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.page import Row, Section, markdown_table
from benchmarks.evidence.statistics import Paired, exceeds, paired, verdict
from benchmarks.evidence.training.modes import MODES
from benchmarks.evidence.training.sums import ANSWER, answer_losses, llama, reward, sums, tokenizer, tokens, train
from hf_lowprec import LowPrecisionCallback

START, STALE = "start", "stale"
FIRST_SEED = 100
"""The trials that fixed settings and limits had lower ones."""
ARGUMENTS: dict[str, dict[str, Any]] = {
    "fp32": {"bf16": False},
    "autocast": {"bf16": True},
    "nearest": {"bf16": False},
    "feedback": {"optim": "adamw_bf16_sr"},
    "sr": {"optim": "adamw_bf16_sr", "optim_args": "error_feedback=False"},
    **{mode: {"optim": f"adamw_bf16_{mode}"} for mode in ("kahan", "split")},
}
"""Of GRPOConfig, as a user sets them; its default optimizer is torch's AdamW."""


@dataclass(frozen=True)
class Settings:
    """Settings of the training runs.

    Attributes:
        seeds: how many, each with weights, prompts and samples of its own.
        rates: constant rates, ascending.
        probe: a rate at which training becomes unstable if it repeats `stale` steps' completions.
        stale: steps that train on completions of the same policy, in the runs at `probe`.
        steps: of GRPO at each rate.
        records: steps after which the policy is looked at.
        first_steps: of supervised training, with 128 sums each, at a rate that falls from 1e-3 to zero.
        completions: per step.
        group: completions of the same prompt.
        width: elements of a hidden state.
        layers: of the model.
    """

    seeds: int = 5
    rates: tuple[float, ...] = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4)
    probe: float = 3e-4
    stale: int = 16
    steps: int = 250
    records: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 150, 200, 250)
    first_steps: int = 200
    completions: int = 64
    group: int = 8
    width: int = 512
    layers: int = 2


HOUR = Settings(seeds=3, rates=(1e-6, 1e-5), steps=100, records=(1, 2, 5, 10, 20, 50, 100))
FULL = Settings(
    seeds=10, steps=1000, records=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000), first_steps=500, width=1024, layers=4
)


def cases(settings: Settings) -> list[str]:
    """The first weights, then every mode at every rate."""
    rates = [*(f"{rate:g}" for rate in settings.rates), f"{settings.probe:g} {STALE}"]
    return [START, *(f"{mode} {rate}" for rate in rates for mode in ARGUMENTS)]


def needs(case: str) -> list[str]:
    """GRPO begins with weights that were trained."""
    return [] if case == START else [START]


def stored(model: nn.Module) -> list[Tensor]:
    """Copies of the weights, rounded to BF16 as an inference engine gets them."""
    return [param.detach().to(torch.bfloat16, copy=True) for param in model.parameters()]


class Watch(TrainerCallback):
    """Looks at the policy before the first step and after each recorded one.

    Args:
        mode: of the run.
        records: the steps.
    """

    def __init__(self, mode: str, records: tuple[int, ...]) -> None:
        self.mode, self.records, self.right = mode, records, tokens()
        self.points: list[dict[str, float]] = []

    @torch.no_grad()
    def log_probabilities(self, model: nn.Module) -> Tensor:
        """Of the right answers."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.mode == "autocast"):
            return -answer_losses(model, self.right)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        self.points.append({"step": 0, "reward": float(self.log_probabilities(model).exp().mean())})

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        if state.global_step + 1 in self.records:
            self.before = stored(model)

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        if state.global_step not in self.records:
            return
        found, after = self.log_probabilities(model), stored(model)
        point = {"step": state.global_step, "reward": float(found.exp().mean())}
        changed = sum(int((a != b).sum()) for a, b in zip(after, self.before, strict=True))
        point["changed"] = changed / sum(weight.numel() for weight in after)
        if state.global_step == self.records[-1]:
            engine = type(model)(model.config).to(torch.bfloat16)
            engine.load_state_dict(model.state_dict())
            point["disagreement"] = float((-answer_losses(engine, self.right) - found).abs().mean())
        self.points.append(point)


def trainer(case: str, settings: Settings, model: LlamaForCausalLM, seed: int) -> tuple[Any, Watch]:
    """TRL's GRPOTrainer as a user builds it; it casts `model` for the optimizers of this package."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    mode, rate, *stale = case.split()
    args = GRPOConfig(
        gettempdir(), learning_rate=float(rate), lr_scheduler_type="constant", max_steps=settings.steps, seed=seed,
        per_device_train_batch_size=settings.completions, num_generations=settings.group, max_completion_length=ANSWER,
        steps_per_generation=settings.stale if stale else 1, gradient_checkpointing=False, use_cpu=True,
        logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True, log_level="error",
        **ARGUMENTS[mode],
    )  # fmt: skip
    watch = Watch(mode, settings.records)
    rows = Dataset.from_list(sums() * settings.completions)  # more than one generation takes
    built = GRPOTrainer(
        model.to(torch.bfloat16) if mode == "nearest" else model,
        reward_funcs=reward,
        args=args,
        train_dataset=rows,
        processing_class=tokenizer(),
        callbacks=[watch, *([LowPrecisionCallback(report=False)] if "optim" in ARGUMENTS[mode] else [])],
    )
    built.remove_callback(PrinterCallback)
    return built, watch


def run(case: str, settings: Settings, work: Workspace) -> dict[str, Any]:
    """Supervised training, or GRPO with all seeds one after another; returns what was seen at each recorded step."""
    if case == START:
        trained = []
        for seed in range(settings.seeds):
            torch.manual_seed(FIRST_SEED + seed)
            trained.append(llama(settings.width, settings.layers))
            train(trained[-1], settings.first_steps)
        work.save(START, [model.state_dict() for model in trained])
        return {"parameters": trained[0].num_parameters()}
    points = []
    for seed, weights in enumerate(work.load(START)):
        model = llama(settings.width, settings.layers)
        model.load_state_dict(weights)
        trains, watch = trainer(case, settings, model, FIRST_SEED + seed)
        trains.train()
        points.append(watch.points)
    ends = [each[-1]["reward"] for each in points]
    work.progress(f"{case}: reward {np.mean(ends):.4f} ± {np.std(ends):.4f}")
    return {"points": points}


LIMIT = 0.1
"""Of the reward that FP32 gains: differences below are called equal."""
HARDLY = 0.5
"""A mode hardly learns if it makes less than this share of FP32's gain."""
SAME_WEIGHTS = 0.98
"""Of unchanged weights, for the published "approximately 99%" to hold."""


def section(record: dict[str, Any]) -> Section:
    """Who earns FP32's reward, and what is published."""
    results, settings, steps = record["cases"], record["settings"], record["settings"]["steps"]
    probe = f"{settings['probe']:g} {STALE}"
    modes = [mode for mode in ARGUMENTS if any(case.startswith(f"{mode} ") for case in results)]
    named = [*(f"{rate:g}" for rate in settings["rates"]), probe]
    done = [rate for rate in named if all(f"{mode} {rate}" in results for mode in modes)]
    if not done:
        return Section("Reinforcement learning", "No rate has the results of all modes yet.", [], [])
    small = done[0]

    def seen(mode: str, rate: str, name: str = "reward", at: int = -1) -> np.ndarray:
        """Of each seed. Where rewards fluctuate, that at the end is the mean over the second half of the run."""
        points = results[f"{mode} {rate}"]["points"]
        if (rate, name, at) == (probe, "reward", -1):
            return np.array([np.mean([p[name] for p in of_seed if 2 * p["step"] >= steps]) for of_seed in points])
        return np.array([of_seed[at][name] for of_seed in points])

    def compared(mode: str, rate: str) -> tuple[Paired, str]:
        """With FP32, and the verdict."""
        values, reference = seen(mode, rate), seen("fp32", rate)
        gain, difference = paired(reference, seen("fp32", rate, at=0)), paired(values, reference)
        # "worse" is less reward; without a gain there is no limit, and only the sign is asked for.
        limit = LIMIT * abs(gain.mean) if abs(gain.mean) > gain.half else 0.0
        word = verdict(paired(-values, -reference), limit)
        swapped = {"above": "below", "below": "above", "worse": "below", "better": "above"}
        word = swapped.get(word, word) if limit == 0 or word in ("above", "below") else word
        if word.startswith("equal,"):
            word = "equal, below zero" if difference.mean < 0 else "equal, above zero"
        return difference, word

    def reward_row(claim: str, mode: str, rate: str, holds: str = "", *source: str) -> Row:
        """The verdict on the difference from FP32; or whether a claim holds that expects the verdict `holds`."""
        found, word = compared(mode, rate)
        if holds:
            word = {holds: "yes", "undecided": "undecided", "above": "undecided", "below": "undecided"}.get(word, "no")
        return Row(claim, str(found), word, *source)

    def share_row(claim: str, values: np.ndarray, at_least: float, *source: str) -> Row:
        """Check that the mean share over seeds is above `at_least`."""
        found, word = paired(values, np.zeros(len(values))), exceeds([paired(values, np.full_like(values, at_least))])
        return Row(claim, f"{found.mean:.1%} ± {found.half:.1%}", word, *source)

    rows = list[Row]()
    for mode in [mode for mode in modes if mode != "fp32"]:
        claim = f"{MODES[mode].label}: as much reward as FP32, at a rate of {small}"
        rows.append(reward_row(claim, mode, small))
    if small == f"{1e-6:g}":
        own, exact = (seen(mode, small) - seen(mode, small, at=0) for mode in ("nearest", "fp32"))
        claim = "rounding to nearest misses more than half of the reward that FP32 gains at 1e-6"
        says = "BF16 far below LoRA at 1e-6; no FP32 run"
        rows.append(share_row(claim, 1 - own / exact, 1 - HARDLY, "verl issue 5308", says))
        claim = "most weights stay the same in a step at 1e-6, once FP32 weights are rounded to BF16"
        same = 1 - seen("fp32", small, "changed")
        rows.append(share_row(claim, same, SAME_WEIGHTS, "PULSE, arXiv 2602.03839", "about 99%"))
    if probe in done:
        claim = f"where FP32 becomes unstable, rounding to nearest keeps more reward ({probe})"
        source = "AReaL pull request 1634", "0.818 against 0.733, at 1.7e-5"
        rows.append(reward_row(claim, "nearest", probe, "better", *source))

    def table(cell: Callable[[str, str], str]) -> str:
        return markdown_table(["mode", *done], [[MODES[m].label, *(cell(m, rate) for rate in done)] for m in modes])

    def reward_cell(mode: str, rate: str) -> str:
        found, word = compared(mode, rate)
        return f"{seen(mode, rate).mean():.3f}" if mode == "fp32" else f"{found.mean:+.3f} ± {found.half:.3f} {word}"

    before = seen("fp32", small, at=0).mean()
    text = (
        f"A Llama with {results[START]['parameters']:,} parameters learns sums of two digits: first in FP32 on labels, "
        f"half of which are random, then in {steps} steps of TRL's GRPOTrainer with {settings['completions']} "
        f"completions each, at a constant learning rate. There are {settings['seeds']} seeds, starting at "
        f"{FIRST_SEED}. The reward is the probability of the right answer, averaged over all 100 sums; before GRPO, it "
        f"is {before:.3f}. The limit is {LIMIT:.0%} of FP32's gain. In the column “{STALE}”, {settings['stale']} steps "
        "each train on completions of the same policy, at a learning rate that is too large on purpose. Rewards "
        "fluctuate there, so they are averaged over the second half of the steps."
    )
    tables = [
        "Weights whose BF16 value the last step changes:\n\n"
        + table(lambda mode, rate: f"{seen(mode, rate, 'changed').mean():.2%}"),
        "Mean difference between the log-probabilities of right answers of the trained model and of a copy in BF16, "
        "norms included, in 10⁻³ nats:\n\n"
        + table(lambda mode, rate: f"{1000 * seen(mode, rate, 'disagreement').mean():.1f}"),
    ]
    gains = {mode: float((seen(mode, small) - seen(mode, small, at=0)).mean()) for mode in modes}
    shares = "; ".join(
        f"{MODES[mode].label} {gains[mode] / gains['fp32']:.1%}"
        for mode in ("nearest", "feedback", "split")
        if mode in modes
    )
    return Section(
        "Reinforcement learning",
        text,
        rows,
        tables,
        question=f"Does GRPO learn at a learning rate of {small}?",
        answer=f"The modes gain this share of the reward that FP32 gains: {shares}.",
        model=f"{results[START]['parameters'] / 1e6:.1f} million",
        table=f"FP32's reward after {steps} steps by learning rate, and differences from it:\n\n{table(reward_cell)}",
    )


_SIZES = {"hour": HOUR, "night": Settings(), "full": FULL}
EXPERIMENT = Experiment("reinforcement", _SIZES, cases, run, section, reference=lambda case: "fp32 *", needs=needs)
