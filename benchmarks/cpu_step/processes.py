"""Repeat a measurement in fresh processes, and write its result with what it was measured on."""

from __future__ import annotations

import json
import multiprocessing
import platform
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from hf_lowprec import __version__

Measured = TypeVar("Measured")


def in_fresh_processes(count: int, measure: Callable[..., Measured], *arguments: Any) -> list[Measured]:
    """Run `measure(*arguments)` in `count` new processes, one after the other, since memory lies elsewhere in each."""
    results = []
    for _ in tqdm(range(count), unit="process"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            results.append(fresh.submit(measure, *arguments).result())
    return results


def write_result(output: Path, threads: int, **result: Any) -> None:
    """Write `result` as JSON, after the machine and the versions; folders are made as needed."""
    versions = {"torch": torch.__version__, "hf_lowprec": __version__, "python": platform.python_version()}
    recorded = {"machine": f"{platform.machine()}, {threads} threads", "versions": versions, **result}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"\nwritten to {output}")
