"""The memory of a step, as the estimate runs it on the meta device, is that of real steps."""

import pytest
import torch

from hf_lowprec.optim import AdamW, LowPrecisionOptimizer, Muon
from hf_lowprec.optim.step import whole_tensor_quantities
from hf_lowprec.tools.estimate.live_memory import LiveMemory
from hf_lowprec.tools.estimate.step_peak import step_peak
from tests.support.training.peak_allocation import peak_allocation

BF16 = torch.bfloat16
SHAPES = [(256, 256), (384, 128), (128, 384), (2, 64, 96), (300,)]


def built(device: str, **options) -> Muon:
    params = [torch.nn.Parameter(torch.ones(shape, dtype=BF16, device=device)) for shape in SHAPES]
    return Muon(params, matrices=params[:-1], **options)


def give_gradients(optimizer: LowPrecisionOptimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape).to(param.dtype)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("state_dtype", [None, torch.int8])
@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_the_peak_of_a_step_is_what_the_allocator_hands_out(rounding, state_dtype, clip):
    """Within 3%: tables are not counted. At these sizes the FP32 values of a chunk are most of it."""
    options = {"rounding": rounding, "state_dtype": state_dtype}
    optimizer = built("cpu", max_grad_norm=clip, backend="native", **options)
    give_gradients(optimizer)
    optimizer.step()
    give_gradients(optimizer)
    found = peak_allocation(optimizer.step)
    assert step_peak(built("meta", **options), clipped=clip is not None) == pytest.approx(found, rel=0.03)


def test_of_large_matrices_it_is_that_of_newton_schulz(monkeypatch):
    """FP32 values of few elements: 8 bytes per element of a square matrix, and its tables.

    Counted by tensors, since matrix products on a CPU take scratch memory.
    """
    monkeypatch.setattr(whole_tensor_quantities, "CHUNK", 1000)
    optimizer = built("cpu", backend="native")
    give_gradients(optimizer)
    optimizer.step()
    give_gradients(optimizer)
    with LiveMemory() as memory:
        optimizer.step()
    expected = step_peak(built("meta"), clipped=False)
    assert expected == pytest.approx(8 * 256 * 256, rel=0.01)
    assert memory.peak == pytest.approx(expected, rel=0.03)


def test_other_optimizers_step_in_place():
    assert step_peak(AdamW([torch.nn.Parameter(torch.ones(9, 9, device="meta"))])) == 0


def test_memory_counts_once_and_until_it_is_released():
    outside = torch.ones(1000)
    with LiveMemory() as memory:
        view = outside.view(10, 100)
        assert memory.live == 0
        double = view + view
        part = double[0]
        assert (memory.live, memory.peak) == (4000, 4000)
        del double
        assert memory.live == 4000
        memory.count_as_gradient(part)
        memory.count_as_gradient(part)
        assert (memory.live, memory.gradients, memory.peak_with_gradients) == (0, 4000, 4000)
        more = torch.empty(10, dtype=torch.int8)
        assert (memory.live, memory.peak, memory.peak_with_gradients) == (10, 4000, 4010)
        del part, more
        assert (memory.live, memory.gradients) == (0, 0)
