"""Does it matter to a step's time where in a page its tensors begin? Kahan's AdamW on one thread, 32 × (512×1024).

The memory is the same for every row of the table; what changes is by how many bytes the gradient, the moments and the
compensation begin further into a page than the weight. See `hf_lowprec/optim/state/state_tensors.py`.

    python benchmarks/aliasing.py [--rounds 40] [--output …json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path

import torch
from cpu_step.optimizers import DECAY, LR, check_parity

from hf_lowprec import AdamW
from hf_lowprec.optim.state.state_tensors import PAGE

SHAPE, NUMBER = (512, 1024), 32
STATES = ("exp_avg", "exp_avg_sq", "compensation")
PLACES = {
    "a line each, as the C library's": (-64, 64, 128, 192),
    "a line each, gradients elsewhere": (512, 64, 128, 192),
    "two lines each": (512, 128, 256, 384),
    "four lines each": (512, 256, 512, 768),
    "eight lines each": (512, 512, 1024, 1536),
    "all at the same place": (0, 0, 0, 0),
    "even parts of a page": (0, 1024, 2048, 3072),
    "even parts, gradients a line before the weight": (-64, 1024, 2048, 3072),
    "even parts, gradients a line after the weight": (64, 1024, 2048, 3072),
}
"""Bytes from the weight's place in a page to those of the gradient and the states."""


class Movable:
    """A BF16 tensor of `SHAPE` whose first element can be moved within a page."""

    def __init__(self, values: torch.Tensor) -> None:
        self._memory = torch.zeros(values.numel() + PAGE // 2, dtype=torch.bfloat16)
        self._values = values.flatten()

    def at(self, place: int) -> torch.Tensor:
        """The tensor, `place` bytes after a page's boundary."""
        first = (place - self._memory.data_ptr()) % PAGE // 2
        moved = self._memory[first : first + self._values.numel()].copy_(self._values)
        return moved.view(SHAPE)


def measure(rounds: int) -> dict[str, list[float]]:
    """Nanoseconds per element of steps, by place."""
    weights = [Movable(torch.randn(SHAPE).mul_(0.02)) for _ in range(NUMBER)]
    grads = [Movable(torch.randn(SHAPE).mul_(0.01)) for _ in range(NUMBER)]
    states = {name: [Movable(torch.zeros(SHAPE)) for _ in range(NUMBER)] for name in STATES}
    params = [torch.nn.Parameter(weight.at(PAGE // 2)) for weight in weights]
    optimizer = AdamW(params, lr=LR, weight_decay=DECAY, rounding="kahan", backend="native")
    found: dict[str, list[float]] = {name: [] for name in PLACES}
    for _ in range(rounds):
        for name, (of_grad, *of_states) in PLACES.items():
            for k, param in enumerate(params):
                param.grad = grads[k].at(PAGE // 2 + of_grad)
                for state, offset in zip(STATES, of_states, strict=True):
                    optimizer.state[param][state] = states[state][k].at(PAGE // 2 + offset)
            optimizer.step()  # the first on new states makes tables
            start = time.perf_counter()
            optimizer.step()
            found[name].append(1e9 * (time.perf_counter() - start) / (NUMBER * params[0].numel()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path(f"benchmarks/results/aliasing-{date.today()}.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    check_parity()
    found = measure(options.rounds)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    rounded = {name: [round(value, 4) for value in values] for name, values in found.items()}
    options.output.write_text(json.dumps(rounded) + "\n")

    print("\n| where tensors begin in a page | gradient, states: bytes after the weight | ns per element |")
    print("|---|---|---:|")
    for name, values in found.items():
        print(f"| {name} | {', '.join(map(str, PLACES[name]))} | {statistics.median(values):.3f} |")
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
