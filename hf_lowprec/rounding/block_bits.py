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


def elements_of_words(words: Tensor) -> Tensor:
    """The places of the elements whose bits are set in contiguous `words`, ascending; int64 of shape (elements)."""
    masks = 1 << torch.arange(8, dtype=torch.uint8, device=words.device)
    # In bytes, the least of a word first: a fourth of the memory that integers would take.
    return (words.view(-1).view(torch.uint8).unsqueeze(1) & masks).flatten().nonzero().flatten()
