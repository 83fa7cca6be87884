"""Samples of many tensors as one matrix: which elements, from which memory."""

import math

import pytest
import torch

from hf_lowprec.monitor.watched_parameters import ParameterSamples

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
    totals = samples.element_weights * _sampled(samples)
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
