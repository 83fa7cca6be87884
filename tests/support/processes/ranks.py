"""Run a function, or a script of `tests/scripts`, on several ranks: real processes on gloo. End a rank safely."""

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from tests.support.processes import forkserver

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
"""The programs that tests start."""


def on_ranks(function: Callable[..., Any], ranks: int, *arguments: object, **environment: str) -> Any:
    """Call a function of a module on a number of ranks, and return what it returns on rank 0.

    Arguments and results are numbers, strings, lists and dicts; paths become strings. The test fails if a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, called = Path(folder, "result"), f"{function.__module__}:{function.__qualname__}"
        run_script("forked_ranks.py", ranks, called, json.dumps(arguments, default=str), file, **environment)
        return json.loads(file.read_text())


def run_ranks(script: str, ranks: int, *arguments: str, fails: bool = False, **environment: str) -> str:
    """Run `tests/scripts/SCRIPT` on a number of ranks, and return what they print.

    Fails the test if a rank fails, or with `fails=True` if none does.
    """
    return run_script("forked_ranks.py", ranks, SCRIPTS / script, *arguments, fails=fails, **environment)


class Run(NamedTuple):
    """What `trainer_ranks.py` has printed: its report, a digest of weights and states, losses and gradient norms."""

    report: str
    digest: str | None
    losses: list[float]
    norms: list[float]


def run_trainer(ranks: int, kind: str, folder: object, words: str, fails: bool = False, **environment: str) -> Run:
    """Run the stock Trainer on a number of ranks; `words` are `TrainingArguments`, and `folder` its output_dir."""
    always = "--learning_rate 1e-2 --per_device_train_batch_size 2"
    with tempfile.TemporaryDirectory() as unused:
        arguments = *always.split(), "--output_dir", str(folder or unused), *words.split()
        report = run_ranks("trainer_ranks.py", ranks, kind, *arguments, fails=fails, **environment)
    found = dict(re.findall(r"^(digest|loss|grad_norm)=(.*)$", report, re.MULTILINE))
    losses, norms = (json.loads(found.get(key, "[]")) for key in ("loss", "grad_norm"))
    return Run(report, found.get("digest"), losses, norms)


def run_script(script: str, *arguments: object, fails: bool = False, **environment: str) -> str:
    """Run `tests/scripts/SCRIPT` in one process, and return what it prints; `fails` is as in `run_ranks`."""
    done = forkserver.run(SCRIPTS / script, [str(argument) for argument in arguments], timeout=280, **environment)
    assert (done.returncode != 0) == fails, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout + done.stderr if fails else done.stdout


def leave() -> None:
    """End this rank, once all ranks are here, without destroying gloo's groups.

    Destroying them aborts the process now and then, if one of gloo's threads is still joinable. Ranks meet in the
    store, which a launcher or a file keeps: the first to end after a barrier would disconnect from slower ones.
    """
    sys.stdout.flush()
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        if store.add("ranks here", 1) == dist.get_world_size():
            store.set("all ranks here", "yes")
        store.wait(["all ranks here"])
    os._exit(0)
