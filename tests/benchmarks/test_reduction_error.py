"""The additions that the error table simulates, by hand; and the size of our error."""

import pytest
import torch

from benchmarks.reduction_error import errors, gradients, ring, tree


def versions(*ranks: list[float], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.tensor(ranks, dtype=dtype)


def test_a_ring_rounds_at_each_hop_in_its_order():
    # From 256 on BF16 has even numbers only, and a tie goes to the multiple of four: 256 + 1 = 256, 258 + 1 = 260.
    # Piece 0 is added up in the order of ranks 1, 2, 0: (1 + 1) + 256; piece 1 in that of 2, 0, 1; piece 2 in 0, 1, 2.
    added = versions([256, 256, 258], [1, 1, 1], [1, 1, 1])
    assert ring(added).tolist() == [258, 256, 260]
    assert ring(added.float()).tolist() == [258, 258, 260]


def test_a_ring_of_more_than_one_element_per_piece():
    added = versions([256, 258, 3, 256], [1, 1, 1, 1])
    # One addition each, so only which elements meet can be wrong.
    assert ring(added).tolist() == [256, 260, 4, 256]


def test_a_tree_rounds_at_each_node():
    added = versions([256.0], [1], [1], [1])
    assert tree(added).tolist() == [258]  # (256 + 1) + (1 + 1)
    # Rank 0 is added last to piece 0, then one earlier for each piece.
    assert ring(added.repeat(1, 4)).tolist() == [260, 260, 256, 256]


def test_ours_has_the_error_of_one_rounding():
    """The root mean square of a significand's rounding error to 8 bits is 2⁻⁸/√3 of 1.4 on average: 1.6e-3."""
    found = errors(gradients(64, 4096, 1.0))
    assert found["ours"] == pytest.approx(1.65e-3, rel=0.05)
    assert found["BF16 ring"] > 3 * found["ours"]
    assert found["ours, before the rounding to BF16"] < 1e-7
