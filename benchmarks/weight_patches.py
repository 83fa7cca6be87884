"""What it takes to know which weights have changed: the step with a bit per weight, and reading the bits.

Compared, in one process and in turns, with the step without bits, and with a copy of the weights that is compared with
them. Learning rates decide how many weights change; the gradients are random.

    python benchmarks/weight_patches.py [--threads 2] [--rounds 15] [--output …json]
    python benchmarks/weight_patches.py --device cuda --layers 64
"""

from __future__ import annotations

import argparse
import statistics
import time
from datetime import date
from pathlib import Path

import torch
from recorded_run import recorded_run

from hf_lowprec.optim import AdamW
from hf_lowprec.optim.changed_weights import changed_weights

RESULTS = Path(__file__).parent / "results"
LAYER = [(4096, 1024), (1024, 4096)]
MODES = {"split": {"rounding": "split"}, "stochastic": {"rounding": "stochastic"}}
RATES = (1e-6, 3e-6, 1e-5)


def weights(layers: int, device: str) -> list[torch.nn.Parameter]:
    """Normal weights of a spread of 0.02, as in large models."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    params = [torch.nn.Parameter((0.02 * normal(shape)).bfloat16()) for shape in LAYER * layers]
    for param in params:
        param.grad = normal(param.shape).bfloat16()
    return params


def changed_since(params: list[torch.nn.Parameter], copies: list[torch.Tensor]) -> int:
    """How many weights differ from copies, which are brought up to date."""
    count = 0
    for param, copy in zip(params, copies, strict=True):
        indices = (param.detach().view(torch.int16) != copy.view(torch.int16)).flatten().nonzero().flatten()
        copy.copy_(param.detach())
        count += len(indices)
    return count


def measure(name: str, options: dict[str, object], lr: float, settings: argparse.Namespace) -> dict[str, object]:
    """Medians in nanoseconds per parameter, and the share of weights that a step changes."""
    plain, tracked = (weights(settings.layers, settings.device) for _ in range(2))
    ordinary, with_bits = AdamW(plain, lr=lr, **options), AdamW(tracked, lr=lr, track_changes=True, **options)
    copies = [param.detach().clone() for param in plain]
    times: dict[str, list[float]] = {"step": [], "step with bits": [], "read bits": [], "compare copies": []}
    shares = []
    wait = torch.cuda.synchronize if settings.device == "cuda" else lambda: None

    def timed(what: str, call: object) -> object:
        wait()
        start = time.perf_counter()
        result = call()  # type: ignore[operator]
        wait()
        times[what].append(time.perf_counter() - start)
        return result

    count = sum(param.numel() for param in plain)
    for _ in range(settings.rounds):
        timed("step", ordinary.step)
        differing = timed("compare copies", lambda: changed_since(plain, copies))
        timed("step with bits", with_bits.step)
        found = timed("read bits", lambda: sum(map(len, changed_weights(with_bits).values())))
        assert found == differing
        shares.append(found / count)
    medians = {what: statistics.median(values[2:]) * 1e9 / count for what, values in times.items()}
    share = statistics.median(shares[2:])
    return {"mode": name, "lr": lr, "share": share, "bytes of a patch, of a copy": min(6 * share / 2, 1), **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=4, help="of 8 million weights each (default 4)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS / f"weight-patches-{date.today().isoformat()}.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with recorded_run(options) as record:
        record["rows"] = [measure(name, mode, lr, options) for name, mode in MODES.items() for lr in RATES]
    heads = list(record["rows"][0])
    print(f"| {' | '.join(heads)} |\n|---{'|---:' * (len(heads) - 1)}|")
    for row in record["rows"]:
        print(f"| {' | '.join(value if isinstance(value, str) else f'{value:.3g}' for value in row.values())} |")


if __name__ == "__main__":
    main()
