"""Evidence: how far training in 16 bits holds, measured against FP32 on equal weights and data.

    python -m benchmarks.evidence [NAME…] [--night | --full] [--cases CASE,…] [--output FOLDER]

Each experiment is a file. Its settings, seeds and the ground of its verdict are fixed there. Cases that are done are
kept, and a case that was interrupted goes on where its last checkpoint was.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.evidence.harness import Experiment

EXPERIMENTS = (
    "steps",
    "scale",
    "pretrained",
    "forks",
    "learning-rates",
    "states",
    "muon",
    "reinforcement",
    "applications",
    "peers",
    "shared-bits",
    "halting",
    "arrival",
)
"""Names, in the order of the page. They are imported when they are needed: some need packages that others do not."""


def experiment(name: str) -> Experiment:
    """The experiment of that name."""
    return import_module(f"benchmarks.evidence.experiments.{name.replace('-', '_')}").EXPERIMENT
