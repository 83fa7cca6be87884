"""How large is the error of adding up micro-batches' gradients in BF16, and how large with the two alternatives?

A Llama of 3.5 million parameters, byte by byte on the standard library's source, is trained for some steps, then the
gradients of k micro-batches (one sequence of 64 bytes each) are added up in each mode. Each sum is compared with the
exact one, the FP64 sum of the same BF16 gradients: reported are the relative norm of the difference, and by how much
the sum is too short in the direction of the exact one. For scale, the relative norm of the gradient's own noise is
reported too: that of the difference to the mean gradient of other k micro-batches.

    python benchmarks/micro_batches.py [--output FILE]
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path
from typing import get_args

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_lowprec
from hf_lowprec.reduction import GradientAccumulator
from hf_lowprec.reduction.grad_accumulation import GradAccumulation

MODES = get_args(GradAccumulation)
LENGTH, WARM_UP, COUNTS = 64, 60, (4, 16, 64, 256, 1024)
BYTES = {"nearest": 0, "kahan": 2, "fp32": 4}


def sequences(count: int) -> torch.Tensor:
    """`count` rows of bytes from the standard library's source, in a fixed random order."""
    folder = Path(argparse.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    rows = torch.frombuffer(bytearray(text[: len(text) // LENGTH * LENGTH]), dtype=torch.uint8).view(-1, LENGTH).long()
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count]]


def warmed_up_model(rows: torch.Tensor) -> LlamaForCausalLM:
    """Train a BF16 model past its first steps, where all gradients point in one direction."""
    torch.manual_seed(0)
    size = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **size))
    hf_lowprec.cast_model(model)
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-3)
    for batch in rows[: 16 * WARM_UP].split(16):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def gradients(model: LlamaForCausalLM, row: torch.Tensor, scale: float) -> None:
    (model(input_ids=row[None], labels=row[None]).loss * scale).backward()


def measure(model: LlamaForCausalLM, rows: torch.Tensor, count: int) -> dict[str, dict[str, float]]:
    """Measure the errors of sums over `count` micro-batches by mode, and the gradient's noise, of 16-bit parameters."""
    params = [param for param in model.parameters() if param.dtype == torch.bfloat16]

    def exact_sum(part: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(sum(p.numel() for p in params), dtype=torch.float64)
        for row in part:
            model.zero_grad()
            gradients(model, row, 1 / count)
            total += torch.cat([p.grad.flatten() for p in params]).double()
        return total

    exact, other = exact_sum(rows[:count]), exact_sum(rows[count : 2 * count])
    found = {"gradient noise": {"relative error": float((exact - other).norm() / exact.norm() / 2**0.5)}}
    for mode in MODES:
        model.zero_grad()
        accumulator = GradientAccumulator(model, mode) if mode != "nearest" else None
        for row in rows[:count]:
            gradients(model, row, 1 / count)
        added = torch.cat([p.grad.flatten() for p in params]).double()
        if accumulator is not None:
            accumulator.remove()
        found[mode] = {
            "relative error": float((added - exact).norm() / exact.norm()),
            "too short": float(1 - (added @ exact) / (exact @ exact)),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    options = parser.parse_args()
    rows = sequences(16 * WARM_UP + 2 * max(options.counts))
    model = warmed_up_model(rows)
    results = {count: measure(model, rows[16 * WARM_UP :], count) for count in options.counts}
    print("| micro-batches | " + " | ".join(f"{m}, +{BYTES[m]} bytes" for m in MODES) + " | gradient noise |")
    print("|---:|" + "---:|" * (len(MODES) + 1))
    for count, found in results.items():
        cells = [f"{found[m]['relative error']:.2e} ({found[m]['too short']:+.1e})" for m in MODES]
        print(f"| {count} | " + " | ".join(cells) + f" | {found['gradient noise']['relative error']:.2f} |", flush=True)
    if options.output:
        options.output.write_text(json.dumps({"date": str(date.today()), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
