"""The low-precision dtypes, and the names of dtypes in messages."""

import torch

LOW_PRECISION_DTYPES = (torch.bfloat16, torch.float16)
"""The floating-point dtypes of 16 bits."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module, as `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")
