"""One pass over a tensor counts what is in it, and knows which updates rounding to nearest would lose."""

import math

import pytest
import torch

from hf_lowprec.rounding.nearest import spacings_by_exponent
from hf_lowprec.tools.inspection import tensor_facts as module
from hf_lowprec.tools.inspection.tensor_facts import tensor_facts


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 1000)


def weights(dtype: torch.dtype, count: int = 4321) -> torch.Tensor:
    magnitudes = torch.randn(count, generator=torch.Generator().manual_seed(0)).exp()
    signs = torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(1)) * 2 - 1
    return (0.02 * signs * magnitudes).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_counts(dtype):
    tensor = weights(dtype)
    tensor[5:9], tensor[17], tensor[1500:1503] = 1.0, -1.0, 0.0
    tensor[3000], tensor[3001], tensor[3002] = math.nan, math.inf, -math.inf
    facts = tensor_facts(tensor.view(-1, 1))
    assert (facts.ones, facts.zeros, facts.nonfinite, facts.constant) == (4, 3, 3, None)
    assert (facts.parameters, facts.nbytes, facts.shape) == (4321, 4321 * dtype.itemsize, (4321, 1))


def test_root_mean_square():
    tensor = weights(torch.bfloat16)
    # Sums of 1000 squares in FP32: at most 1000 · 2^-24 relative to the sum.
    assert tensor_facts(tensor).rms == pytest.approx(float(tensor.double().square().mean().sqrt()), rel=6e-5)


@pytest.mark.parametrize("value", [1.0, 0.0, -0.5])
def test_constants(value):
    tensor = torch.full((70, 50), value, dtype=torch.bfloat16)
    assert tensor_facts(tensor).constant == value
    tensor[69, 49] = 2.0
    assert tensor_facts(tensor).constant is None


def test_tensors_without_numbers():
    assert tensor_facts(torch.arange(5)).nonfinite == 0
    empty = tensor_facts(torch.zeros(0, 3))
    assert (empty.parameters, empty.constant, empty.rms) == (0, None, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_spacings_are_those_of_the_dtype(dtype):
    """The next larger number has the next bit pattern."""
    table = spacings_by_exponent(dtype)
    for exponent in range(-20, 15):
        value = torch.tensor([2.0**exponent, 1.9 * 2.0**exponent], dtype=dtype)
        following = (value.view(torch.int16) + 1).view(dtype)
        assert (following.double() - value.double()).tolist() == [table[exponent + 127]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("update", [3e-6, 2e-5, 1e-4])
def test_coarse_weights_are_those_that_rounding_leaves_where_they_are(dtype, update):
    """An update away from zero, added in FP64 and rounded to nearest by torch."""
    tensor = weights(dtype)
    tensor[0] = math.nan
    stepped = (tensor.double() + tensor.double().sign() * update).to(dtype)
    assert tensor_facts(tensor).coarser_than(update) == int((stepped == tensor).sum()) > 0


def test_expected_movers():
    """Stochastic rounding moves a weight with the chance of the update over the spacing."""
    tensor = weights(torch.bfloat16)
    spacing = (tensor.view(torch.int16) + 1).view(torch.bfloat16).double() - tensor.double()
    expected = (1e-4 / spacing.abs()).clamp(max=1).sum()
    assert tensor_facts(tensor).movers(1e-4, torch.bfloat16) == pytest.approx(float(expected), rel=1e-12)
