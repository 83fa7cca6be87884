"""Which backend runs a step: the user's word, or the best one the device has."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from hf_lowprec.optim import eager, native
from hf_lowprec.optim.work import Batch

Backend = Callable[[Batch], None]

BACKENDS = ("auto", "triton", "native", "eager")
_warned = False


def check(backend: str) -> None:
    """Raise if `backend` is unknown, or can be known not to run here."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; valid are {', '.join(map(repr, BACKENDS))}")
    if backend == "triton":
        raise RuntimeError(
            "backend='triton' is not part of this version; use 'auto', 'eager' (any device) or 'native' (CPU)"
        )
    if backend == "native":
        native.require_compiler()


def resolve(backend: str, batch: Batch) -> Backend:
    """The function that steps `batch`; compiles it if needed, so that running cannot fail.

    Raises:
        RuntimeError: `backend` was asked for explicitly and cannot serve the batch's device.
    """
    device = batch.device
    if backend == "eager" or (backend == "auto" and device.type != "cpu"):
        return eager.run
    if device.type != "cpu":
        raise RuntimeError(f"backend='native' runs on the CPU and a parameter is on {device}; use backend='auto'")
    try:
        native.prepare(batch)
    except native.CompilerError as error:
        if backend == "native":
            raise
        _warn_once(str(error))
        return eager.run
    return native.run


def expected(backend: str, device: torch.device) -> str:
    """The name of the backend that will step parameters on `device`, as far as it is known before compiling."""
    if backend != "auto":
        return backend
    if device.type != "cpu":
        return "eager"
    try:
        native.require_compiler()
    except native.CompilerError:
        return "eager"
    return "native"


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"hf_lowprec steps with the slower 'eager' backend on the CPU, with the same results: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
