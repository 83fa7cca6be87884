"""Compare tensors bit for bit."""

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_numbers(tensor: Tensor, expected: Tensor) -> bool:
    """Compare shape, dtype and bits, on whatever devices; a NaN equals any other NaN."""
    if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
        return False
    tensor, expected = tensor.detach().cpu().contiguous(), expected.detach().cpu().contiguous()
    integer = _INTEGERS[tensor.element_size()]
    same_bits = tensor.view(integer) == expected.view(integer)
    return bool((same_bits | (tensor.isnan() & expected.isnan())).all())
