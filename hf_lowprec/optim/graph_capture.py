"""CUDA graphs: checks whether a step can be captured."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_lowprec.optim.step.backend_step import BackendStep


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def check_not_capturing() -> None:
    """Raise RuntimeError during a capture. Called where tables or kernels must be made, which a graph cannot hold."""
    if is_capturing():
        raise RuntimeError(
            "a step can be captured in a graph only after one was taken outside it, with the same kind of parameters, "
            "settings and gradients, their alignment in memory included; take one (on a side stream), then capture"
        )


def check_capture(backend_steps: Sequence[BackendStep], capturable: bool) -> None:
    """Raise RuntimeError if these steps are to be captured in a graph, now or later, and cannot be.

    Args:
        backend_steps: the coming step's.
        capturable: the optimizer's argument.
    """
    on_gpu = [step for step in backend_steps if step.fused_group.device.type != "cpu"]
    if capturable and not all(step.capturable for step in on_gpu):
        raise RuntimeError("capturable=True needs backend='triton'; 'eager' asks the device during a step")
    if on_gpu and is_capturing():
        if not capturable:
            raise RuntimeError(
                "this step would be captured in a graph with its step count and learning rate as they are now; build "
                "the optimizer with capturable=True"
            )
        if not all(step.is_loaded for step in on_gpu):
            check_not_capturing()
