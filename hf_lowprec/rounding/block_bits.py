"""One bit for each element, in words of the 32 elements of a block."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from hf_lowprec.rounding.block_floats import BLOCK


def block_bits(flags: Tensor) -> Tensor:
    """The bits of each block of 32 consecutive elements as a word, in place of each of them.

    Args:
        flags: int32 tensor of whole blocks, of zeros and ones.

    Returns:
        int32 tensor of the same shape. The element k of a block is the bit k of its words.
    """
    if has_torch_function_unary(flags):
        return handle_torch_function(block_bits, (flags,), flags)
    places = torch.arange(BLOCK, dtype=torch.int32, device=flags.device)
    words = (flags.view(-1, BLOCK) << places).sum(1, keepdim=True, dtype=torch.int32)  # wraps around
    return words.expand(-1, BLOCK).reshape(flags.shape)


def bits_of_words(words: Tensor) -> Tensor:
    """The flags of all elements, bool, of the words of blocks; the last dimension is 32 times as long."""
    places = torch.arange(BLOCK, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> places) & 1).bool().flatten(-2)
