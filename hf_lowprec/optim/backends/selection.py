"""Select the backend that runs a step: the requested one, or the best one for the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from hf_lowprec.once import first_time
from hf_lowprec.optim.backends import eager
from hf_lowprec.optim.backends.c import native
from hf_lowprec.optim.backends.c.compiler import CompilerError, require_compiler
from hf_lowprec.optim.backends.triton import availability as triton_availability
from hf_lowprec.optim.backends.triton import launch as triton_launch
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.fused_group import FusedGroup


def check_can_run(backend: str) -> None:
    """Raise RuntimeError if `backend`, an optimizer's argument, cannot run on this machine."""
    if backend == "triton":
        triton_availability.check_available()
    if backend == "native":
        require_compiler()


def build_backend_step(backend: str, fused_group: FusedGroup) -> BackendStep:
    """Build the `BackendStep` of `fused_group`, with its kernel and tables.

    `"auto"` falls back to `eager`: with a warning if Triton or the C compiler fails, and silently on a device that has
    no faster backend.

    Args:
        backend: the optimizer's argument.
        fused_group: the parameters to step.

    Raises:
        RuntimeError: `backend` was requested explicitly but cannot run on the group's device.
    """
    name = expected_backend(backend, fused_group.device)
    if name == "eager":
        return eager.EagerStep(fused_group)
    if name == "triton":
        try:
            return triton_launch.TritonStep(fused_group)
        except triton_availability.TritonError as error:
            if backend == "triton":
                raise
            _warn_once(str(fused_group.device), error)
            return eager.EagerStep(fused_group)
    if fused_group.device.type != "cpu":  # the name is "native"
        raise RuntimeError(
            f"backend='native' runs on the CPU, but a parameter is on {fused_group.device}; use backend='auto'"
        )
    try:
        return native.NativeStep(fused_group)
    except CompilerError as error:
        if backend == "native":
            raise
        _warn_once("the CPU", error)
        return eager.EagerStep(fused_group)


def expected_backend(backend: str, device: torch.device) -> str:
    """Return the name of the backend that will probably step parameters on `device`, before anything is compiled."""
    if backend != "auto":
        return backend
    check: Callable[[], object]
    if device.type == "cpu":
        name, check = "native", require_compiler
    elif triton_availability.supports_bfloat16(device):
        name, check = "triton", triton_availability.check_available
    else:
        return "eager"
    try:
        check()
    except (CompilerError, triton_availability.TritonError) as error:
        _warn_once("the CPU" if device.type == "cpu" else str(device), error)
        return "eager"
    return name


def _warn_once(where: str, reason: Exception) -> None:
    if first_time(f"eager on {where}"):
        warnings.warn(
            f"hf_lowprec uses the slower 'eager' backend on {where}, with the same results: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
