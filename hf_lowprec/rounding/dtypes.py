"""The 16-bit formats, and the names of dtypes in messages."""

import torch

LOW_PRECISION_DTYPES = (torch.bfloat16, torch.float16)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module: `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")
