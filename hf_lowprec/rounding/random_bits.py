"""Counter-based random bits: a pure function of seed, step, parameter number, role and global element index.

There is no generator state. So replicas that share a seed draw the same bits without communication (Ozkara et al.,
arXiv:2502.20566), a shard draws the bits that the full tensor draws there, and a resumed run needs no saved state.

The bits are computed in three stages: `stream_keys` once per parameter and run, `step_keys` once per step, and
`random_word` for each element.

A *role* says what a parameter's bits are for: 0 is the weight or its compensation, the others are one per state. Three
roles share one 32-bit random word per element, because a word costs more than a rounding. With `H` and `L` the upper
and the lower 16 bits of the word, the roles get `H`, `L ^ H` and `L ^ (H >> 1)`. Each is uniform, and any two are
independent, since `H -> H ^ (H >> 1)` is a bijection. Rounding different quantities needs no more.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

_Int32 = Any
"""A number or an int32 tensor. Numbers cost a hundredth of the time of small tensors."""


def _int32(pattern: int) -> int:
    """Return the int32 with the bits of an unsigned 32-bit `pattern`."""
    return pattern - (1 << 32) if pattern >= 1 << 31 else pattern


# These multipliers give a 32-bit bijection of low avalanche bias (Wellons, "Prospecting for Hash Functions", 2018).
_MULTIPLIER_1 = _int32(0x7FEB352D)
_MULTIPLIER_2 = _int32(0x846CA68B)
GOLDEN = _int32(0x9E3779B9)
"""The odd number nearest to 2³² divided by the golden ratio, as int32."""


def _wrapped(value: _Int32) -> _Int32:
    """Return `value` modulo 2³², as int32. Tensors wrap by themselves."""
    return _int32(value & 0xFFFFFFFF) if isinstance(value, int) else value


def _mix(word: _Int32) -> _Int32:
    """Apply a bijection in which every input bit affects every output bit. Masks make the shifts logical."""
    word = _wrapped((word ^ ((word >> 16) & 0xFFFF)) * _MULTIPLIER_1)
    word = _wrapped((word ^ ((word >> 15) & 0x1FFFF)) * _MULTIPLIER_2)
    return word ^ ((word >> 16) & 0xFFFF)


def weyl(index: Tensor, key0: Tensor | int) -> Tensor:
    """Return the Weyl sequence `index · GOLDEN + key0`.

    It is a separate function because loops over indices can compute it by addition (`CRenderer.weyl`).
    """
    if has_torch_function((index, key0)):
        return handle_torch_function(weyl, (index, key0), index, key0)
    return index * GOLDEN + key0


def random_word(index: Tensor, key0: Tensor | int, key1: Tensor | int) -> Tensor:
    """Return 32 random bits per element: a Weyl sequence offset by `key0`, hashed with two multiplications and `key1`.

    Args:
        index: int32 tensor, the low 32 bits of the global element index.
        key0: first key of the step (int32).
        key1: second key of the step (int32).

    Returns:
        int32 tensor of the shape of `index`, every bit uniform.
    """
    word = weyl(index, key0)
    word = (word ^ ((word >> 16) & 0xFFFF)) * _MULTIPLIER_1
    word = word ^ ((word >> 15) & 0x1FFFF) ^ key1
    return word * _MULTIPLIER_2


def lane(word: Tensor, role: int) -> Tensor:
    """Return the 16 bits of `word` that belong to `role`, as int32 in [0, 65536)."""
    # The low bits of a product are badly mixed, so a role gets them only combined with high bits.
    high = (word >> 16) & 0xFFFF
    if role % 3 == 0:
        return high
    return (word ^ (high if role % 3 == 1 else high >> 1)) & 0xFFFF


def word_of(role: int) -> int:
    """Return the number of the random word that holds the bits of `role`."""
    return role // 3


def stream_keys(seed: int, parameter: int, word: int) -> tuple[int, int]:
    """Return two int32 keys for random word `word` (see `word_of`) of a parameter; they are the same in all steps."""
    digest = hashlib.blake2b(f"{seed}/{parameter}/{word}".encode(), digest_size=8).digest()
    return _int32(int.from_bytes(digest[:4], "little")), _int32(int.from_bytes(digest[4:], "little"))


def step_keys(stream0: _Int32, stream1: _Int32, step: _Int32, index_high: _Int32) -> tuple[_Int32, _Int32]:
    """Return the keys of one optimizer step. Arguments are numbers, or int32 tensors that broadcast.

    Args:
        stream0: the first of the `stream_keys`.
        stream1: the second.
        step: the low 32 bits of the parameter's step count, which starts at 1.
        index_high: the high 32 bits of the global element index.

    Returns:
        `key0` and `key1` for `random_word`.
    """
    key0 = _mix(_wrapped(stream0 + step * GOLDEN))
    return key0, _mix(stream1 ^ key0) ^ _mix(index_high)


def random_bits(*, seed: int, step: int, parameter: int, role: int, index: Tensor) -> Tensor:
    """Return the random bits of one role. This function defines them; the step computes the same bits in stages.

    Args:
        seed: any integer.
        step: the parameter's step count, which starts at 1; bits repeat after 2³² steps.
        parameter: the parameter's number: its position in the optimizer, counted from its group's `first_parameter`.
        role: 0 for the weight or its compensation, the others one per state (see each algorithm's `states`).
        index: tensor of global element indices: int64, or int32 if all are below 2³¹.

    Returns:
        int32 tensor of the shape of `index`, uniform in [0, 65536).
    """
    streams = stream_keys(seed, parameter, word_of(role))
    high = 0 if index.dtype == torch.int32 else (index >> 32).to(torch.int32)
    key0, key1 = step_keys(*streams, step, high)
    return lane(random_word(index.to(torch.int32), key0, key1), role)
