"""Which backend runs a step: the user's word, or the best one the device has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_lowprec.optim import clipping, eager, launch, native
from hf_lowprec.optim.batch import Batch


class Backend(NamedTuple):
    """How batches are stepped.

    Attributes:
        run: steps a batch.
        square_sum: sums the squares of its gradients; an FP64 scalar on its device.
    """

    run: Callable[[Batch], None]
    square_sum: Callable[[Batch], Tensor]


EAGER = Backend(eager.run, clipping.square_sum)
NATIVE = Backend(native.run, clipping.square_sum)
TRITON = Backend(launch.run, launch.square_sum)

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
    """The backend that steps `batch`; compiles what it needs, so that running cannot fail.

    Raises:
        RuntimeError: `backend` was asked for explicitly and cannot serve the batch's device.
    """
    if "backend" not in batch.kept:
        batch.kept["backend"] = _resolved(backend, batch)
    resolved: Backend = batch.kept["backend"]
    return resolved


def _resolved(backend: str, batch: Batch) -> Backend:
    name = expected(backend, batch.device)
    if name == "eager":
        return EAGER
    if name == "triton":
        launch.prepare(batch)
        return TRITON
    if batch.device.type != "cpu":
        raise RuntimeError(f"backend='native' runs on the CPU and a parameter is on {batch.device}; use backend='auto'")
    try:
        native.prepare(batch)
    except native.CompilerError as error:
        if backend == "native":
            raise
        _warn_once("the CPU", error)
        return EAGER
    return NATIVE


def check_capturable(batches: Sequence[Batch]) -> None:
    """Raise RuntimeError if a batch is stepped by a backend that asks its device."""
    if any(batch.device.type != "cpu" and batch.kept["backend"] is EAGER for batch in batches):
        raise RuntimeError("capturable=True needs backend='triton'; 'eager' asks the device during a step")


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
