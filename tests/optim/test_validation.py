"""What a step must be, and what the parameters must be: refusals and warnings that name the way out."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_lowprec.casting import cast_model
from hf_lowprec.optim import AdamW
from hf_lowprec.optim.validation import check_scalars


def bf16(count: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(count, dtype=torch.bfloat16))]


@pytest.mark.parametrize("options", [{}, {"gradient_release": True}], ids=str)
def test_a_step_that_a_cuda_graph_would_capture_raises(monkeypatch, options):
    param = nn.Parameter(torch.ones(3).bfloat16())
    optimizer = AdamW([param], **options)

    def train():
        param.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with monkeypatch.context() as during_capture:
        during_capture.setattr(torch.cuda, "is_initialized", lambda: True)
        during_capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="a CUDA graph cannot capture a step"):
            train()
    assert torch.equal(param, torch.ones_like(param)) and not optimizer.state
    optimizer.zero_grad()
    train()
    assert optimizer.state[param]["step"] == 1


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_learning_rate_that_a_scheduler_takes_below_zero_goes_on_as_in_torch(backend):
    ours, theirs = [nn.Parameter(torch.ones(3))], [nn.Parameter(torch.ones(3))]
    optimizers = AdamW(ours, lr=0.1, backend=backend), torch.optim.AdamW(theirs, lr=0.1)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 - 0.8 * step) for each in optimizers]
    for params, optimizer, scheduler in zip((ours, theirs), optimizers, schedulers, strict=True):
        for step in range(4):
            params[0].grad = torch.full((3,), 1.0 + step)
            optimizer.step()
            scheduler.step()
    assert optimizers[0].param_groups[0]["lr"] < 0
    # Four steps of a dozen roundings of numbers below two.
    torch.testing.assert_close(ours[0], theirs[0], rtol=4 * 12 * 2**-24, atol=0)
    for bad in (float("nan"), float("-inf")):
        optimizers[0].param_groups[0]["lr"] = bad
        with pytest.raises(ValueError, match="lr="):
            optimizers[0].step()
    with pytest.raises(ValueError, match=r"lr=-0.1 is invalid; it must be a number >= 0$"):
        optimizers[0].add_param_group({"params": bf16(), "lr": -0.1})


def test_a_scalar_that_is_not_finite_is_named():
    with pytest.raises(ValueError, match=r"lr=0.1 .* give gain=nan, which is not finite in FP32"):
        check_scalars({"lr": 0.1}, {"gain": float("nan")})


def test_a_device_without_fp64_is_named():
    with FakeTensorMode():
        param = nn.Parameter(torch.empty(4, dtype=torch.bfloat16, device="mps"))
        with pytest.raises(ValueError, match=r"param group 0 is on mps:0, .* no FP64.*use_cpu=True"):
            AdamW([param])


FP32, BF16 = torch.float32, torch.bfloat16
FIRST_IS_POINTED_OUT = [("split", FP32, 2), ("split", BF16, 2), ("kahan", FP32, 2), ("split", FP32, 1)]


@pytest.mark.parametrize(("rounding", "dtype", "sides"), FIRST_IS_POINTED_OUT)
def test_a_mode_for_16_bits_without_16_bit_weights_is_pointed_out(recwarn, rounding, dtype, sides):
    """Kahan summation is the default; vectors may be the norms of a model whose matrices another optimizer has."""
    from hf_lowprec.integrations.transformers.precision_report import precision_report

    param = nn.Parameter(torch.ones([4] * sides, dtype=dtype))
    param.grad = torch.ones_like(param)
    optimizer = AdamW([param], rounding=rounding)
    optimizer.step()
    found = [str(warning.message) for warning in recwarn if "cast_model(model)" in str(warning.message)]
    assert len(found) == ((rounding, dtype, sides) == FIRST_IS_POINTED_OUT[0])
    report = precision_report(nn.ParameterList([param]), optimizer, cast_model(nn.Linear(1, 1)))
    assert (f"weights {rounding}" in report) == (dtype == BF16)
