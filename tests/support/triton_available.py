"""Run Triton's kernels in a test: on a GPU, else in the interpreter, else skip the test."""

from importlib import metadata

import pytest
import torch
from packaging.version import Version

quiet_interpreter = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
"""Ignores what NumPy, with which the interpreter computes, says about overflows, NaN and divisions by zero."""


def rarely_on_triton(fixture: str = "backend") -> pytest.MarkDecorator:
    """Mark a test of the short suite that leaves `triton`, whose interpreter is slow, to other tests."""
    others = ["native"] if fixture == "other" else ["eager", "native"]
    return pytest.mark.parametrize(
        fixture, [*others, pytest.param("triton", marks=pytest.mark.every_case)], indirect=True
    )


class InPlaceOfAKernel:
    """Base of classes that stand for a Triton function in a test: the backend compiles what it will launch."""

    def warmup(self, *tables, **options):
        """Nothing, as in the interpreter."""


def require_triton() -> None:
    """Skip the calling test unless Triton's kernels can run here."""
    # The interpreter of Triton 3.6 does not go with NumPy 2.4 and later; its compiler is in order.
    interpreted = "3.7" if Version(metadata.version("numpy")) >= Version("2.4") else "3.6"
    pytest.importorskip("triton", minversion=None if torch.cuda.is_available() else interpreted)


def device_of(backend: str) -> str:
    """The device whose tensors a test hands to the backend: the GPU for `triton` if there is one, else the CPU."""
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
