"""What is read of a saved optimizer: the states of each parameter, no other numbers, and what a weight's are worth."""

import pytest
import torch
from torch import nn

import hf_lowprec
from hf_lowprec.integrations.checkpoint_files.stored_optimizer import StoredParameter, read_optimizer


def stepped_and_saved(tmp_path, optimizer, *without_gradient) -> list[StoredParameter]:
    params = optimizer.param_groups[0]["params"]
    for param in params:
        param.grad = None if param in {*without_gradient} else torch.ones_like(param)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    return read_optimizer(tmp_path / "optimizer.pt").parameters[0]


def test_numbers_beside_the_states_are_none(tmp_path):
    (stored,) = stepped_and_saved(tmp_path, torch.optim.NAdam([nn.Parameter(torch.zeros(2))]))  # with `mu_product`
    assert stored.infos == dict.fromkeys(("exp_avg", "exp_avg_sq"), ((2,), torch.float32)) and stored.step == 1


def test_a_scalar_has_states(tmp_path):
    scale = nn.Parameter(torch.tensor(1.5, dtype=torch.bfloat16))
    (stored,) = stepped_and_saved(tmp_path, hf_lowprec.AdamW([scale], rounding="split"))
    assert {name: tuple(info.shape) for name, info in stored.infos.items()} == {
        "exp_avg": (), "exp_avg_sq": (), "remainder": (),
    }  # fmt: skip


@pytest.mark.parametrize("rounding", ["kahan", "split"])
def test_estimates_of_stepped_and_other_weights(tmp_path, rounding):
    model = nn.Linear(64, 64)
    hf_lowprec.cast_model(model)
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-3, rounding=rounding)
    stored = stepped_and_saved(tmp_path, optimizer, model.bias)
    expected = hf_lowprec.fp32_state_dict(model, optimizer)
    for one, (name, param) in zip(stored, model.named_parameters(), strict=True):
        assert not torch.equal(expected[name], param.float())
        assert torch.equal(one.estimate(param.detach().clone()), expected[name])
