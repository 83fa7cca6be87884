"""Time of an optimizer step with states on the host, on a GPU, next to an ordinary step of the same tensors on the CPU.

The difference is what copies add. Both steps take turns; the record has medians in nanoseconds per parameter.

    python -m benchmarks.offload_time [--threads 16] [--rounds 7] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from benchmarks.record import write_record
from hf_lowprec import AdamW

SHAPES = [(4096, 1024), (1024, 4096), (4096,)] * 48
"""Of 0.4 billion parameters."""
MODES = {
    "split": {"rounding": "split"},
    "Kahan": {"rounding": "kahan"},
    "stochastic": {"rounding": "stochastic"},
    "split, 8-bit states": {"rounding": "split", "state_dtype": torch.int8},
}
WARM_UP = 2


def measure(mode: str, rounds: int) -> dict[str, object]:
    """The medians of both steps."""
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda").bfloat16()) for shape in SHAPES]
    on_host = [torch.nn.Parameter(param.detach().cpu().clone()) for param in params]
    for param, copied in zip(params, on_host, strict=True):
        param.grad = torch.randn_like(param)
        copied.grad = param.grad.cpu().clone()
    optimizers = {
        "host alone": AdamW(on_host, lr=1e-3, **MODES[mode]),
        "states on the host": AdamW(params, lr=1e-3, offload_states=True, **MODES[mode]),
    }
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(WARM_UP + rounds):
        for name, optimizer in optimizers.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            optimizer.step()
            torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    count = sum(param.numel() for param in params)
    medians = {name: statistics.median(values[WARM_UP:]) * 1e9 / count for name, values in times.items()}
    return {"mode": mode, "parameters": count, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=16, help="of the CPU (default 16)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    torch.set_num_threads(options.threads)
    rows = [measure(mode, options.rounds) for mode in MODES]
    for row in rows:
        print("{mode}: {states on the host:.3f} ns per parameter, {host alone:.3f} on the host alone".format(**row))
    write_record(options.output, gpu=torch.cuda.get_device_name(), threads=options.threads, rows=rows)


if __name__ == "__main__":
    main()
