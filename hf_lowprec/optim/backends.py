"""Which backend runs a step: the user's word, or the best one the device has."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from hf_lowprec.optim import eager, launch, native
from hf_lowprec.optim.work import Batch

Backend = Callable[[Batch], None]

BACKENDS = ("auto", "triton", "native", "eager")
_warned: set[str] = set()


def check(backend: str) -> None:
    """Raise if `backend` is unknown, or can be known not to run here."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; valid are {', '.join(map(repr, BACKENDS))}")
    if backend == "triton":
        launch.require()
    if backend == "native":
        native.require_compiler()


def resolve(backend: str, batch: Batch) -> Backend:
    """The function that steps `batch`; compiles what it needs, so that running cannot fail.

    Raises:
        RuntimeError: `backend` was asked for explicitly and cannot serve the batch's device.
    """
    if "run" not in batch.kept:
        batch.kept["run"] = _resolved(backend, batch)
    run: Backend = batch.kept["run"]
    return run


def _resolved(backend: str, batch: Batch) -> Backend:
    name = expected(backend, batch.device)
    if name == "eager":
        return eager.run
    if name == "triton":
        launch.prepare(batch)
        return launch.run
    if batch.device.type != "cpu":
        raise RuntimeError(f"backend='native' runs on the CPU and a parameter is on {batch.device}; use backend='auto'")
    try:
        native.prepare(batch)
    except native.CompilerError as error:
        if backend == "native":
            raise
        _warn_once("the CPU", error)
        return eager.run
    return native.run


def expected(backend: str, device: torch.device) -> str:
    """The name of the backend that will step parameters on `device`, as far as it is known before compiling."""
    if backend != "auto":
        return backend
    preferred: Callable[[], object]
    if device.type == "cpu":
        name, preferred = "native", native.require_compiler
    elif launch.supports_bfloat16(device):
        name, preferred = "triton", launch.require
    else:
        return "eager"
    try:
        preferred()
    except (native.CompilerError, launch.TritonError) as error:
        _warn_once("the CPU" if device.type == "cpu" else str(device), error)
        return "eager"
    return name


def _warn_once(where: str, reason: Exception) -> None:
    if where not in _warned:
        _warned.add(where)
        warnings.warn(
            f"hf_lowprec steps with the slower 'eager' backend on {where}, with the same results: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
