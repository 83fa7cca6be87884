"""The result file of a benchmark: its numbers, the date, the options, and the load of the machine."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from typing import Any


@contextmanager
def recorded_run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the dictionary to put results into, and write it to `options.output`, if that names a file."""
    words = {name: value for name, value in vars(options).items() if name != "output"}
    load = [os.getloadavg()[0]]
    result: dict[str, Any] = {"date": str(date.today()), "options": words, "processors": os.cpu_count(), "load": load}
    yield result
    load.append(os.getloadavg()[0])
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
