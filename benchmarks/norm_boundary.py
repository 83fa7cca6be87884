"""What norms in FP32 cost: forward and backward of a Llama after `cast_model` and after `model.to(bfloat16)`.

Both models take the same batch, interleaved in one process and in alternating order, so that changes in the
machine's speed affect both equally. Reported are both medians, the median of the ratios of neighbouring steps, and the
ratio of the fastest steps. On a machine that others use too, `--clock cpu --threads 1` counts the processor's time.

    python benchmarks/norm_boundary.py [--hidden 768] [--layers 6] [--tokens 512] [--threads 2] [--rounds 25]
    python benchmarks/norm_boundary.py --device cuda --hidden 2048 --layers 16 --tokens 8192 [--liger] [--compile]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_lowprec

CAST, PURE = "cast_model, norms in FP32", "model.to(bfloat16)"


def models(options: argparse.Namespace) -> dict[str, Any]:
    """Build the two models from the same FP32 weights."""
    if options.liger:
        # Replaces the classes' methods, so before a model is made; needs the package liger-kernel and a GPU.
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    heads = options.hidden // 64
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=8 * options.hidden // 3 // 64 * 64,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        use_cache=False,
    )
    torch.manual_seed(0)
    cast = LlamaForCausalLM(config)
    pure = copy.deepcopy(cast).to(torch.bfloat16)
    hf_lowprec.cast_model(cast)
    both = {CAST: cast.to(options.device), PURE: pure.to(options.device)}
    return {name: torch.compile(model) if options.compile else model for name, model in both.items()}


def seconds(model: Any, tokens: torch.Tensor, clock: Callable[[], float]) -> float:
    """Time one forward and backward, until the device is done."""
    model.zero_grad()
    _wait(tokens.device)
    start = clock()
    model(input_ids=tokens, labels=tokens).loss.backward()
    _wait(tokens.device)
    return clock() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(models: dict[str, Any], tokens: torch.Tensor, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Medians in milliseconds and the median of the ratios; three rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for i in range(rounds + 3):
        for name in list(models)[:: 1 if i % 2 else -1]:
            times[name].append(seconds(models[name], tokens, clock))
    kept = {name: series[3:] for name, series in times.items()}
    ratios = [cast / pure for cast, pure in zip(kept[CAST], kept[PURE], strict=True)]
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    medians = {f"{name}, ms": 1e3 * statistics.median(series) for name, series in kept.items()}
    spread = {"ratio, lower quartile": quarters[0], "ratio, upper quartile": quarters[2]}
    return medians | {"ratio": quarters[1], **spread, "ratio of the fastest": min(kept[CAST]) / min(kept[PURE])}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"hidden": 768, "layers": 6, "tokens": 512, "vocabulary": 8192, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--liger", action="store_true", help="with Liger's kernels for Llama (liger-kernel)")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    tokens = torch.randint(0, options.vocabulary, (1, options.tokens), device=options.device)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    result = measure(models(options), tokens, options.rounds, clock)
    for name, value in result.items():
        print(f"{name}: {value:.3f}")
    if options.output is not None:
        settings = {name: str(value) for name, value in vars(options).items() if name != "output"}
        options.output.write_text(json.dumps({**settings, "torch": torch.__version__, **result}, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
