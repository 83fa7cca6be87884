"""One pass over two versions of a tensor counts what changed bit for bit, and what weight decay should have changed."""

import pytest
import torch

from hf_lowprec.tools.inspection import tensor_facts as module
from hf_lowprec.tools.inspection.tensor_facts import tensor_change

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 100)


def weights(dtype=FP32, count=1234):
    return (0.02 * torch.randn(count, generator=torch.Generator().manual_seed(0))).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32, torch.float64])
def test_moved_elements(dtype):
    before = weights(dtype)
    after = before.clone()
    after[[3, 500, 1233]] *= 2
    change = tensor_change(before, after)
    assert (change.moved, change.parameters, change.rounded) == (3, 1234, False)
    expected = before[[3, 500, 1233]].double().norm()
    assert change.distance == pytest.approx(float(expected), rel=1e-6)
    assert change.relative_distance == pytest.approx(float(expected / before.double().norm()), rel=1e-5)
    assert int(change.exponents.sum()) == 1234 and int(change.moved_exponents.sum()) == 3


def test_the_sign_of_zero_and_nan_count_bit_for_bit():
    before = torch.tensor([0.0, float("nan"), 1.0])
    assert tensor_change(before, before.clone()).moved == 0
    assert tensor_change(before, torch.tensor([-0.0, float("nan"), 1.0])).moved == 1


def test_other_dtypes_are_compared_after_rounding():
    before = weights(BF16)
    after = before.float()
    after += 0.2 * (after.abs() * 2**-8)  # a tenth of a spacing or more, less than half
    change = tensor_change(before, after)
    assert (change.moved, change.dtype, change.rounded) == (0, BF16, True)
    after[7] *= 1.01
    assert tensor_change(before, after).moved == tensor_change(after, before).moved == 1


def test_8_bit_floats():
    before = weights(torch.float8_e4m3fn)
    after = before.clone()
    after[3] = 1.0
    assert tensor_change(before, after).moved == 1
    assert tensor_change(before.float(), after).moved == 1


def test_integers():
    change = tensor_change(torch.arange(500), torch.arange(500) // 499 * 499)
    assert change.moved == 498 and change.distance == 0


@pytest.mark.parametrize("decay", [0.002, 0.01, 0.05])
def test_elements_that_decay_alone_moves(decay):
    before = weights(BF16)
    before[:10] = 0
    after = before.clone()
    after[::3] += 1.0
    spacing = (before.view(torch.int16) + 1).view(BF16).double() - before.double()
    decays = before.double().abs() * decay >= 2 * spacing.abs()
    unmoved = torch.ones(1234, dtype=torch.bool)
    unmoved[::3] = False
    change = tensor_change(before, after, decay)
    assert change.shrunk == int(decays.sum())
    assert change.shrunk_not_moved == int((decays & unmoved).sum())
    assert tensor_change(before, after).shrunk == 0
