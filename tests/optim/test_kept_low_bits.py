"""The next optimizer of a plain loop begins with the FP32 weights of the one before."""

import pytest
import torch
from torch import nn

import hf_lowprec
from hf_lowprec.rounding.attached_low_bits import attached_low_bits

BF16 = torch.bfloat16


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for k, param in enumerate(model.parameters()):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(k)).to(param.dtype)
    optimizer.step()


@pytest.mark.parametrize("keeps", [True, False])
def test_steps_of_a_second_optimizer_continue_the_exact_weights(keeps):
    """SGD has no other state, so with split weights two optimizers end with the bits of one."""
    found = []
    for count in (1, 2):
        torch.manual_seed(0)
        model = nn.Linear(300, 7)
        hf_lowprec.cast_model(model)
        for _ in range(count):
            optimizer = hf_lowprec.SGD(model.parameters(), lr=1e-3, rounding="split")
            for _ in range(4 // count):
                step(model, optimizer)
            if keeps and count == 2:
                hf_lowprec.keep_low_bits(optimizer)
        found.append(hf_lowprec.fp32_state_dict(model, optimizer))
    same = all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert same == keeps


def test_other_optimizers_are_refused():
    with pytest.raises(TypeError, match="Adam has no low bits to keep; pass an hf_lowprec optimizer"):
        hf_lowprec.keep_low_bits(torch.optim.Adam(nn.Linear(2, 2).parameters()))


def test_they_can_be_freed():
    model = nn.Linear(30, 7, dtype=BF16)
    optimizer = hf_lowprec.AdamW(model.parameters())
    step(model, optimizer)
    hf_lowprec.keep_low_bits(optimizer)
    assert all(attached_low_bits(param) is not None for param in model.parameters())
    hf_lowprec.drop_low_bits(model)
    assert not any("_low_bits" in vars(param) for param in model.parameters())
