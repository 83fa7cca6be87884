"""Whether Triton's kernels can run on this machine, compiled on a GPU or interpreted without one."""

import pytest
import torch


def require_triton() -> None:
    """Skip unless they can."""
    # The interpreter of Triton 3.6 does not go with NumPy 2.4 and later; its compiler is in order.
    minversion = None if torch.cuda.is_available() else "3.7"
    pytest.importorskip("triton", minversion=minversion)
