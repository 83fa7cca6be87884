"""Counter-based random bits: a pure function of (seed, step, parameter index, role, global element index).

No generator state exists, so replicas that share a seed draw the same bits without communicating (Ozkara et al.,
arXiv:2502.20566), a sharded tensor draws the bits of the full one, and resuming needs no RNG file.

A *role* says what a parameter's bits are for (0 the weight or its compensation, then one per state). Three roles share
one 32-bit word per element. With `H` and `L` its halves they get `H`, `L ^ H` and `L ^ (H >> 1)`: uniform, and any
two of them independent, since `H -> H ^ (H >> 1)` is a bijection. That is all that rounding different quantities
needs, and a word costs more than a rounding.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def _int32(pattern: int) -> int:
    return pattern - (1 << 32) if pattern >= 1 << 31 else pattern


# Two multiplications make a 32-bit bijection of low avalanche bias (Wellons, "Prospecting for Hash Functions", 2018).
_MULTIPLY_1 = _int32(0x7FEB352D)
_MULTIPLY_2 = _int32(0x846CA68B)
GOLDEN = _int32(0x9E3779B9)
"""The odd number nearest to 2³² divided by the golden ratio, as int32."""


def _mix(word: Tensor) -> Tensor:
    word = (word ^ ((word >> 16) & 0xFFFF)) * _MULTIPLY_1
    word = (word ^ ((word >> 15) & 0x1FFFF)) * _MULTIPLY_2
    return word ^ ((word >> 16) & 0xFFFF)


def weyl(index: Tensor, key0: Tensor | int) -> Tensor:
    """The Weyl sequence `index · GOLDEN + key0`; a renderer that walks through indices only adds."""
    if has_torch_function((index, key0)):
        return handle_torch_function(weyl, (index, key0), index, key0)
    return index * GOLDEN + key0


def random_word(index: Tensor, key0: Tensor | int, key1: Tensor | int) -> Tensor:
    """32 random bits per element: a keyed Weyl sequence through two multiplications, the key's other half between them.

    Args:
        index: int32 tensor, the low word of the global element index.
        key0: first half of the step's key (int32).
        key1: second half of the step's key (int32).

    Returns:
        int32 tensor of `index`'s shape, every bit uniform.
    """
    word = weyl(index, key0)
    word = (word ^ ((word >> 16) & 0xFFFF)) * _MULTIPLY_1
    word = word ^ ((word >> 15) & 0x1FFFF) ^ key1
    return word * _MULTIPLY_2


def lane(word: Tensor, role: int) -> Tensor:
    """The 16 bits of `word` that belong to `role`, as int32 in [0, 65536)."""
    # The low half of a product is badly mixed by itself; a role sees it only under bits of the high half.
    high = (word >> 16) & 0xFFFF
    if role % 3 == 0:
        return high
    return (word ^ (high if role % 3 == 1 else high >> 1)) & 0xFFFF


def word_of(role: int) -> int:
    """Which of a parameter's random words holds the bits of `role`."""
    return role // 3


def stream_keys(seed: int, parameter: int, word: int) -> tuple[int, int]:
    """The 64-bit key of one parameter's word `word` (see `word_of`), as two int32; constant over a run."""
    digest = hashlib.blake2b(f"{seed}/{parameter}/{word}".encode(), digest_size=8).digest()
    return _int32(int.from_bytes(digest[:4], "little")), _int32(int.from_bytes(digest[4:], "little"))


def step_keys(stream0: Tensor, stream1: Tensor, step: Tensor, index_high: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of one optimizer step; all int32 tensors that broadcast.

    Args:
        stream0: first halves of `stream_keys`.
        stream1: their second halves.
        step: counted from 1, the low 32 bits of it.
        index_high: the high word of the global element index.

    Returns:
        `key0` and `key1` for `random_word`.
    """
    key0 = _mix(stream0 + step * GOLDEN)
    return key0, _mix(stream1 ^ key0) ^ _mix(index_high)


def random_bits(*, seed: int, step: int, parameter: int, role: int, index: Tensor) -> Tensor:
    """The definition of the random bits; backends only reorganise it.

    Args:
        seed: any integer.
        step: the parameter's step count, from 1; bits repeat after 2³² steps.
        parameter: the parameter's position in the optimizer, from the `first_parameter` of its group on.
        role: 0 for the weight or its compensation, then one per state (see each algorithm's `states`).
        index: int64 tensor of global element indices.

    Returns:
        int32 tensor of `index`'s shape, uniform in [0, 65536).
    """
    streams = torch.tensor(stream_keys(seed, parameter, word_of(role)), dtype=torch.int32, device=index.device)
    high = (index >> 32).to(torch.int32)
    low = torch.tensor(_int32(step & 0xFFFFFFFF), dtype=torch.int32, device=index.device)
    keys = step_keys(streams[0], streams[1], low, high)
    return lane(random_word(index.to(torch.int32), *keys), role)
