"""How far from FP32 fine-tuning ends, in loss and weights, and what rounding loses of updates: a Llama with Trainer.

A byte-level Llama with 0.7 million parameters is pre-trained in FP32 on the standard library, and fine-tuned in each
way on Python's language reference. Within a seed, all ways start from the same weights and see the same data.

    python -m benchmarks.fine_tuning [--seeds 10] [--ways fp32,split] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import copy
import importlib
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import gettempdir
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.evidence.training.text import held_out, standard_library
from benchmarks.record import write_record
from hf_lowprec import LowPrecisionCallback, PrecisionMonitor, cast_model, fp32_state_dict
from hf_lowprec.monitor.step_precision import ALL, StepPrecision, sum_over_steps
from hf_lowprec.optim.param_groups import unwrap_optimizer

LENGTH, BATCH, VALIDATION_BLOCKS = 128, 4, 128
MEASURED = 25
"""Steps at which lost updates are measured."""
STOCK = {"fp32": torch.float32, "autocast": torch.float32, "nearest": torch.bfloat16}
"""Dtypes of the whole model with torch's AdamW."""
OPTIONS = {
    "autocast": {"optim": "adamw_torch", "bf16": True},
    **{f"{mode}{states}": {"optim": f"adamw_bf16_{mode}", "optim_args": "state_dtype=int8" * bool(states)}
       for states in ("", "-8bit") for mode in ("split", "kahan", "sr")},
    "sr-without-feedback": {"optim": "adamw_bf16_sr", "optim_args": "error_feedback=False"},
    "sr-factored-8bit": {"optim": "adamw_bf16_sr", "optim_args": "factored=True,state_dtype=int8"},
    "adafactor-8bit": {"optim": "adafactor_bf16_sr", "optim_args": "beta1=0.9,state_dtype=int8"},
}  # fmt: skip
"""Of TrainingArguments, unless they are torch's AdamW in the model's dtype."""
OTHERS = {"optimi": {"kahan_sum": True}}
"""Packages, and further arguments of their AdamW, for a model that `cast_model` has cast."""
WAYS = ("fp32", "nearest", *(way for way in OPTIONS if way not in STOCK))
PRE_TRAINING = {"learning_rate": 1e-3, "lr_scheduler_type": "cosine"}
FINE_TUNING = {"learning_rate": 2e-5, "lr_scheduler_type": "constant_with_warmup"}
Blocks = list[dict[str, torch.Tensor]]


class LostUpdates(TrainerCallback):
    """Measures the share of weight changes that is lost, at every `every`-th step."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.monitor: PrecisionMonitor | None = None
        self.measured: list[StepPrecision] = []
        self.before: dict[torch.Tensor, torch.Tensor] = {}
        self.square = self.stored = 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        optimizer = unwrap_optimizer(objects["optimizer"])
        if state.global_step % self.every:
            return
        if isinstance(optimizer, torch.optim.AdamW):
            self.before = {param: param.detach().double() for param in objects["model"].parameters()}
        else:
            self.monitor = self.monitor or PrecisionMonitor(optimizer, objects["model"])
            self.monitor.measure_next_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        last = self.monitor and self.monitor.last
        if last and last not in self.measured and "lost_updates" in last.by_kind[ALL]:
            self.measured.append(last)
        optimizer = unwrap_optimizer(objects["optimizer"])
        # Of torch's AdamW, compared with its formula in FP64.
        for group, param in ((g, p) for g in optimizer.param_groups if self.before for p in g["params"]):
            before, moments = self.before[param], optimizer.state[param]
            mean, square = (
                moments[name].double() / (1 - beta ** float(moments["step"]))
                for name, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True)
            )
            update = -group["lr"] * (mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * before)
            self.square += float(update.square().sum())
            self.stored += float((update * (param.detach().double() - before)).sum())
        self.before = {}

    def share(self) -> float:
        """Of all measured steps."""
        if self.square:
            return 1 - self.stored / self.square
        return sum_over_steps(self.measured).by_kind[ALL]["lost_updates"]


def blocks(documents: Sequence[str], count: int) -> Blocks:
    """The first `count` blocks of the documents' bytes."""
    text = torch.frombuffer(bytearray("".join(documents).encode()), dtype=torch.uint8).long()
    cut = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)[:count]
    return [{"input_ids": block, "labels": block} for block in cut]


def language_reference() -> tuple[list[str], list[str]]:
    """Topics to train on and to validate on, without the paragraphs that both have."""
    train, validation = held_out(topics)
    seen = {paragraph for document in validation for paragraph in document.split("\n\n")}
    return ["\n\n".join(p for p in document.split("\n\n") if p not in seen) for document in train], validation


def llama(seed: int) -> LlamaForCausalLM:
    """A byte-level Llama with random weights."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=LENGTH, use_cache=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


class StepTimes(TrainerCallback):
    """Measures the time from the beginning to the end of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.seconds.append(time.perf_counter() - self._begun)


def to_dtype(model: Any, dtype: torch.dtype) -> None:
    """Convert a Llama as `from_pretrained` does: frequencies stay FP32, since in BF16 they are wrong."""
    frequencies = model.model.rotary_emb.inv_freq
    model.to(dtype).model.rotary_emb.inv_freq = frequencies


def train(
    model: Any, way: str, data: Blocks, steps: int, seed: int, batch: int = BATCH, measured: int = MEASURED, **more: Any
) -> tuple[Trainer, dict[str, Any]]:
    """Train in place.

    Args:
        model: a Llama.
        way: one of `STOCK`, `OPTIONS` or `OTHERS`.
        data: to train on.
        steps: how many.
        seed: of the order of the data.
        batch: blocks per step.
        measured: steps at which lost updates are measured.
        more: of `TrainingArguments`.

    Returns:
        The trainer; and the median time of a step in seconds, the share of weight changes that was lost (None for
        `OTHERS`), and the FP32 weights.
    """
    watch, times = LostUpdates(max(1, steps // measured)), StepTimes()
    callbacks: list[TrainerCallback] = [times] if way in OTHERS else [watch, times]
    if way in STOCK:
        to_dtype(model, STOCK[way])
    elif way in OTHERS:
        cast_model(model, keep_low_bits=False)
    else:
        callbacks.insert(0, LowPrecisionCallback(report=False, log_lost_updates=False))
    args = TrainingArguments(
        gettempdir(), max_steps=steps, **OPTIONS.get(way, {"optim": "adamw_torch"}),
        per_device_train_batch_size=batch, per_device_eval_batch_size=batch, warmup_steps=max(1, steps // 20),
        weight_decay=0.01, seed=seed, prediction_loss_only=True, save_strategy="no", logging_strategy="no",
        report_to="none", disable_tqdm=True, dataloader_pin_memory=False, **more,
    )  # fmt: skip
    other: Any = None
    if way in OTHERS:
        options = {"lr": args.learning_rate, "betas": (0.9, 0.999), "eps": 1e-8, **OTHERS[way]}
        other = importlib.import_module(way).AdamW, options
    trainer = Trainer(model, args, train_dataset=data, callbacks=callbacks, optimizer_cls_and_kwargs=other)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    optimizer = unwrap_optimizer(trainer.optimizer)
    exact = model.state_dict() if way in STOCK or way in OTHERS else fp32_state_dict(model, optimizer)
    weights = torch.cat([exact[name].float().flatten() for name, _ in model.named_parameters()])
    lost = watch.share() if watch in callbacks else None
    return trainer, {"step_seconds": statistics.median(times.seconds), "lost": lost, "weights": weights}


def table(runs: dict[str, list[dict[str, float]]]) -> str:
    """A Markdown table: means ± standard deviations over seeds; differences are paired by seed.

    The distance from FP32's weights is relative to how far these have moved, where it was measured.
    """
    lines = [
        "| optimizer | validation loss | difference from FP32 | distance from FP32 | updates lost |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for way, found in runs.items():
        losses = [run["loss"] for run in found]
        apart = [loss - exact["loss"] for loss, exact in zip(losses, runs["fp32"], strict=True)]
        spread = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in (losses, apart)]
        difference = "" if way == "fp32" else f"{statistics.mean(apart):+.5f} ± {spread[1]:.5f}"
        lost = "" if way == "fp32" else f"{abs(100 * statistics.mean(run['lost'] for run in found)):.1f}%"
        measured = way != "fp32" and all("distance" in run for run in found)
        distance = f"{statistics.mean(run['distance'] for run in found):.3f}" if measured else ""
        loss = f"{statistics.mean(losses):.4f} ± {spread[0]:.4f}"
        lines.append(f"| {way} | {loss} | {difference} | {distance} | {lost} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1000, help="of pre-training, and of fine-tuning")
    parser.add_argument("--ways", default=",".join(WAYS), help="fp32 first")
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args(words)
    transformers.logging.set_verbosity_error()
    code, prose = held_out(standard_library()), language_reference()
    count = options.steps * BATCH
    first, second = ((blocks(each[0], count), blocks(each[1], VALIDATION_BLOCKS)) for each in (code, prose))
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways.split(",")}
    for seed in range(options.seeds):
        trained = llama(seed)
        start = train(trained, "fp32", first[0], options.steps, seed, **PRE_TRAINING)[1]["weights"]
        exact = None
        for way, found in runs.items():
            trainer, result = train(copy.deepcopy(trained), way, second[0], options.steps, seed, **FINE_TUNING)
            weights = result.pop("weights")
            found.append({"loss": trainer.evaluate(second[1])["eval_loss"], **result})
            exact = weights if exact is None else exact
            found[-1]["distance"] = float((weights - exact).norm() / (exact - start).norm())
            print(f"seed {seed}, {way}: {found[-1]}", flush=True)
    print(table(runs))
    write_record(options.output, steps=options.steps, runs=runs)


if __name__ == "__main__":
    main()
