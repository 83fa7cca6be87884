"""What a CUDA graph reads lives as long as the optimizer, and no longer. Without a GPU, the capture is pretended."""

import gc
import weakref
from unittest import mock

import torch
from torch import nn

from hf_lowprec.optim import AdamW
from hf_lowprec.optim import optimizer as optimizer_module


def test_captured_steps_live_as_long_as_the_optimizer():
    params = [nn.Parameter(torch.randn(8).bfloat16()) for _ in range(2)]
    optimizer = AdamW(params, capturable=True)

    def step(with_gradients: int) -> weakref.ref:
        for number, param in enumerate(params):
            param.grad = torch.randn_like(param) if number < with_gradients else None
        optimizer.step()
        return weakref.ref(optimizer._plan.backend_steps[0])

    not_captured = step(1)
    step(2)
    with mock.patch.object(optimizer_module, "is_capturing", lambda: True):
        captured, same = step(2), step(2)
    assert captured() is same()
    step(1)
    gc.collect()
    assert not_captured() is None
    assert captured() is not None
    del optimizer
    gc.collect()
    assert captured() is None
