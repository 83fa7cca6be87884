"""Train the same model in FP32, in naive BF16 and in hf_lowprec's BF16, and compare: a table and a plot of each stage.

    python examples/demo.py [--quick]          # or make demo

Nothing is downloaded. A byte-level Llama with 0.7 million parameters is pre-trained on the source of Python's standard
library; its FP32 result is then fine-tuned on the language reference that `help()` shows. In each stage all runs start
from the same weights, see the same data in the same order, and use the stock Trainer.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_lowprec import LowPrecisionCallback, PrecisionMonitor
from hf_lowprec.monitor.step_precision import ALL, StepPrecision, sum_over_steps

LENGTH, BATCH, VALIDATION_BLOCKS = 128, 4, 128
STEPS, QUICK_STEPS = 1000, 150
EVALUATIONS = 10
"""Evaluations in a run, in addition to the one before the first step."""
SAMPLED_STEPS = 25
"""Steps at which lost updates are measured."""
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data", "encodings"}
"""Folders that are not the library's own source, are not in every installation, or hold only tables."""

Blocks = list[dict[str, Tensor]]


class Way(NamedTuple):
    """A kind of training: its name in tables and plots, `optim`, what that means, and how its curve is drawn."""

    label: str
    optim: str
    description: str
    style: dict[str, Any]


# Okabe and Ito's palette. Widths, dashes and markers differ too, so that overlapping curves can be told apart.
WAYS = {
    "fp32": Way(
        *("FP32 AdamW", "adamw_torch", 'everything in FP32, optim="adamw_torch"'),
        {"color": "#000000", "linewidth": 5, "alpha": 0.3},
    ),
    "nearest": Way(
        *("BF16 nearest", "adamw_torch", 'model.to(torch.bfloat16), norms included; optim="adamw_torch"'),
        {"color": "#D55E00", "linewidth": 1.8, "marker": "s", "markersize": 4},
    ),
    "split": Way(
        *("BF16 split", "adamw_bf16_split", 'optim="adamw_bf16_split": norms in FP32, BF16 weights in two parts'),
        {"color": "#0072B2", "linewidth": 1.8, "marker": "o", "markersize": 4},
    ),
    "sr": Way(
        *("BF16 stochastic", "adamw_bf16_sr", 'optim="adamw_bf16_sr": norms in FP32, stochastic rounding'),
        {"color": "#009E73", "linewidth": 1.8, "linestyle": "--", "marker": "^", "markersize": 5},
    ),
}


def standard_library() -> dict[str, str]:
    """The modules of the standard library without its tests, by path; files that are not UTF-8 are left out."""
    root, found = Path(sysconfig.get_path("stdlib")), {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if SKIPPED.isdisjoint(name.parts):
            try:
                found[name.as_posix()] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    return found


def held_out(documents: dict[str, str]) -> tuple[list[str], list[str]]:
    """Documents to train on, and each tenth for validation, in an order that depends on names and mixes packages.

    Topics of the reference repeat one another's paragraphs: those of validation are left out of training.
    """
    names = sorted(filter(documents.get, documents), key=lambda name: hashlib.sha256(name.encode()).digest())
    validation = [documents[name] for name in names[::10]]
    train = [documents[name] for k, name in enumerate(names) if k % 10]
    if documents is topics:
        seen = {paragraph for document in validation for paragraph in document.split("\n\n")}
        train = ["\n\n".join(p for p in document.split("\n\n") if p not in seen) for document in train]
    return train, validation


def blocks(documents: list[str], count: int) -> Blocks:
    """The first `count` blocks of the documents' bytes."""
    text = torch.frombuffer(bytearray("".join(documents).encode()), dtype=torch.uint8).long()
    cut = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)[:count]
    return [{"input_ids": block, "labels": block} for block in cut]


def llama(seed: int) -> LlamaForCausalLM:
    """A byte-level Llama with random weights."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=LENGTH, use_cache=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


class Recorder(TrainerCallback):
    """Asks for evaluations, and measures lost updates, bytes and time.

    Attributes:
        losses: validation loss by step; step 0 is before training.
        sizes: bytes per parameter of weights, gradients and state, while all of them exist.
        seconds: time in forward, backward and optimizer steps, without evaluation.
    """

    def __init__(self, steps: int) -> None:
        self.losses: dict[int, float] = {}
        self.sizes: list[float] = []
        self.seconds = 0.0
        self._evaluate_at = {round(steps * k / EVALUATIONS) for k in range(1, EVALUATIONS + 1)}
        self._sample_every = max(1, steps // SAMPLED_STEPS)
        self._monitor: PrecisionMonitor | None = None
        self._measured: list[StepPrecision] = []
        self._due = self._stored = 0.0
        self._before: dict[Tensor, Tensor] = {}

    @property
    def lost(self) -> float:
        """The share of the weight changes of all sampled steps that was lost in rounding."""
        return (
            1 - self._stored / self._due if self._due else sum_over_steps(self._measured).by_kind[ALL]["lost_updates"]
        )

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
        if state.global_step % self._sample_every:
            return
        if args.optim == "adamw_torch":
            self._before = {param: param.detach().double() for param in model.parameters()}
        else:
            self._monitor = self._monitor or PrecisionMonitor(optimizer, model)
            self._monitor.measure_next_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
        if self._before:
            self._add_adamw(optimizer.optimizer)
        elif self._monitor and self._monitor.last and not state.global_step % self._sample_every:
            self._measured += [self._monitor.last] if "lost_updates" in self._monitor.last.by_kind[ALL] else []
        if not self.sizes:
            params = list(model.parameters())
            states = (value for each in optimizer.state.values() for value in each.values())
            held = params, (param.grad for param in params), filter(torch.is_tensor, states)
            count = sum(param.numel() for param in params)
            self.sizes = [sum(tensor.nbytes for tensor in tensors) / count for tensors in held]

    def _add_adamw(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare what the last step of torch's AdamW has changed with what its formula gives in FP64."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                before, state = self._before[param], optimizer.state[param]
                mean, variance = (
                    state[name].double() / (1 - beta ** float(state["step"]))
                    for name, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True)
                )
                update = -group["lr"] * (mean / (variance.sqrt() + group["eps"]) + group["weight_decay"] * before)
                self._due += float(update.square().sum())
                self._stored += float((update * (param.detach().double() - before)).sum())
        self._before = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds += time.perf_counter() - self._started
        control.should_evaluate = state.global_step in self._evaluate_at

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        self.losses[state.global_step] = metrics["eval_loss"]


def train(model: LlamaForCausalLM, name: str, data: tuple[Blocks, Blocks], steps: int, **settings: Any) -> Recorder:
    """Train `model` in place, in the way `name`, on the first part of `data`; the second is for validation."""
    recorder, way = Recorder(steps), WAYS[name]
    callbacks: list[TrainerCallback] = [recorder]
    if name == "nearest":
        frequencies = model.model.rotary_emb.inv_freq
        model.to(torch.bfloat16).model.rotary_emb.inv_freq = frequencies  # in BF16, they are wrong with any optimizer
    elif name != "fp32":
        # The name needs no callback; this one keeps the precision report from being printed for every run.
        callbacks.insert(0, LowPrecisionCallback(report=False, log_lost_updates=False))
    args = TrainingArguments(
        optim=way.optim, max_steps=steps, warmup_steps=max(1, steps // 20), weight_decay=0.01, eval_on_start=True,
        per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH, seed=0, prediction_loss_only=True,
        save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(), **settings,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data[0], eval_dataset=data[1], callbacks=callbacks)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return recorder


def stages(steps: int, folder: Path) -> Iterator[tuple[str, str, dict[str, Recorder]]]:
    """Name, title and runs of each stage."""
    model, number = llama(seed=0), 0
    for name, title, documents, settings in (
        (
            "pretraining",
            "Pre-training from random weights on the standard library",
            standard_library(),
            {"learning_rate": 1e-3, "lr_scheduler_type": "cosine"},
        ),
        (
            "fine-tuning",
            "Fine-tuning of the FP32 result on the language reference",
            topics,
            {"learning_rate": 2e-5, "lr_scheduler_type": "constant_with_warmup"},
        ),
    ):
        texts, runs, exact = held_out(documents), {}, model
        data = blocks(texts[0], steps * BATCH), blocks(texts[1], VALIDATION_BLOCKS)
        for key, way in WAYS.items():
            number += 1
            running = f"run {number} of {2 * len(WAYS)}: {name}, {way.label}"
            print(running, flush=True)
            trained = copy.deepcopy(model)
            runs[key] = train(trained, key, data, steps, output_dir=str(folder), **settings)
            exact = trained if key == "fp32" else exact
            first, *_, last = runs[key].losses.values()
            print(f"{running:<44} validation loss {first:.4f} → {last:.4f}", flush=True)
        model = exact
        yield name, title, runs


def table(title: str, runs: dict[str, Recorder]) -> Table:
    """A row for each way."""
    lines = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    lines.add_column("way", no_wrap=True)
    losses = "validation\nloss", "compared\nwith FP32"
    for heading in (*losses, "weights\nB/param", "grads\nB/param", "state\nB/param", "updates\nlost", "seconds"):
        lines.add_column(heading, justify="right", no_wrap=True)
    exact = [*runs["fp32"].losses.values()][-1]
    for name, run in runs.items():
        final = [*run.losses.values()][-1]
        lines.add_row(
            *(WAYS[name].label, f"{final:.4f}", "" if name == "fp32" else f"{final - exact:+.4f}"),
            *(f"{size:.2f}" for size in run.sizes),
            *(f"{round(100 * run.lost, 1) + 0.0:.1f}%", f"{run.seconds:.1f}"),
        )
    return lines


def plot(title: str, runs: dict[str, Recorder], path: Path) -> None:
    """Draw validation loss against steps as a PNG that can be read on a phone."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 11}):
        figure = Figure(figsize=(5.5, 4), layout="constrained")
        axes = figure.add_subplot()
        for name, run in runs.items():
            axes.plot([*run.losses], [*run.losses.values()], label=WAYS[name].label, **WAYS[name].style)
        if path.stem == "pretraining":
            # The loss falls so far in the first tenth of the steps that nothing else would be visible.
            later = [loss for run in runs.values() for step, loss in run.losses.items() if step]
            margin = 0.05 * (max(later) - min(later))
            axes.set_ylim(min(later) - margin, max(later) + margin)
        axes.set_title(title, fontsize=10, wrap=True)
        axes.set_xlabel("optimizer steps")
        axes.set_ylabel("validation loss (nats per byte)")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=180)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps per run")
    parser.add_argument("--steps", type=int, help=f"optimizer steps per run; by default {STEPS}")
    parser.add_argument("--output-dir", type=Path, default=Path("hf_lowprec-demo"), help="folder for the plots")
    options = parser.parse_args(words)
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    takes = {STEPS: ", about 5 minutes on two idle CPU cores", QUICK_STEPS: ", about 2 minutes on two idle CPU cores"}
    print(f"{2 * len(WAYS)} runs of {steps} steps{takes.get(steps, '')}", flush=True)
    transformers.logging.set_verbosity_error()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    done = list(stages(steps, options.output_dir))
    console = Console()
    for name, title, runs in done:
        plot(title, runs, options.output_dir / f"{name}.png")
        console.print(table(f"{title}\n{steps} steps of {BATCH * LENGTH} tokens", runs))
    for way in WAYS.values():
        print(f"{way.label}: {way.description}.")
    print(
        "Loss: nats per byte, each model evaluated in its own dtypes. Bytes: counted on the tensors after a step.\n"
        "Updates lost: share of AdamW's FP32 weight changes that was lost in rounding (stochastic rounding scatters\n"
        "around 0). Seconds: time in training steps; CPU times say nothing about a GPU.\n"
    )
    print("Plots:", *(options.output_dir / f"{name}.png" for name, *_ in reversed(done)))


if __name__ == "__main__":
    main()
