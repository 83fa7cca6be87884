"""What a CUDA graph reads lives as long as the optimizer, and no longer. Without a GPU, the capture is pretended."""

import gc
import weakref
from unittest import mock

import torch
from torch import nn

from hf_lowprec.optim import AdamW
from hf_lowprec.optim import optimizer as optimizer_module


def stepped(optimizer: AdamW, params: list[nn.Parameter]) -> weakref.ref:
    """The backend's step of these parameters, taken once."""
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return weakref.ref(optimizer._plan.backend_steps[0])


def test_captured_steps_live_as_long_as_the_optimizer():
    params = [nn.Parameter(torch.randn(8).bfloat16()) for _ in range(2)]
    optimizer = AdamW(params, capturable=True)
    not_captured = stepped(optimizer, params[:1])
    stepped(optimizer, params)
    with mock.patch.object(optimizer_module, "is_capturing", lambda: True):
        captured, same = stepped(optimizer, params), stepped(optimizer, params)
    assert captured() is same()
    stepped(optimizer, params[:1])
    gc.collect()
    assert not_captured() is None
    assert captured() is not None
    del optimizer
    gc.collect()
    assert captured() is None


def test_the_norm_is_always_in_the_same_tensor():
    """The one to which a replayed graph writes."""
    params = [nn.Parameter(torch.randn(8).bfloat16()) for _ in range(2)]
    optimizer = AdamW(params, capturable=True, max_grad_norm=1.0)
    stepped(optimizer, params)
    norm = optimizer.grad_norm
    for _ in range(2):
        for param in params:
            param.grad = torch.randn_like(param)
        exact = torch.cat([param.grad for param in params]).double().norm()
        assert optimizer.clip_grad_norm_(0.5) is not norm
        optimizer.step()
        assert optimizer.grad_norm is norm
        torch.testing.assert_close(norm.double(), exact, rtol=2**-24, atol=0)  # rounded to FP32 once
