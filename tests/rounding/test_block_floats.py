"""States in 8 bits: equal to a reference in NumPy integers bit for bit, and equalities over all 65,536 draws."""

import math

import pytest
import torch

from hf_lowprec.rounding.block_floats import BLOCK, block_max, decode, encode
from tests.support.rounding import block_floats as reference
from tests.support.rounding.block_floats import DRAWS, EIGHTH, FIRST_MOMENT, OCTAVE, QUARTER, SECOND_MOMENT, Format
from tests.support.rounding.fp32_patterns import INF, LARGEST, NANS, floats

FP32, INT32 = torch.float32, torch.int32
FORMATS = pytest.mark.parametrize("format", [FIRST_MOMENT, SECOND_MOMENT], ids=["signed", "nonnegative"])
ALL_DRAWS = torch.arange(DRAWS, dtype=INT32)


def random_patterns(format: Format, low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Patterns in [low, high), of either sign if the format is signed."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(low, high, shape, generator=generator)
    return magnitude + torch.randint(0, 2, shape, generator=generator) * format.signed * 2**31


def random_draws(*shape: int) -> torch.Tensor:
    return torch.randint(0, DRAWS, shape, dtype=INT32, generator=torch.Generator().manual_seed(1))


def assert_as_reference(format: Format, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, scales and what they decode to are the reference's for small, large and random draws; returns the last."""
    assert blocks.shape[1] == BLOCK
    zeros = torch.zeros(blocks.shape, dtype=INT32)
    for draw in (zeros, zeros + DRAWS // 2, zeros + DRAWS - 1, random_draws(*blocks.shape)):
        code, scale = encode(blocks, draw, nonnegative=not format.signed)
        expected_code, expected_scale = reference.encode(format, blocks.numpy(), draw.long().numpy())
        assert torch.equal(scale, torch.from_numpy(expected_scale).int()[:, None].expand(blocks.shape))
        assert torch.equal(code, torch.from_numpy(expected_code).int())
        assert torch.equal(code.to(torch.uint8).int(), code)  # eight bits hold them
        decoded = decode(code, scale, nonnegative=not format.signed)
        expected = torch.from_numpy(reference.decode(format, expected_code, expected_scale))
        assert torch.equal(decoded.isnan(), expected.isnan())
        assert torch.equal(decoded.view(INT32)[~decoded.isnan()], expected.view(INT32)[~expected.isnan()])
        # States are loaded as signed bytes.
        assert torch.equal(decode(code.to(torch.int8).int(), scale, not format.signed).view(INT32), decoded.view(INT32))
    return code, decoded


def near_values(format: Format, octaves: float) -> torch.Tensor:
    """Down from every exponent; the widest leave the window."""
    highest = torch.arange(255)[:, None] * OCTAVE + OCTAVE // 3
    below = random_patterns(format, 0, int(octaves * OCTAVE), 255, BLOCK)
    return (highest - below % 2**31).clamp(0) + below // 2**31 * 2**31


MAGNITUDES = {
    "all at once": lambda format: random_patterns(format, 0, INF, 256, BLOCK),
    **{f"{n} octaves": lambda format, n=n: near_values(format, n) for n in (0.01, 3, 12, 30, 60)},
    # Below the lowest scale the window no longer follows the block's largest element.
    **{
        f"below 2**{n}": lambda format, n=n: random_patterns(format, 0, 1 << n, 64, BLOCK)
        for n in (1, 12, 21, 23, 24, 28)
    },
}


@FORMATS
@pytest.mark.parametrize("magnitudes", MAGNITUDES)
def test_blocks_of_random_magnitudes(format, magnitudes):
    assert_as_reference(format, floats(MAGNITUDES[magnitudes](format)))


@FORMATS
def test_the_edges_of_all_codes(format):
    """Each code of a window, and what lies one pattern below and above it."""
    scale = 127
    table = torch.from_numpy(reference.code_patterns(format, scale))
    near = torch.cat([table - 1, table, table + 1]).clamp(0, table[-1])
    near = torch.cat([near, near[: -len(near) % (BLOCK - 1)]]).view(-1, BLOCK - 1)
    blocks = torch.cat([table[-1].expand(len(near), 1), near], dim=1)  # the largest in each block
    code, _ = assert_as_reference(format, floats(blocks))
    assert code.unique().tolist() == list(range(format.codes))


@FORMATS
def test_zeros(format):
    block = torch.zeros(1, BLOCK)
    assert_as_reference(format, block)
    code, scale = encode(block, torch.full((1, BLOCK), DRAWS - 1, dtype=INT32), nonnegative=not format.signed)
    assert code.eq(0).all()
    assert decode(code, scale, not format.signed).view(INT32).eq(0).all()
    block = floats(random_patterns(format, 0, INF, 8, BLOCK))
    block[:, ::3] = 0.0
    code, decoded = assert_as_reference(format, block)
    assert code[:, ::3].eq(0).all()
    assert decoded[:, ::3].eq(0).all()


def test_a_negative_zero_keeps_its_sign():
    block = torch.tensor([-0.0, 1.0] * (BLOCK // 2)).view(1, BLOCK)
    _, decoded = assert_as_reference(FIRST_MOMENT, block)
    assert torch.equal(decoded.view(INT32), block.view(INT32))


@FORMATS
def test_infinities_and_nan_stay_and_the_rest_of_their_block_is_lost(format):
    special = [math.inf, math.nan, 3.4e38] + [-math.inf] * format.signed
    ordinary = [1.0, 0.0, 1e-3, 1e30]
    block = torch.tensor([[first, *ordinary] + [0.5] * (BLOCK - 5) for first in special])
    _, decoded = assert_as_reference(format, block)
    kept, lost = decoded[:, 0], decoded[:, [1, 3, 5]]
    assert kept[0] == math.inf
    assert kept[1].isnan()
    assert kept[2] in (torch.tensor(0x7F700000, dtype=INT32).view(FP32), math.inf)
    assert not format.signed or kept[3] == -math.inf
    assert decoded[:, 1:].isfinite().all()
    assert decoded[:, 2].eq(0).all()
    # Window's lower end: first moments round to zero or the smallest code, second moments are raised to it.
    window = format.fine_octaves + format.coarse_octaves
    smallest = 1.25 * 2.0 ** (128 - window + 1)
    assert torch.isin(lost.abs(), torch.tensor([0.0, smallest])).all() if format.signed else lost.eq(smallest).all()


@FORMATS
@pytest.mark.parametrize("pattern", NANS, ids=hex)
def test_a_nan_of_any_payload_and_sign_is_a_nan(format, pattern):
    block = torch.ones(1, BLOCK)
    block[0, 5] = floats(torch.tensor(pattern))
    assert block[0, 5].isnan()
    code, decoded = assert_as_reference(format, block)
    assert decoded.isnan().nonzero().tolist() == [[0, 5]]
    assert code[0, 5] == format.first_fine + 8 * (format.fine_octaves - 1) + 4


@FORMATS
def test_the_largest_finite_may_become_infinite_and_nothing_else_does(format):
    largest = torch.full((1, BLOCK), LARGEST)
    _, decoded = assert_as_reference(format, floats(largest))
    assert torch.isin(decoded, torch.tensor([math.inf, 2.0**127 * 1.875])).all()
    representable = torch.full((1, BLOCK), INF - EIGHTH)
    _, decoded = assert_as_reference(format, floats(representable))
    assert torch.equal(decoded, floats(representable))


@FORMATS
def test_codes_have_two_or_three_mantissa_bits(format):
    """The definition in numbers: under the scale of 1.0 ≤ x < 2, the upper octaves have multiples of 1/8."""
    codes = torch.arange(1, format.codes, dtype=INT32)
    value = decode(codes, torch.full_like(codes, 127), nonnegative=not format.signed).double()
    mantissa, exponent = torch.frexp(value)  # between 1/2 and 1
    is_fine = exponent > 1 - format.fine_octaves
    assert is_fine.sum() == 8 * format.fine_octaves
    assert (16 * mantissa % 1 == 0)[is_fine].all()
    assert (8 * mantissa % 1 == 0)[~is_fine].all()
    assert (value.diff() > 0).all()
    assert value[-1] == 1.875
    assert value[0] == 1.25 * 2.0 ** (1 - format.fine_octaves - format.coarse_octaves)


@FORMATS
def test_every_code_under_every_scale_encodes_to_itself(format):
    """For any random number. The first element of a block is the largest that its scale has, so the scale stays."""
    signs = 1 + format.signed
    codes = torch.arange(format.codes * signs, dtype=INT32)
    codes = torch.cat([codes, codes[: -len(codes) % (BLOCK - 1)]]).view(-1, BLOCK - 1)
    scales = torch.arange(format.smallest_scale, 256, dtype=INT32)
    infinity = format.codes - 8
    top = torch.where(scales < 255, format.codes - 1, infinity).int()
    blocks = torch.cat([top[:, None, None].expand(-1, len(codes), 1), codes.expand(len(scales), -1, -1)], dim=2)
    scale = scales[:, None, None].expand(blocks.shape)
    is_nan = (scale == 255) & (blocks % format.codes > infinity)
    blocks = torch.where(is_nan, 0, blocks)
    value = decode(blocks, scale, nonnegative=not format.signed)
    assert not value.isnan().any()
    for draw in (torch.zeros_like(blocks), torch.full_like(blocks, DRAWS - 1), random_draws(*blocks.shape)):
        code, found = encode(value, draw, nonnegative=not format.signed)
        assert torch.equal(found, scale)
        assert torch.equal(code, blocks)


@FORMATS
def test_what_was_decoded_is_never_rounded_again(format):
    """A block whose largest elements have decayed gets a lower scale, under which all others are still exact."""
    shape = (4096, BLOCK)
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, shape, dtype=INT32, generator=generator)
    # Blocks whose largest element is anywhere in the window.
    highest = torch.randint(1, format.codes, (shape[0], 1), generator=generator)
    codes = codes % format.codes % highest + codes // format.codes * format.codes * format.signed
    scale = torch.randint(format.smallest_scale, 255, (shape[0], 1), dtype=INT32, generator=generator).expand(shape)
    value = decode(codes.int(), scale, nonnegative=not format.signed)
    again = decode(*encode(value, random_draws(*shape), not format.signed), nonnegative=not format.signed)
    assert torch.equal(again.view(INT32), value.view(INT32))


def rounded_over_draws(format: Format, patterns: list[int], draws: torch.Tensor = ALL_DRAWS) -> list[torch.Tensor]:
    """Round each number once for each draw, in a block whose largest element is 1.875; FP64 of shape (draws) each."""
    block = torch.zeros(BLOCK)
    block[0], block[1 : 1 + len(patterns)] = 1.875, floats(torch.tensor(patterns))
    shape = (len(draws), BLOCK)
    encoded = encode(block.expand(shape), draws[:, None].expand(shape), nonnegative=not format.signed)
    return list(decode(*encoded, nonnegative=not format.signed).double()[:, 1 : 1 + len(patterns)].unbind(1))


PLACES = (0.0, 2.0**-16, 0.013, 0.25, 0.4999, 0.5, 0.75, 0.987, 1 - 2.0**-16)


def between_two_codes(format: Format, fine: bool) -> list[tuple[int, float]]:
    """Patterns between two codes, in 1.0's octave or in the last of the window, and their places between them."""
    lowest = 0x3F800000 if fine else 0x3F800000 - (format.fine_octaves + format.coarse_octaves - 1) * OCTAVE + QUARTER
    distance = EIGHTH if fine else QUARTER
    offsets = [int(place * distance) // 2 * 2 for place in PLACES]
    return [(lowest + distance + offset, offset / distance) for offset in offsets]


FINE = pytest.mark.parametrize("fine", [True, False], ids=["3 mantissa bits", "2 mantissa bits"])


@pytest.mark.parametrize("sign", [0, 1 << 31], ids=["positive", "negative"])
@FINE
def test_signed_numbers_are_kept_on_average(fine, sign):
    """Random numbers lie in the middle of intervals of 2⁻¹⁶, so probabilities err by half of that at most."""
    numbers, places = zip(*between_two_codes(FIRST_MOMENT, fine), strict=True)
    for rounded, place in zip(rounded_over_draws(FIRST_MOMENT, [n + sign for n in numbers]), places, strict=True):
        values, counts = rounded.abs().unique(return_counts=True)
        away = counts[-1].item() if len(values) == 2 else 0
        assert len(values) == 1 + (place > 0)
        assert abs(away - place * DRAWS) <= 0.5
        assert (rounded < 0).all() == bool(sign)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_signed_numbers_below_the_smallest_code_are_kept_on_average(sign):
    smallest = 1.25 * 2.0 ** (1 - FIRST_MOMENT.fine_octaves - FIRST_MOMENT.coarse_octaves)
    values = sign * smallest * torch.tensor(PLACES)
    numbers = [number % 2**32 for number in values.view(INT32).tolist()]
    for value, rounded in zip(values.double(), rounded_over_draws(FIRST_MOMENT, numbers), strict=True):
        assert torch.isin(rounded, torch.tensor([0.0, sign * smallest], dtype=torch.float64)).all()
        assert abs(rounded.sum() - value * DRAWS) <= 0.5 * smallest


@FINE
def test_second_moments_are_rounded_up_more_often_by_the_documented_skew(fine):
    """The random number r becomes s = r + k r(1-r), with k = 9/32 · d, and the number is rounded up where f + s >= 1.

    So the probability p = 1 - r solves p = f + k p(1-p), which is f + k f(1-f) to first order in k. Counting over draws
    errs by one at most, and the skew, rounded down to units of a sixteenth of a draw, by less than 0.2.
    """
    k = 9 / 32 * (1 / 8 if fine else 1 / 4)
    numbers, places = zip(*between_two_codes(SECOND_MOMENT, fine), strict=True)
    for rounded, place in zip(rounded_over_draws(SECOND_MOMENT, list(numbers)), places, strict=True):
        values, counts = rounded.unique(return_counts=True)
        up = counts[-1].item() if len(values) == 2 else 0
        root = (math.sqrt((1 - k) ** 2 + 4 * k * place) - (1 - k)) / (2 * k)
        assert abs(root - place - k * place * (1 - place)) <= k**2 / 4  # the first order
        assert abs(up - root * DRAWS) <= 1.2


def test_second_moments_are_unbiased_for_their_fourth_root():
    """Over numbers spread evenly in the logarithm.

    Unbiased rounding lacks 3/32 of the mean relative variance, by the concavity of the fourth root. Of that lack 6% may
    remain: 9/32 is 4% above 3/8 · 1/(2 ln 2), and the numbers and draws are samples.
    """
    count, draws = BLOCK - 1, ALL_DRAWS[8::16]
    lack, variance = {FIRST_MOMENT: 0.0, SECOND_MOMENT: 0.0}, 0.0
    for part in range(8):
        value = 2.0 ** ((torch.arange(count, dtype=torch.float64) + (part + 0.5) / 8) / count)
        value = value.float().double()
        for format in lack:
            numbers = value.float().view(INT32).tolist()
            rounded = torch.stack(rounded_over_draws(format, numbers, draws)) / value[:, None]
            lack[format] += (1 - rounded**0.25).mean().item()
            variance += (rounded - 1).square().mean().item() / 2
    assert abs(lack[FIRST_MOMENT] / (3 / 32 * variance) - 1) <= 0.06
    assert abs(lack[SECOND_MOMENT] / (3 / 32 * variance)) <= 0.06


def test_block_max_is_the_largest_of_each_block_in_place_of_each_element():
    value = torch.randint(0, 2**31 - 1, (3, 5, 2 * BLOCK), dtype=INT32, generator=torch.Generator().manual_seed(3))
    found = block_max(value)
    assert (found.dtype, found.shape) == (INT32, value.shape)
    for row, largest in zip(value.view(-1, BLOCK), found.view(-1, BLOCK), strict=True):
        assert largest.tolist() == [max(row.tolist())] * BLOCK
