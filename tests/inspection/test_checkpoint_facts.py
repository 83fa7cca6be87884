"""What is counted in a tensor, against rounding and subtraction of every element."""

import pytest
import torch

from hf_lowprec.tools import inspection as checkpoint_facts
from hf_lowprec.tools.inspection import tensor_facts

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(999, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lost_weights_are_those_that_rounding_leaves_where_they_are(dtype, monkeypatch):
    monkeypatch.setattr(checkpoint_facts, "CHUNK", 100)
    weights = numbers(0).to(dtype)
    update = torch.finfo(dtype).eps / 4
    lost = sum((weight + update) == weight for weight in weights.to(dtype))  # torch rounds to nearest
    assert tensor_facts(weights, update).lost == int(lost) and 100 < lost < 900


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_moved_and_how_far(dtype, monkeypatch):
    monkeypatch.setattr(checkpoint_facts, "CHUNK", 100)
    earlier, later = numbers(0), numbers(0).to(dtype)
    later[::3] += numbers(1).to(dtype)[::3].abs() + 1
    facts = tensor_facts(later, 0.0, earlier)
    before = earlier.to(dtype).double()
    assert facts.moved == 333 == int(facts.exponents[1].sum()) and int(facts.exponents.sum()) == 999
    assert facts.distance == pytest.approx(float((later.double() - before).square().sum()), rel=1e-5)
    assert facts.norm == pytest.approx(float(before.square().sum()), rel=1e-5)
    assert int(facts.exponents[:, 127].sum()) == int(((before.abs() >= 1) & (before.abs() < 2)).sum())


def test_values_at_the_start_and_not_finite():
    ones, zeros = torch.ones(7), torch.zeros(7)
    assert tensor_facts(ones, 0.0).at_start and tensor_facts(zeros, 0.0).at_start
    assert not tensor_facts(torch.cat((ones, zeros)), 0.0).at_start and not tensor_facts(torch.empty(0), 0.0).at_start
    assert tensor_facts(torch.tensor([1, torch.nan, -torch.inf]), 0.0).nonfinite == 2
    assert tensor_facts(ones, 0.0).moved is None
