"""Time of a training step with gradient release relative to the ordinary one, and the gradients that exist at once.

A Llama trains on a few tokens, so that the optimizer's share of the step is large. All kinds of steps take turns;
ratios are medians over rounds. "CPU" is the time of the process on all of its cores; other processes disturb it less.

    python benchmarks/gradient_release.py [--hidden 512] [--layers 8] [--tokens 64] [--rounds 30] [--optim NAME]
        [--output FILE.json]
    python benchmarks/gradient_release.py --device cuda --hidden 2048 --layers 16 --tokens 2048
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from recorded_run import recorded_run
from transformers import LlamaConfig, LlamaForCausalLM

import hf_lowprec
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.gradient_release import buckets as gradient_buckets

WARMUP = 3
BUCKETS = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Elements; at the default size, a layer has 4 million."""


class Run:
    """A model and its optimizer.

    Attributes:
        bucket: elements of a bucket; None does not release.
    """

    def __init__(self, options: argparse.Namespace, bucket: int | None) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=options.vocabulary,
            hidden_size=options.hidden,
            intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=8,
        )
        self.bucket = bucket
        with torch.device(options.device):
            self.model = LlamaForCausalLM(config)
        hf_lowprec.cast_model(self.model)
        cls, kwargs = hf_lowprec.optimizer_factory(options.optim, gradient_release=bucket is not None)
        self.optimizer: LowPrecisionOptimizer = cls(self.model.parameters(), **kwargs)
        self.tokens = torch.randint(0, options.vocabulary, (1, options.tokens), device=options.device)

    def step(self) -> tuple[float, float]:
        """Train one step; return its seconds, of the clock and of the CPU."""
        gradient_buckets.BUCKET_ELEMENTS = self.bucket or gradient_buckets.BUCKET_ELEMENTS
        self._wait()
        start, used = time.perf_counter(), time.process_time()
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._wait()
        return time.perf_counter() - start, time.process_time() - used

    def _wait(self) -> None:
        if self.tokens.is_cuda:
            torch.cuda.synchronize()

    def gradient_bytes(self) -> int:
        """The most bytes of gradients that exist at once in a step."""
        most, params = 0, list(self.model.parameters())

        def count(grad: torch.Tensor) -> None:
            nonlocal most
            most = max(most, grad.nbytes + sum(p.grad.nbytes for p in params if p.grad is not None))

        handles = [param.register_hook(count) for param in params]
        self.step()
        for handle in handles:
            handle.remove()
        return most


def table(result: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = ["| elements of a bucket | gradients at once, MiB | ratio, clock | ratio, CPU |", "|---:|---:|---:|---:|"]
    for row in result["rows"]:
        name = "not released" if row["bucket"] is None else f"{row['bucket']:,}"
        size = row["gradient bytes at once"] / 2**20
        lines.append(f"| {name} | {size:.1f} | {row['ratio, clock']:.3f} | {row['ratio, CPU']:.3f} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("hidden", 512), ("layers", 8), ("vocabulary", 8192), ("tokens", 64), ("rounds", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--optim", default="adamw_bf16_kahan")
    parser.add_argument("--buckets", type=int, nargs="+", default=BUCKETS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    options = parser.parse_args(words)
    torch.set_num_threads(options.threads)

    runs = [Run(options, bucket) for bucket in (None, *options.buckets)]
    params = list(runs[0].model.parameters())
    print(f"{sum(p.numel() for p in params) / 1e6:.1f} million parameters in {len(params)} tensors, {options.optim}")
    alive, rounds = [run.gradient_bytes() for run in runs], []
    with recorded_run(options) as result:
        for number in range(options.rounds + WARMUP):
            first = number % len(runs)
            times = {run: run.step() for run in runs[first:] + runs[:first]}
            rounds.append([times[run] for run in runs])
        result["rows"] = []
        for k, run in enumerate(runs):
            pairs = [(times[0], times[k]) for times in rounds[WARMUP:]]
            clock, cpu = (statistics.median(new[which] / old[which] for old, new in pairs) for which in (0, 1))
            row = {"bucket": run.bucket, "gradient bytes at once": alive[k], "ratio, clock": clock, "ratio, CPU": cpu}
            result["rows"].append(row)
    print(table(result))


if __name__ == "__main__":
    main()
