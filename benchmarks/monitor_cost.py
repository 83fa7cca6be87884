"""Measure the cost of `PrecisionMonitor` as a share of a training step.

A Llama with many tensors and one with few are trained on the CPU in BF16, with AdamW of this package and with torch's.
Every other step is measured as `LowPrecisionCallback` does at a log: the measurement, the numbers by kind, the worst
tensors, and the findings. A measurement takes some milliseconds for any model, so the share is largest for the smallest
model. Measured and plain steps alternate. Reported are the medians of both, and the median difference between
neighbours as a share of a plain step, with the interval of 95% of its order statistics. Logged every n-th step, a run
pays an n-th of that share.

Under Trainer, every other step is logged. Steps are timed from the beginning of one to the beginning of the next, so
that Trainer's log and the metrics file count as well. A row without `log_lost_updates` shows what the log costs alone.

    python benchmarks/monitor_cost.py [--steps 120] [--output FILE]
"""

from __future__ import annotations

import argparse
import io
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hf_lowprec
from hf_lowprec.monitor.step_precision import LOST_SHARES

MODELS = {
    "many tensors": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 33},
    "few tensors": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2},
    "few small tensors": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2},
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "hf_lowprec.AdamW": hf_lowprec.AdamW,
    "torch.optim.AdamW": torch.optim.AdamW,
}
INTERVALS = (1, 50, 500)
BATCH, LENGTH, VOCABULARY, WARM_UP = 8, 128, 512, 4


def measure(model_name: str, optimizer_name: str, steps: int) -> dict[str, Any]:
    """Train one model with one optimizer, and compare measured steps with plain ones."""
    model = build_model(model_name)
    if optimizer_name.startswith("hf_lowprec"):
        hf_lowprec.cast_model(model)
    else:
        model.bfloat16()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters(), lr=1e-4, weight_decay=0.1)
    monitor = hf_lowprec.PrecisionMonitor(optimizer, model)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    times: dict[bool, list[float]] = {True: [], False: []}
    for k in range(WARM_UP + steps):
        measured = k % 2 == 1
        began = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        if measured:
            monitor.measure_next_step()
        optimizer.step()
        if measured and monitor.last is not None:
            assert monitor.last.by_kind
            for name in (*LOST_SHARES, "never_moved"):
                monitor.last.worst(name, 3)
            monitor.findings()
        optimizer.zero_grad()
        if k >= WARM_UP:
            times[measured].append(time.perf_counter() - began)
    return summary(model_name, optimizer_name, model, times[False], times[True])


def build_model(name: str) -> LlamaForCausalLM:
    """One of `MODELS`, with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, **MODELS[name]))


def summary(
    model_name: str, optimizer_name: str, model: torch.nn.Module, plain_times: list[float], measured_times: list[float]
) -> dict[str, Any]:
    """The medians of the times without and with measurement, in seconds, and of their differences as a share."""
    plain, with_monitor = statistics.median(plain_times), statistics.median(measured_times)
    shares = sorted((b - a) / plain for a, b in zip(plain_times, measured_times, strict=True))
    share, outside = statistics.median(shares), fewest_below_median(len(shares))
    return {
        "model": model_name,
        "optimizer": optimizer_name,
        "tensors": len(list(model.parameters())),
        "parameters": sum(param.numel() for param in model.parameters()),
        "plain step, ms": plain * 1e3,
        "measured step, ms": with_monitor * 1e3,
        "share of a step by interval": {interval: share / interval for interval in INTERVALS},
        "95% of the share at 1": [shares[outside], shares[-1 - outside]],
    }


def fewest_below_median(count: int) -> int:
    """The largest k such that the median lies between the k-th smallest and the k-th largest, from 0, in 95% of all
    samples of this size; or 0."""
    below, total = 0.0, 0
    for k in range(count // 2):
        below += math.comb(count, k) / 2**count
        if 2 * below > 0.05:
            break
        total = k
    return total


class StepTimes(TrainerCallback):
    """Records the time from the beginning of each step to the beginning of the next."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Take the time."""
        self.began.append(time.perf_counter())

    def times(self) -> list[float]:
        """Seconds of each step after the first ones."""
        return [end - begin for begin, end in zip(self.began, self.began[1:], strict=False)][WARM_UP:]


def measure_under_trainer(model_name: str, steps: int, log_lost_updates: bool) -> dict[str, Any]:
    """Train one model with a Trainer that logs every other step, and compare logged steps with the others."""
    ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"input_ids": ids, "labels": ids}] * (BATCH * (WARM_UP + steps + 1))
    recorder, model = StepTimes(), build_model(model_name)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                optim="adamw_bf16_kahan",
                learning_rate=1e-4,
                logging_steps=2,
                max_steps=WARM_UP + steps + 1,
                per_device_train_batch_size=BATCH,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=rows,
            callbacks=[hf_lowprec.LowPrecisionCallback(log_lost_updates=log_lost_updates, report=False), recorder],
        ).train()
    times = recorder.times()
    name = f"adamw_bf16_kahan under Trainer, {'with' if log_lost_updates else 'without'} lost_updates"
    return summary(model_name, name, model, times[::2], times[1::2])


def main(arguments: list[str] | None = None) -> None:
    """Measure all combinations and print them; write them to a file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="an even number")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    results = [measure(model, optimizer, options.steps) for model in MODELS for optimizer in OPTIMIZERS]
    results += [measure_under_trainer(model, options.steps, log) for model in MODELS for log in (False, True)]
    for result in results:
        shares = ", ".join(f"{share:.2%} at {n}" for n, share in result["share of a step by interval"].items())
        low, high = result["95% of the share at 1"]
        print(
            f"{result['model']} ({result['tensors']}), {result['optimizer']}: {result['plain step, ms']:.0f} ms, "
            f"measured {result['measured step, ms']:.0f} ms; {shares} (at 1: {low:.2%} to {high:.2%})"
        )
    if options.output:
        machine = {"processor": platform.processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        content = {"date": date.today().isoformat(), "steps": options.steps, **machine, "results": results}
        options.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
