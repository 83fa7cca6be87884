"""States on the host of a real GPU: the bits of the ordinary step, and what the GPU keeps."""

import pytest
import torch
from torch import nn

from hf_lowprec.optim import AdamW, host_steps
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from hf_lowprec.rounding.low_bits import chunk_size

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def trained(**options) -> tuple[list, AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to("cuda", torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-2, **options)
    for step in range(5):
        inputs = torch.randn(64, 512, generator=torch.Generator().manual_seed(step)).to("cuda", torch.bfloat16)
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [value for param in model.parameters() for value in optimizer.state[param].values()]
    return [*model.parameters(), *states], optimizer


@pytest.mark.parametrize(
    "options",
    [
        {"rounding": "split"},
        {"rounding": "stochastic", "state_dtype": torch.int8},
        {"rounding": "kahan", "gradient_release": True},
        {"rounding": "split", "gradient_release": True, "clip": "delayed", "max_grad_norm": 1.0},
        {"rounding": "split", "skip_nonfinite": True},
        {"rounding": "split", "offload_gradients": True},
        {"rounding": "stochastic", "offload_gradients": True, "skip_nonfinite": True},
    ],
    ids=str,
)
def test_it_is_the_ordinary_step(monkeypatch, options):
    """Without a clip factor, whose norm the two sum in other orders, or with that of the same sum."""
    monkeypatch.setattr(host_steps, "BUCKET_ELEMENTS", 1 << 19)
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", 1 << 19)
    on_gpu = {key: value for key, value in options.items() if key != "offload_gradients"}
    expected, _ = trained(backend="eager", **on_gpu)
    found, optimizer = trained(offload_states=True, **options)
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(expected, found, strict=True))
    on_gpu = {n for state in optimizer.state.values() for n, value in state.items() if value.device.type != "cpu"}
    assert on_gpu == ({"step"} if "skip_nonfinite" in options else set())  # the GPU decides whether a step counts


def test_the_gpu_keeps_weights_and_one_bucket_of_gradients(monkeypatch):
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", 1 << 22)
    before = torch.cuda.memory_allocated()
    params = [nn.Parameter(torch.zeros(1 << 22, device="cuda", dtype=torch.bfloat16)) for _ in range(16)]
    optimizer = AdamW(params, rounding="split", max_grad_norm=1.0, offload_states=True, offload_gradients=True)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        sum((param * 2).sum() for param in params).backward()
        optimizer.step()
    torch.cuda.synchronize()
    # Weights; gradients of which three are being copied, one waits and one is computed; and temporaries.
    assert torch.cuda.max_memory_allocated() - before <= (16 + 8) * 2 * params[0].numel()


def test_the_gpu_keeps_weights_and_gradients_alone():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    param = nn.Parameter(torch.zeros(1 << 25, device="cuda", dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    AdamW([param], rounding="split", offload_states=True).step()
    torch.cuda.synchronize()
    # Low bits to start with are computed in chunks. Their temporaries take 35 bytes per element on an H100.
    temporaries = 40 * chunk_size(param.device)
    assert torch.cuda.max_memory_allocated() - before <= 1.03 * 4 * param.numel() + temporaries
    assert temporaries < 64 << 20
