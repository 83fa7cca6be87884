"""The 8-bit format of states in NumPy: tables of all codes' patterns, and a comparison of integers to round.

An FP32 pattern is the integer that an FP32 number's 32 bits are; those of nonnegative numbers are in their order.
Between two neighbouring codes rounding is linear in the pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

OCTAVE = 1 << 23
"""The distance of the patterns of a number and its double."""
EIGHTH, QUARTER = OCTAVE // 8, OCTAVE // 4
"""The distances of the patterns of neighbours with 3 and with 2 mantissa bits."""
QUIET_NAN = 0x7FC00000
DRAWS = 1 << 16
"""How many values the random number of an element has."""


@dataclass(frozen=True)
class Format:
    """A window of octaves whose upper end is the octave of the block's largest element.

    Attributes:
        fine_octaves: the upper octaves, of 8 codes each.
        coarse_octaves: the octaves below, of 4 codes each; the lowest number of all has code 0, which stands for zero.
        signed: whether the highest bit is a sign.
    """

    fine_octaves: int
    coarse_octaves: int
    signed: bool

    @property
    def codes(self) -> int:
        """The number of codes without sign."""
        return 4 * self.coarse_octaves + 8 * self.fine_octaves

    @property
    def first_fine(self) -> int:
        """The code of the lowest number that has 3 mantissa bits."""
        return 4 * self.coarse_octaves

    @property
    def smallest_scale(self) -> int:
        """The lowest scale: a window below it would reach beyond zero."""
        return self.fine_octaves + self.coarse_octaves - 1


FIRST_MOMENT = Format(fine_octaves=10, coarse_octaves=12, signed=True)
SECOND_MOMENT = Format(fine_octaves=24, coarse_octaves=16, signed=False)


def patterns(values: npt.NDArray[np.float32]) -> Integers:
    """The FP32 patterns of `values`; every NaN has the same."""
    found = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.int64)
    return np.where(np.isnan(values), QUIET_NAN, found)


def numbers(pattern: Integers) -> npt.NDArray[np.float32]:
    """The FP32 numbers of these patterns."""
    return pattern.astype(np.uint32).view(np.float32)


@cache
def code_patterns(format: Format, scale: int) -> Integers:
    """The patterns of all codes without sign under `scale`, ascending."""
    lowest_fine = (scale + 1 - format.fine_octaves) * OCTAVE
    fine = lowest_fine + EIGHTH * np.arange(8 * format.fine_octaves, dtype=np.int64)
    coarse = lowest_fine - QUARTER * np.arange(4 * format.coarse_octaves, 0, -1, dtype=np.int64)
    table = np.concatenate([coarse, fine])
    table[0] = 0
    return table


def block_scale(format: Format, block: npt.NDArray[np.float32]) -> int:
    """The exponent of the lowest number of 3 mantissa bits that is not below the block's largest."""
    largest = int((patterns(block) % (1 << 31)).max())
    up = -(-largest // EIGHTH) * EIGHTH
    return max(up // OCTAVE, format.smallest_scale)


def skew(draw: Integers, relative_distance: float) -> Integers:
    """9/32 · d · r(1-r) in units of 2⁻²⁰, rounded down in three places; `draw` is r in units of 2⁻¹⁶."""
    product = draw * (DRAWS - draw) // (1 << 12)
    return (product + product // 8) // round(4 / relative_distance)


def encode_block(format: Format, block: npt.NDArray[np.float32], draw: Integers) -> tuple[Integers, int]:
    """The codes of a block, and its scale; `draw` is uniform in [0, 65536)."""
    scale = block_scale(format, block)
    table = code_patterns(format, scale)
    pattern = patterns(block)
    sign, magnitude = pattern >> 31, pattern % (1 << 31)
    below = np.searchsorted(table, magnitude, side="right") - 1  # the code at or below the magnitude
    is_fine = below >= format.first_fine
    # The place between two codes and the random number, in units of 2⁻²⁰ of the codes' distance. The random number is
    # in the middle of its interval, whose length is 16.
    place = (magnitude - table[below]) // np.where(is_fine, 1, 2)
    random = 16 * draw + 8
    if not format.signed:
        random = random + np.where(is_fine, skew(draw, 1 / 8), skew(draw, 1 / 4))
    code = below + (place + random >= EIGHTH)
    # Below the smallest code: second moments are raised to it, others become zero or the smallest code, such that the
    # number is kept on average. The products are exact in FP64.
    small = below == 0
    if format.signed:
        up = numbers(magnitude).astype(np.float64) * (2 * DRAWS) > numbers(table[1:2]).astype(np.float64) * (
            2 * draw + 1
        )
        code = np.where(small, up, code)
    else:
        code = np.where(small, magnitude > 0, code)
    return code + sign * format.codes * format.signed, scale


def encode(format: Format, blocks: npt.NDArray[np.float32], draw: Integers) -> tuple[Integers, Integers]:
    """The codes of blocks, of shape (blocks, elements), and the scale of each, of shape (blocks)."""
    found = [encode_block(format, *pair) for pair in zip(blocks, draw, strict=True)]
    return np.stack([codes for codes, _ in found]), np.array([scale for _, scale in found], np.int64)


def decode(format: Format, codes: Integers, scales: Integers) -> npt.NDArray[np.float32]:
    """The numbers of `codes`, of shape (blocks, elements), under `scales`, of shape (blocks)."""
    tables = np.stack([code_patterns(format, scale) for scale in scales.tolist()])
    magnitude = np.take_along_axis(tables, codes % format.codes, axis=1)
    return numbers(magnitude + (codes // format.codes << 31))
