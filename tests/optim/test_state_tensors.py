"""Which states are stored in 8 bits, and requests that are refused by name."""

import pytest
import torch
from torch import nn

from hf_lowprec.optim import AdamW, Adan
from hf_lowprec.optim.state.states import state_tensors

INT8, UINT8, BF16, FP32 = torch.int8, torch.uint8, torch.bfloat16, torch.float32


def dtypes(optimizer: torch.optim.Optimizer) -> dict[str, torch.dtype]:
    """Of the states of the only parameter, before the first step and after it."""
    (group,) = optimizer.param_groups
    (param,) = group["params"]
    before = {tensor.key: tensor.dtype for tensor in state_tensors(optimizer, group, param)}
    param.grad = torch.ones_like(param)
    optimizer.step()
    after = {name: value.dtype for name, value in optimizer.state[param].items() if name != "step"}
    assert before == after == {tensor.key: tensor.dtype for tensor in state_tensors(optimizer, group, param)}
    return after


@pytest.mark.parametrize("shape", [(3, 64), (2, 3, 32), (1, 32)])
def test_rows_of_whole_blocks(shape):
    found = dtypes(AdamW([nn.Parameter(torch.ones(shape, dtype=BF16))], state_dtype=INT8, amsgrad=True))
    moments = {"exp_avg_code": INT8, "exp_avg_scale": UINT8, "exp_avg_sq_code": INT8, "exp_avg_sq_scale": UINT8}
    assert found == {**moments, "max_exp_avg_sq": BF16, "compensation": BF16}


@pytest.mark.parametrize("shape", [(64,), (), (32, 3), (2, 33)])
def test_other_rows(shape):
    found = dtypes(AdamW([nn.Parameter(torch.ones(shape, dtype=BF16))], state_dtype=INT8))
    assert found == {"exp_avg": BF16, "exp_avg_sq": BF16, "compensation": BF16}


def test_fp32_parameters():
    assert set(dtypes(AdamW([nn.Parameter(torch.ones(2, 32))], state_dtype=INT8)).values()) == {FP32}


def test_a_dtype_per_state():
    param = nn.Parameter(torch.ones(2, 32, dtype=BF16))
    found = dtypes(Adan([param], rounding="stochastic", state_dtype={"exp_avg": INT8, "exp_avg_sq": FP32}))
    others = {"exp_avg_diff": BF16, "previous_grad": BF16}
    assert found == {"exp_avg_code": INT8, "exp_avg_scale": UINT8, "exp_avg_sq": FP32, **others}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_dtype": INT8, "state_rounding": "nearest"}, "state_rounding='nearest' in param group 0 is not"),
        ({"state_dtype": {"exp_avg": INT8}, "state_rounding": "nearest"}, "always rounded stochastically"),
        ({"state_dtype": {"max_exp_avg_sq": INT8}, "amsgrad": True}, "max_exp_avg_sq does not average over steps"),
        ({"state_dtype": torch.uint8}, "use bfloat16, float32 or int8"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW([nn.Parameter(torch.ones(2, 32, dtype=BF16))], **options)
