"""The record of a benchmark: its numbers, with the date, machine, versions and commit that they were measured on."""

from __future__ import annotations

import json
import os
import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.checkout import commit
from hf_lowprec import __version__


def write_record(output: Path | None, **result: Any) -> None:
    """Write `result` as JSON to `output`; None writes nothing."""
    if output is None:
        return
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "hf_lowprec": __version__}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    found = {"date": str(date.today()), "machine": machine, "versions": versions, "commit": commit(), **result}
    output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"written to {output}")
