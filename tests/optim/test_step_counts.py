"""Step counts are integers: nothing changes at 2²⁴, where FP32 stops counting; random bits repeat after 2³²."""

import copy

import pytest
import torch
from torch import nn

from hf_lowprec.optim import SGD, AdamW
from hf_lowprec.rounding import round_stochastic
from hf_lowprec.rounding.random_bits import random_bits
from tests.support.triton_available import quiet_interpreter

pytestmark = quiet_interpreter
ELEMENTS = 4096
LAST = 2**24
"""The first whole number whose successor FP32 does not have."""


def stepped_before(
    steps: int, cls=SGD, count_dtype=torch.int64, **options
) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """A weight of ones and its optimizer, which has taken a number of steps."""
    param = nn.Parameter(torch.ones(ELEMENTS).bfloat16())
    optimizer = cls([param], **{"lr": 1.0, "rounding": "stochastic", **options})
    param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.state[param]["step"] = torch.tensor(steps, dtype=count_dtype, device="cpu")
    return param, optimizer


@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}], ids=str)
@pytest.mark.parametrize("before", [LAST - 1, LAST + 5, 2**31 - 1, 2**32 - 1, 2**33 + 3])
def test_every_step_draws_bits_of_its_own(any_backend, before, options):
    param, optimizer = stepped_before(before, backend=any_backend, **options)
    index = torch.arange(ELEMENTS, device=param.device)
    expected = torch.ones(ELEMENTS)
    for step in range(before + 1, before + 3):
        param.grad = torch.full_like(param, 2.0**-12)  # a 16th of an ulp below one
        optimizer.step()
        bits = random_bits(seed=0, step=step, parameter=0, role=0, index=index)
        expected = round_stochastic(expected.to(param.device) - 2.0**-12, bits)
        assert torch.equal(param.float(), expected)
        assert optimizer.state[param]["step"] == step
        assert optimizer.state[param]["step"].dtype == torch.int64


def test_a_count_in_fp32_that_was_pickled_or_put_there_becomes_an_integer(any_backend):
    param, optimizer = stepped_before(LAST, count_dtype=torch.float32, backend=any_backend, skip_nonfinite=True)
    other = copy.deepcopy(optimizer)
    for each in (optimizer, other):
        (stepped,) = each.param_groups[0]["params"]
        for _ in range(2):
            stepped.grad = torch.full_like(stepped, 2.0**-12)
            each.step()
        assert each.state[stepped]["step"] == LAST + 2
    assert torch.equal(param, other.param_groups[0]["params"][0])


def test_distributed_checkpoints_keep_counts_whole(tmp_path):
    """Torch's distributed state dicts, and one of FP32 counts loaded into integers."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def built():
        torch.manual_seed(0)
        model = nn.Linear(4, 4).bfloat16()
        return model, AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)
        optimizer.step()

    model, optimizer = built()
    train(model, optimizer)
    optimizer.state[model.weight]["step"].fill_(LAST + 1)
    saved = get_optimizer_state_dict(model, optimizer)
    assert saved["state"]["weight"]["step"].dtype == torch.int64
    for count in (LAST + 1, 5):
        if count == 5:
            saved["state"]["weight"]["step"] = torch.tensor(5.0)
        dcp.save(saved, checkpoint_id=tmp_path / str(count))
        other, resumed = built()
        target = get_optimizer_state_dict(other, resumed)
        dcp.load(target, checkpoint_id=tmp_path / str(count))
        set_optimizer_state_dict(other, resumed, target)
        assert resumed.state[other.weight]["step"] == count
        train(other, resumed)
        assert resumed.state[other.weight]["step"] == count + 1


@pytest.mark.parametrize("steps", [LAST + 7, 2**40])
def test_bias_corrections_of_huge_steps_are_those_of_the_limit(any_backend, steps):
    param, optimizer = stepped_before(steps, AdamW, lr=2.0**-6, backend=any_backend, betas=(0.0, 0.0), weight_decay=0.0)
    param.grad = torch.full_like(param, 3.0)
    optimizer.step()
    assert torch.equal(param, torch.full_like(param, 1 - 2.0**-6))
