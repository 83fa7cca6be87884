"""Averages in 8 bits: small floats under an exponent that 32 neighbouring elements share.

A block is 32 consecutive elements of a row, and its scale is the exponent of its largest element. A code is an
element's FP32 pattern below that exponent, rounded stochastically to 3 mantissa bits, or 2 if it is far below. So
encoding is the rounding of `stochastic.py` with fewer bits.

| | codes of 3 mantissa bits | codes of 2 mantissa bits | below |
| --- | --- | --- | --- |
| signed | the upper 10 octaves | 12 octaves | zero or the smallest code, at random |
| nonnegative | the upper 24 octaves | 16 octaves | the smallest code |

A second moment that is not zero never becomes zero, which would make the step of its element explode.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

BLOCK = 32
"""Elements that share a scale."""


def scale_shape(shape: torch.Size) -> torch.Size:
    """Return the shape of the scales of codes of `shape`."""
    return torch.Size((*shape[:-1], *(length // BLOCK for length in shape[-1:])))


_MAGNITUDE = 0x7FFFFFFF
_SIGN = -0x80000000
_NAN = 0x7FC00000
_MANTISSA_BITS = 23
_SHIFT = 20
"""Bits of an FP32 mantissa that a code of 3 mantissa bits lacks."""
_STEP = 1 << _SHIFT
"""The distance of the patterns of neighbouring codes of 3 mantissa bits."""


class _Window(NamedTuple):
    """The octaves below a block's exponent that have codes: `fine` ones of 3 mantissa bits, then `coarse` ones of 2."""

    fine: int
    coarse: int

    @property
    def first_fine(self) -> int:
        """The code of the smallest number with 3 mantissa bits."""
        return 4 * self.coarse

    @property
    def smallest_scale(self) -> int:
        """The smallest exponent for which the pattern of no code is negative."""
        return self.fine + self.coarse - 1

    def base(self, scale: Tensor) -> Tensor:
        """Return the pattern of the smallest number with 3 mantissa bits."""
        return (scale + (1 - self.fine)) << _MANTISSA_BITS


_SIGNED = _Window(10, 12)
_NONNEGATIVE = _Window(24, 16)


def block_max(value: Tensor) -> Tensor:
    """Replace each integer with the largest one in its block of 32.

    Args:
        value: int32 tensor of whole blocks, none of its elements negative.

    Returns:
        int32 tensor of the same shape.
    """
    if has_torch_function_unary(value):
        return handle_torch_function(block_max, (value,), value)
    return value.view(-1, BLOCK).amax(1, keepdim=True).expand(-1, BLOCK).reshape(value.shape)


def encode(value: Tensor, bits: Tensor, nonnegative: bool) -> tuple[Tensor, Tensor]:
    """Encode whole blocks.

    Rounding is unbiased for signed numbers. For second moments it is unbiased for their fourth root, so that their
    inverse square root is right on average over the steps of an optimizer, see `_skew`.

    Args:
        value: FP32 tensor of whole blocks. Infinities and NaN are kept, and the rest of their block is lost.
        bits: int32 tensor of the same shape, uniform in [0, 65536).
        nonnegative: whether no element is negative.

    Returns:
        `(code, scale)`: int32 tensors of the same shape, of values that 8 bits hold. All elements of a block have the
        same scale.
    """
    window = _NONNEGATIVE if nonnegative else _SIGNED
    # Not `quiet_nan`, which C leaves out: of NaNs that arithmetic produces, the sign and the payload differ between
    # processors, and the scale would come from them.
    pattern = torch.where(value != value, _NAN, value.view(torch.int32))
    magnitude = pattern if nonnegative else pattern & _MAGNITUDE
    scale = (block_max(magnitude) + (_STEP - 1)) >> _MANTISSA_BITS  # the largest element may be rounded up
    scale = torch.clamp_min(scale, window.smallest_scale)
    base = window.base(scale)
    offset = magnitude - base
    # Codes of 2 mantissa bits are twice as far apart, so negative offsets are halved.
    place = torch.clamp_min(offset, offset >> 1) + ((window.first_fine << _SHIFT) + (1 << (_SHIFT - 17)))
    noise = bits << (_SHIFT - 16)
    if nonnegative:
        code = (place + noise + _skew(bits, offset)) >> _SHIFT
        return torch.clamp_min(code, torch.clamp_max(magnitude, 1)), scale
    code = torch.clamp_min((place + noise) >> _SHIFT, 1)
    # (bits + 1/2) · 2⁻²³, and a number with which it is uniform between zero and the smallest code.
    uniform = (bits | 0x3F800000).view(torch.float32) - (1 - 2.0**-24)
    smallest = (base - ((window.coarse << _MANTISSA_BITS) - 2 * _STEP)).view(torch.float32) * 2.0**7
    code = torch.where(uniform * smallest >= magnitude.view(torch.float32), 0, code)
    return code | ((pattern >> 24) & 0x80), scale


def _skew(bits: Tensor, offset: Tensor) -> Tensor:
    """Return the skew of the random numbers with which second moments are rounded.

    Each rounding scatters a moment by a relative variance q; a moment that averages over 1/(1-β2) steps is scattered by
    s² = q/2(1-β2). So the mean of 1/√v is too large by 3/8 s². If each rounding adds 3/8 q to the moment, it settles
    higher by just that much, whatever β2 is. Rounding up with probability f + c·d·f(1-f) does so, where f is the place
    between two codes at a relative distance d, and c = 3/8 · 1/(2 ln 2), about 9/32, since q is d²f(1-f).

    Returns:
        `9/32 · d · r(1-r)` in units of `_STEP`, where r is the random number between 0 and 1.
    """
    product = (bits * (65536 - bits)) >> 12
    product = product + (product >> 3)
    return product >> (5 + (offset >> 31))


def intended_bias(variance: Tensor, value: Tensor) -> Tensor:
    """Return the mean by which second moments are rounded up on purpose, see `_skew`.

    Args:
        variance: the variance of their rounding.
        value: the moments before rounding.
    """
    _, exponent = torch.frexp(value)
    return 9 / 32 * variance / torch.ldexp(torch.ones_like(value), exponent - 1)


def code_spacing(code: Tensor, scale: Tensor, nonnegative: bool) -> Tensor:
    """Return the distance from numbers to the next smaller magnitude that has a code under the same scale.

    For zero and the smallest number, it is the distance to the next larger one.

    Args:
        code: see `decode`.
        scale: see `decode`.
        nonnegative: see `decode`.
    """
    magnitude = code & (0xFF if nonnegative else 0x7F)
    larger = torch.where(magnitude > 2, magnitude, 2)
    return decode(larger, scale, nonnegative) - decode(larger - 1, scale, nonnegative)


def decode(code: Tensor, scale: Tensor, nonnegative: bool) -> Tensor:
    """Decode what `encode` has returned.

    Args:
        code: int32 tensor, of values between 0 and 255, or the same as signed bytes.
        scale: int32 tensor of the same shape.
        nonnegative: the same as for encoding.

    Returns:
        FP32 tensor of the same shape.
    """
    window = _NONNEGATIVE if nonnegative else _SIGNED
    number = code & (0xFF if nonnegative else 0x7F)
    zero = window.base(scale) - (window.first_fine << (_SHIFT + 1))  # the pattern that code 0 would have
    # Codes of 2 mantissa bits are twice as far apart, so they count twice.
    pattern = ((number + torch.clamp_max(number, window.first_fine)) << _SHIFT) + zero
    pattern = torch.where(number == 0, 0, pattern)
    if not nonnegative:
        pattern = pattern | ((code << 24) & _SIGN)
    return pattern.view(torch.float32)
