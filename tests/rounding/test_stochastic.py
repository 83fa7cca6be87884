"""Stochastic rounding: equalities over all 65,536 random words where they are cheap, sampling bounds for the mean.

With `f` the low 16 bits of an FP32 pattern, the value lies `f / 65536` of the way to its neighbour away from zero, so
exactly `f` of the 65,536 random words must round away.
"""

import pytest
import torch

from hf_lowprec.rounding import round_stochastic
from tests.support.rounding.fp32_patterns import NANS, floats, patterns

WORDS = 1 << 16
ALL_WORDS = torch.arange(WORDS, dtype=torch.int32)
# Upper halves: ones, ends of binades, both signs, zeros, subnormals, the smallest normal, the largest finite values.
TOPS = [0x3F80, 0x3F81, 0x3FFF, 0xBF80, 0xBFFF, 0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x807F, 0x0080, 0x4234, 0xC9AB]
TOPS += [0x7F7E, 0x7F7F, 0xFF7E, 0xFF7F]
FRACTIONS = [0, 1, 2, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xDEAD, 0xFFFE, 0xFFFF]


def one(pattern: int) -> torch.Tensor:
    return floats(torch.tensor([pattern]))


@pytest.mark.parametrize("top", TOPS, ids=hex)
def test_exactly_the_fraction_of_all_words_rounds_away(top):
    for fraction in FRACTIONS:
        rounded = patterns(round_stochastic(one(top * WORDS + fraction).expand(WORDS), ALL_WORDS))
        away = rounded == (top + 1) * WORDS
        assert torch.equal(rounded[~away], torch.full_like(rounded[~away], top * WORDS)), hex(fraction)
        assert away.sum().item() == fraction


@pytest.mark.parametrize("fraction", FRACTIONS, ids=hex)
def test_every_bf16_pattern_adds_the_word_and_truncates(fraction):
    """With words around the one that carries; values that BF16 represents, infinities and NaN never change."""
    pattern = torch.arange(WORDS) * WORDS + fraction
    value = floats(pattern)
    finite = value.isfinite()
    for word in {0, 0xFFFF, max(0xFFFF - fraction, 0), min(WORDS - fraction, 0xFFFF)}:
        rounded = round_stochastic(value, torch.full((WORDS,), word, dtype=torch.int32))
        expected = (pattern + word) // WORDS * WORDS
        assert torch.equal(patterns(rounded[finite]), expected[finite])
        assert torch.equal(rounded.isnan(), value.isnan())
        assert torch.equal(patterns(rounded[value.isinf()]), pattern[value.isinf()])


@pytest.mark.parametrize("pattern", NANS, ids=hex)
def test_nan_of_any_payload_stays_nan_for_every_word(pattern):
    rounded = round_stochastic(one(pattern).expand(WORDS), ALL_WORDS)
    assert rounded.isnan().all()
    assert rounded.to(torch.bfloat16).isnan().all()
