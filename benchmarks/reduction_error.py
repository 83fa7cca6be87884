"""Error of the mean of BF16 gradients over N ranks: sums in BF16 around a ring and in a tree, and ours.

The additions of all ranks are made in one process. Gradients are normal noise, one per rank, plus a common signal whose
standard deviation is 0 or 1 times that of the noise. With the exact mean m (FP64) and a result x, the error is
‖x − m‖ / ‖m‖. Ours is in the table twice: the FP32 sum, and the BF16 result after the one rounding at the end.

    python -m benchmarks.reduction_error [--signals 0 1] [--elements 16384] [--output FILE.json]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.record import write_record
from hf_lowprec.reduction import mean_in_rank_order

BF16, FP32 = torch.bfloat16, torch.float32
RANKS = (2, 4, 8, 64, 512)
"""Powers of two, by which dividing is exact wherever it is done."""


def gradients(ranks: int, elements: int, signal: float) -> Tensor:
    """The gradients of all ranks, of shape (ranks, elements)."""
    common = torch.randn(elements, generator=torch.Generator().manual_seed(1_000_000))
    noise = (torch.randn(elements, generator=torch.Generator().manual_seed(1_000_001 + rank)) for rank in range(ranks))
    return torch.stack([each.add_(common, alpha=signal).to(BF16) for each in noise])


def add_rounded(one: Tensor, other: Tensor) -> Tensor:
    """The sum, rounded to the tensors' dtype."""
    return (one.float() + other.float()).to(one.dtype)


def ring(versions: Tensor) -> Tensor:
    """The sum as a ring's reduce-scatter adds it up: chunk c starts at rank c + 1 and ends at rank c.

    It is rounded at each hop, because what travels has the gradients' dtype.
    """
    ranks = len(versions)
    chunks = versions.view(ranks, ranks, -1)
    chunk = torch.arange(ranks)
    total = chunks[(chunk + 1) % ranks, chunk]
    for hop in range(2, ranks + 1):
        total = add_rounded(total, chunks[(chunk + hop) % ranks, chunk])
    return total.view(-1)


def tree(versions: Tensor) -> Tensor:
    """The sum in a binary tree over a power of two of ranks, rounding at each node."""
    while len(versions) > 1:
        versions = add_rounded(versions[0::2], versions[1::2])
    return versions[0]


def ours(versions: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean as this package computes it, rounded to `dtype` once."""
    return mean_in_rank_order(versions, len(versions), torch.empty(versions.shape[1], dtype=dtype))


def errors(versions: Tensor) -> dict[str, float]:
    """The relative error of each way to add."""
    ranks, exact = len(versions), versions.double().mean(0)  # FP64 holds such sums without rounding
    means = {
        "BF16 ring": ring(versions).double() / ranks,
        "BF16 tree": tree(versions).double() / ranks,
        "ours, before the rounding to BF16": ours(versions, FP32).double(),
        "ours": ours(versions, BF16).double(),
    }
    return {way: float((mean - exact).norm() / exact.norm()) for way, mean in means.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--signals", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--elements", type=int, default=16384, help="of a gradient, a multiple of 512")
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    found = {}
    for signal in options.signals:
        versions = gradients(max(RANKS), options.elements, signal)
        rows = found[f"{signal:g}"] = {ranks: errors(versions[:ranks]) for ranks in RANKS}
        print(f"\nsignal {signal:g} × noise\n\n| ranks | {' | '.join(rows[2])} |\n|---:|{'---:|' * len(rows[2])}")
        for ranks, by_way in rows.items():
            print(f"| {ranks} | {' | '.join(f'{error:.1e}' for error in by_way.values())} |")
    write_record(options.output, signals=found)


if __name__ == "__main__":
    main()
