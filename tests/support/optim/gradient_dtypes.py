"""Gradients in another dtype than that of their parameter."""

from collections.abc import Sequence

import pytest
import torch


def allow_gradients_in(dtype: torch.dtype | None, params: Sequence[torch.Tensor]) -> None:
    """Let gradients of the parameters have `dtype`, or any for None; skip the calling test where torch cannot (2.9)."""
    for param in params:
        if dtype != param.dtype:
            if not hasattr(param, "grad_dtype"):
                pytest.skip(f"torch {torch.__version__} keeps gradients in the dtype of their parameter")
            param.grad_dtype = dtype
