"""Skip a test where Triton's kernels cannot run: neither compiled on a GPU nor in the interpreter."""

import pytest
import torch


def require_triton() -> None:
    """Skip the calling test unless Triton's kernels can run here."""
    # The interpreter of Triton 3.6 does not go with NumPy 2.4 and later; its compiler is in order.
    minversion = None if torch.cuda.is_available() else "3.7"
    pytest.importorskip("triton", minversion=minversion)
