"""`fp32_state_dict`: what it adds up, and what it leaves as it is."""

import pytest
import torch
from torch import nn

from hf_lowprec import AdamW, fp32_state_dict
from hf_lowprec.optim.state.fp32_weights import fp32_estimates

BF16 = torch.bfloat16


def stepped(rounding: str) -> tuple[nn.Linear, AdamW]:
    """A BF16 layer after three small steps, none of which moves a weight of 1 by half an ulp."""
    model = nn.Linear(5, 3, dtype=BF16)
    nn.init.ones_(model.weight)
    optimizer = AdamW(model.parameters(), lr=1e-4, rounding=rounding)
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    return model, optimizer


def test_a_kahan_weight_is_weight_plus_compensation() -> None:
    model, optimizer = stepped("kahan")
    compensation = optimizer.state[model.weight]["compensation"]
    assert compensation.any()
    found = fp32_state_dict(model, optimizer)["weight"]
    # Both have 8 significant bits, and their exponents differ by less than 16: the FP32 sum is exact.
    assert found.dtype == torch.float32
    assert torch.equal(found.double(), model.weight.double() + compensation.double())


def test_a_split_weight_is_its_master() -> None:
    model, optimizer = stepped("split")
    remainder = optimizer.state[model.weight]["remainder"]
    assert remainder.any()
    found = fp32_state_dict(model, optimizer)["weight"]
    pattern = model.weight.detach().float().view(torch.int32) + remainder
    assert torch.equal(found.view(torch.int32), pattern)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_without_a_compensation_weights_are_converted_as_they_are(rounding: str) -> None:
    model, optimizer = stepped(rounding)
    assert torch.equal(fp32_state_dict(model, optimizer)["weight"], model.weight.float())


def test_before_the_first_step_the_optimizer_stays_without_state() -> None:
    """An empty entry per parameter would be saved, and a state dict with it is refused when it is loaded."""
    model = nn.Linear(5, 3, dtype=BF16)
    optimizer = AdamW(model.parameters())
    fp32_state_dict(model, optimizer)
    assert len(optimizer.state) == 0
    optimizer.load_state_dict(optimizer.state_dict())


def test_estimates_are_not_part_of_a_graph() -> None:
    model, optimizer = stepped("stochastic")
    estimate = fp32_estimates(model, optimizer)
    assert not any(estimate(param).requires_grad for param in model.parameters())
