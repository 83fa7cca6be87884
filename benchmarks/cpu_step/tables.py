"""Markdown tables of step times in several processes."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from gradient_kinds import KINDS, RANDOM, give_gradients

from cpu_step.optimizers import EMBEDDING_AND_EXPERTS, IN_8_BITS, parameters

Row = dict[str, Any]


def table(title: str, processes: list[list[Row]]) -> str:
    """A Markdown table of medians over processes."""
    lines = [
        f"\n{title}, {len(processes)} processes\n",
        "| optimizer | ms | × FP32 fused | from … to | GB/s |",
        "|---|---:|---:|---:|---:|",
    ]
    for rows in zip(*processes, strict=True):
        ratios = [row["ratio"] for row in rows]
        time_ms, bandwidth = (
            statistics.median(row[key] for row in rows) for key in ("median_ms", "gigabytes_per_second")
        )
        lines.append(
            f"| {rows[0]['optimizer']} | {time_ms:.2f} | {statistics.median(ratios):.2f} "
            f"| {min(ratios):.2f} … {max(ratios):.2f} | {bandwidth:.0f} |"
        )
    return "\n".join(lines)


def table_of_8_bits(processes: list[list[Row]]) -> str:
    """A Markdown table of how long steps with states in 8 bits take, relative to the same with states in BF16."""
    lines = ["\n| optimizer | 8 bits / BF16 | from … to |", "|---|---:|---:|"]
    times = [{row["optimizer"]: row["median_ms"] for row in rows} for rows in processes]
    for name in (name for name in times[0] if name + IN_8_BITS in times[0]):
        ratios = [process[name + IN_8_BITS] / process[name] for process in times]
        lines.append(f"| {name} | {statistics.median(ratios):.2f} | {min(ratios):.2f} … {max(ratios):.2f} |")
    return "\n".join(lines)


def table_of_gradients(processes: list[list[Row]]) -> str:
    """A Markdown table of how long steps take with each kind of gradients, relative to random ones."""
    times = [{row["optimizer"]: row["median_ms"] for row in rows} for rows in processes]
    names = [name for name in times[0] if "; " not in name]
    lines = [f"\n| gradients | share | {' | '.join(names)} |", "|---|---:|" + "---:|" * len(names)]
    for kind in KINDS:
        if kind != RANDOM:
            (shapes,) = EMBEDDING_AND_EXPERTS.values()
            share = give_gradients(parameters(shapes, torch.bfloat16), kind)
            ratios = [[process[f"{name}; {kind}"] / process[name] for process in times] for name in names]
            cells = [f"{statistics.median(found):.2f} ({min(found):.2f} … {max(found):.2f})" for found in ratios]
            lines.append(f"| {kind} | {share:.0%} | {' | '.join(cells)} |")
    return "\n".join(lines)
