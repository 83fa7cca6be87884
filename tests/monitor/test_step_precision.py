"""Samples of many tensors as one matrix; the sums over them, and the numbers that these amount to."""

import math

import pytest
import torch

from hf_lowprec.monitor.step_precision import COLUMN, SUMS, precision_values, second_moment_sums, share_sums
from hf_lowprec.monitor.watched_parameters import ParameterSamples
from hf_lowprec.rounding import round_stochastic
from hf_lowprec.rounding.nearest import spacing

ONE = torch.ones(1, dtype=torch.float64)


def lost(sums: torch.Tensor, prefix: str = "update") -> tuple[float, float]:
    table = torch.zeros(1, len(SUMS), dtype=torch.float64)
    first = COLUMN[f"{prefix}_square"]
    table[:, first : first + 4] = sums
    name = {"update": "lost_updates", "second_moment": "lost_second_moment"}[prefix]
    (values,) = precision_values(table)
    return values[name], values[f"{name}_error"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_spacing_is_the_distance_to_the_next_number(dtype):
    values = torch.tensor([1.0, 1.5, 0.02, 3e4, 6.2e-5, 2.0**-14, 1e-6, -0.7]).to(dtype)
    bits = values.abs().view(torch.int16)
    following = (bits + 1).view(dtype)
    assert torch.equal(spacing(values, dtype), following.double() - values.abs().double())


@pytest.mark.parametrize("ulps", [0.01, 0.3, 5.0])
def test_the_error_bar_of_stochastic_rounding_covers_what_it_says(ulps):
    """Of 400 seeds, 68.3% are within one standard error, with a standard deviation of 2.3%; 95.4% ± 1.0% within two."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.rand(400, 1000, generator=generator) + 1).bfloat16().float()
    update = torch.randn(400, 1000, generator=generator) * 2.0**-7 * ulps
    exact = (weight + update).double() - weight.double()
    bits = torch.randint(0, 1 << 16, weight.shape, generator=generator, dtype=torch.int32)
    stored = round_stochastic(weight + update, bits).double() - weight.double()
    results = [
        lost(share_sums(exact[k : k + 1], stored[k : k + 1], spacing(weight[k : k + 1], torch.bfloat16), ONE))
        for k in range(400)
    ]
    scores = torch.tensor([share / error for share, error in results])
    assert abs(scores.mean()) < 4 / math.sqrt(400)
    # The larger of two estimates of the same error makes it larger by a few percent.
    assert 0.683 - 0.07 < (scores.abs() < 1).double().mean() < 0.9
    assert (scores.abs() < 2).double().mean() > 0.954 - 0.04


def test_elements_that_stand_for_many_make_the_error_no_smaller():
    update, noise = torch.rand(1, 100, dtype=torch.float64), torch.randn(1, 100, dtype=torch.float64)
    grid = torch.ones_like(update)
    one, many = (lost(share_sums(update, update + noise, grid, weights)) for weights in (ONE, 50 * ONE))
    assert many == pytest.approx(one)


def test_a_sample_in_which_nothing_moves_is_no_proof_of_loss():
    """An expectation of 0.1 moves: that none is seen says nothing, and the error must say so."""
    weight = torch.ones(1, 100, dtype=torch.float64)
    update = torch.full_like(weight, 2.0**-7 / 1000)
    share, error = lost(share_sums(update, torch.zeros_like(update), spacing(weight, torch.bfloat16), ONE))
    assert share == 1
    assert error == pytest.approx(math.sqrt(1000 / 100), rel=0.01)  # √(spacing·Σ|u|³)/Σu²


def test_second_moments_that_grow_or_are_zero_do_not_count():
    before = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    exact = torch.tensor([[0.9, 2.0, 1.0]], dtype=torch.float64)
    stored = torch.tensor([[0.95, 7.0, 9.0]], dtype=torch.float64)
    share, _ = lost(second_moment_sums(before, exact, stored, None, ONE), "second_moment")
    assert share == pytest.approx(0.5)


SHAPES = [(1000, 64), (7,), (64,), (3, 5, 40), (1,), (0, 4), ()]


def _sampled(samples):
    """How many elements of each row are no padding."""
    return samples.clear_padding(torch.ones(len(samples.sizes), 64, dtype=torch.bool)).sum(1)


@pytest.fixture
def tensors():
    return [torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) for shape in SHAPES]


def test_rows_are_evenly_spaced_elements_and_short_ones_end_in_zeros(tensors):
    samples = ParameterSamples(tensors, 64)
    matrix = samples.gather(tensors)
    assert matrix.shape == (len(SHAPES), 64)
    for row, tensor, count, stride in zip(matrix, tensors, samples.counts, samples.strides, strict=True):
        assert torch.equal(row[:count], tensor.flatten()[::stride])  # the values are the positions
        assert not row[count:].any()
    assert samples.counts[1:3] == [7, 64]
    assert torch.equal(_sampled(samples), torch.tensor(samples.counts))
    assert samples.positions[0, :3].tolist() == [0, samples.strides[0], 2 * samples.strides[0]]


@pytest.mark.parametrize("rows", [64, 66])
def test_a_sample_visits_all_columns(rows):
    tensor = torch.arange(rows * 64.0).reshape(rows, 64)
    samples = ParameterSamples([tensor], 64)  # every 64th element would be one column, every 66th half of them
    columns = samples.gather([tensor])[0] % 64
    assert len(columns.unique()) > 60


def test_weights_of_elements_add_up_to_the_tensor(tensors):
    samples = ParameterSamples(tensors, 64)
    totals = samples.elements_per_sample * _sampled(samples)
    assert torch.equal(totals, torch.tensor([t.numel() for t in tensors], dtype=torch.float64))


def test_views_follow_changes_and_replaced_memory():
    param = torch.nn.Parameter(torch.zeros(8, 8))
    samples = ParameterSamples([param], 64)
    with torch.no_grad():
        assert not samples.gather([param], "weight").any()
        param.fill_(1)
        assert samples.gather([param], "weight").all()
        param.data = torch.full((8, 8), 2.0)
        assert (samples.gather([param], "weight") == 2).all()


def test_tensors_that_are_not_contiguous_are_read_in_their_own_order():
    tensor = torch.arange(60 * 40.0).reshape(60, 40).t()
    samples = ParameterSamples([tensor], 64)
    for name in (None, "weight"):
        row = samples.gather([tensor], name)[0, : samples.counts[0]]
        assert torch.equal(row, tensor.flatten()[:: samples.strides[0]])
