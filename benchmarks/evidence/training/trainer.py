"""Trains a Llama with transformers' Trainer in each way, and measures what rounding loses of its updates."""

from __future__ import annotations

import importlib
import statistics
import time
from tempfile import gettempdir
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_lowprec import LowPrecisionCallback, PrecisionMonitor, cast_model, fp32_state_dict
from hf_lowprec.monitor.step_precision import ALL, StepPrecision, sum_over_steps
from hf_lowprec.optim.param_groups import unwrap_optimizer

STOCK = {"fp32": torch.float32, "autocast": torch.float32, "nearest": torch.bfloat16}
"""Dtypes of the whole model with torch's AdamW."""
OPTIONS = {
    "autocast": {"optim": "adamw_torch", "bf16": True},
    **{f"{mode}{states}": {"optim": f"adamw_bf16_{mode}", "optim_args": "state_dtype=int8" * bool(states)}
       for states in ("", "-8bit") for mode in ("split", "kahan", "sr")},
    "sr-without-feedback": {"optim": "adamw_bf16_sr", "optim_args": "error_feedback=False"},
    "sr-factored-8bit": {"optim": "adamw_bf16_sr", "optim_args": "factored=True,state_dtype=int8"},
}  # fmt: skip
"""Of TrainingArguments, unless they are torch's AdamW in the model's dtype."""
OTHERS = {"optimi": {"kahan_sum": True}}
"""Packages, and further arguments of their AdamW, for a model that `cast_model` has cast."""
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
    model: Any, way: str, data: Blocks, steps: int, seed: int, batch: int, measured: int, **more: Any
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
