"""Which backend runs a step: the user's word, or the best one the device has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_lowprec.optim.backends import eager, native
from hf_lowprec.optim.backends import triton as launch
from hf_lowprec.optim.backends.c_compiler import CompilerError, require_compiler
from hf_lowprec.optim.step import clipping
from hf_lowprec.optim.step.fused_group import FusedGroup


class Backend(NamedTuple):
    """How fused_groups are stepped.

    Attributes:
        run: steps a fused_group.
        square_sum: sums the squares of its gradients; an FP64 scalar on its device.
        tensor_sums: sums the `tensor_mean` formula over each parameter; FP64 of shape (entries) on its device.
    """

    run: Callable[[FusedGroup], None]
    square_sum: Callable[[FusedGroup], Tensor]
    tensor_sums: Callable[[FusedGroup], Tensor]


EAGER = Backend(eager.run, clipping.square_sum, eager.tensor_sums)
NATIVE = Backend(native.run, clipping.square_sum, native.tensor_sums)
TRITON = Backend(launch.run, launch.square_sum, launch.tensor_sums)

BACKENDS = ("auto", "triton", "native", "eager")
_warned: set[str] = set()


def check(backend: str) -> None:
    """Raise if `backend` is unknown, or can be known not to run here."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; valid are {', '.join(map(repr, BACKENDS))}")
    if backend == "triton":
        launch.require()
    if backend == "native":
        require_compiler()


def resolve(backend: str, fused_group: FusedGroup) -> Backend:
    """The backend that steps `fused_group`, and builds what it needs, before anything is changed.

    Raises:
        RuntimeError: `backend` was asked for explicitly and cannot serve the fused_group's device.
    """
    if "backend" not in fused_group.kept:
        fused_group.kept["backend"] = _resolved(backend, fused_group)
    resolved: Backend = fused_group.kept["backend"]
    return resolved


def _resolved(backend: str, fused_group: FusedGroup) -> Backend:
    name = expected(backend, fused_group.device)
    if name == "eager":
        return EAGER
    if name == "triton":
        try:
            launch.prepare(fused_group)
        except launch.TritonError as error:
            if backend == "triton":
                raise
            _warn_once(str(fused_group.device), error)
            return EAGER
        return TRITON
    if fused_group.device.type != "cpu":
        raise RuntimeError(
            f"backend='native' runs on the CPU and a parameter is on {fused_group.device}; use backend='auto'"
        )
    try:
        native.prepare(fused_group)
    except CompilerError as error:
        if backend == "native":
            raise
        _warn_once("the CPU", error)
        return EAGER
    return NATIVE


def check_not_capturing() -> None:
    """Raise RuntimeError during a capture, when things would have to be made that must be there before."""
    if launch.capturing():
        raise RuntimeError(
            "a step can be captured in a graph after one was taken outside of it, with parameters, gradients and "
            "settings of the same kind; take one (on a side stream), then capture"
        )


def check_capture(fused_groups: Sequence[FusedGroup], capturable: bool) -> None:
    """Raise RuntimeError if a graph is to hold a step that it cannot hold."""
    on_gpu = [fused_group for fused_group in fused_groups if fused_group.device.type != "cpu"]
    if capturable and any(fused_group.kept["backend"] is EAGER for fused_group in on_gpu):
        raise RuntimeError("capturable=True needs backend='triton'; 'eager' asks the device during a step")
    if on_gpu and launch.capturing():
        if not capturable:
            raise RuntimeError(
                "this step would be captured in a graph with its step count and learning rate as they are now; build "
                "the optimizer with capturable=True"
            )
        if not all(launch.has_run(fused_group) for fused_group in on_gpu):
            check_not_capturing()


def expected(backend: str, device: torch.device) -> str:
    """The name of the backend that will step parameters on `device`, as far as it is known before compiling."""
    if backend != "auto":
        return backend
    preferred: Callable[[], object]
    if device.type == "cpu":
        name, preferred = "native", require_compiler
    elif launch.supports_bfloat16(device):
        name, preferred = "triton", launch.require
    else:
        return "eager"
    try:
        preferred()
    except (CompilerError, launch.TritonError) as error:
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
