"""`benchmarks/split_patterns.py`: what it counts, on a part of the patterns."""

import sys
from pathlib import Path

import pytest

from hf_lowprec.rounding.fp32_math import bit_pattern

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import split_patterns


@pytest.mark.parametrize(
    ("first", "end", "nans"),
    [
        (0, 0x40000, 0),
        (0x7F7F0000, 0x7F820000, 0x1FFFF),
        (0x7FFF0000, 0x80040000, 0x10000),
        (0x3F7E0000, 0x3F820000, 0),
    ],
    ids=["small", "largest", "negative zero", "one"],
)
def test_patterns_survive(first, end, nans):
    assert split_patterns.check(first, end) == {
        "patterns": end - first,
        "nans": nans,
        "changed": 0,
        "not nearest": 0,
    }


def test_it_sees_what_is_lost(monkeypatch):
    """Ties to even need a remainder of 32768, which 16 bits hold as -32768."""

    def to_even(master):

        pattern = bit_pattern(master)
        upper = (pattern + (0x7FFF + ((pattern >> 16) & 1))) & -0x10000
        return upper.view(split_patterns.torch.float32), pattern - upper

    monkeypatch.setattr(split_patterns, "split", to_even)
    found = split_patterns.check(0x3F7E0000, 0x3F820000)
    assert found["changed"] == found["not nearest"] == 2  # of four ties, those that went down
