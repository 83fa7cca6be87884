"""Sums over micro-batches against FP32 and FP64 sums of the same gradients, computed with NumPy."""

import copy
import gc
import math
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_lowprec.reduction import GradientAccumulator

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZE = 999


class FixedGradient(torch.nn.Module):
    """A module whose gradient is the tensor it is called with."""

    def __init__(self, dtype=BF16, size=SIZE):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


def gradients(count: int, dtype=BF16, seed=0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reach = 8 if dtype == FP16 else 20
    scale = torch.exp2(torch.randint(-reach, reach, (SIZE,), generator=generator).float())
    return [(torch.randn(SIZE, generator=generator) * scale).to(dtype) for _ in range(count)]


def numpy_sum(drawn: list[torch.Tensor], dtype) -> np.ndarray:
    total = drawn[0].double().numpy().astype(dtype)
    for gradient in drawn[1:]:
        total = total + gradient.double().numpy().astype(dtype)
    return total


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_fp32_sums_are_rounded_once_and_valid_at_any_time(dtype):
    model = FixedGradient(dtype)
    accumulator = GradientAccumulator(model)
    drawn = gradients(7, dtype)
    for count, gradient in enumerate(drawn, 1):
        model(gradient).backward()
        # NumPy's FP32 addition is IEEE's; torch's cast rounds to nearest, which tests of rounding show.
        assert torch.equal(model.weight.grad, torch.from_numpy(numpy_sum(drawn[:count], np.float32)).to(dtype))
    assert model.weight.grad.dtype == dtype
    assert accumulator.nbytes == 4 * SIZE


def test_fp32_parameters_are_summed_in_fp64():
    model = FixedGradient(FP32)
    GradientAccumulator(model)
    drawn = gradients(9, FP32)
    for gradient in drawn:
        model(gradient).backward()
    assert torch.equal(model.weight.grad, torch.from_numpy(numpy_sum(drawn, np.float64)).float())
    assert model.weight.grad.dtype == FP32


def test_small_gradients_are_not_lost():
    """256 + 256 × 0.5: a BF16 sum stays at 256, whose ulp is 2."""
    drawn = [torch.full((SIZE,), 256.0, dtype=BF16)] + [torch.full((SIZE,), 0.5, dtype=BF16)] * 256
    model, plain = FixedGradient(), FixedGradient()
    GradientAccumulator(model)
    for gradient in drawn:
        model(gradient).backward()
        plain(gradient).backward()
    assert model.weight.grad.unique().tolist() == [384.0]
    assert plain.weight.grad.unique().tolist() == [256.0]


@pytest.mark.parametrize("to_none", [True, False])
def test_a_new_sum_begins_after_zero_grad(to_none):
    model, drawn = FixedGradient(), gradients(6)
    GradientAccumulator(model)
    for gradient in drawn[:3]:
        model(gradient).backward()
    model.zero_grad(set_to_none=to_none)
    for gradient in drawn[3:]:
        model(gradient).backward()
    fresh = FixedGradient()
    GradientAccumulator(fresh)
    for gradient in drawn[3:]:
        fresh(gradient).backward()
    assert torch.equal(model.weight.grad, fresh.weight.grad)


def test_a_gradient_that_was_changed_outside_is_the_new_start():
    model, (first, second, third) = FixedGradient(), gradients(3)
    GradientAccumulator(model)
    model(first).backward()
    model(second).backward()
    model.weight.grad.mul_(0.5)
    start = model.weight.grad.float()
    model(third).backward()
    assert torch.equal(model.weight.grad, (start + third.float()).to(BF16))


def test_signed_zeros_infinities_and_nans_arrive():
    model = FixedGradient(size=5)
    GradientAccumulator(model)
    inf, nan = math.inf, math.nan
    model(torch.tensor([-0.0, inf, inf, 1.0, nan], dtype=BF16)).backward()
    model(torch.tensor([-0.0, 1.0, -inf, nan, 0.0], dtype=BF16)).backward()
    zero, *others = model.weight.grad.tolist()
    assert zero == 0
    assert math.copysign(1, zero) == -1
    assert others[0] == inf
    assert all(map(math.isnan, others[1:]))
    model(torch.ones(5, dtype=BF16)).backward()
    assert model.weight.grad[1] == inf


def test_removed_hooks_add_as_torch_does():
    model, plain, drawn = FixedGradient(), FixedGradient(), gradients(8)
    accumulator = GradientAccumulator(model)
    model(drawn[0]).backward()
    accumulator.remove()
    model.zero_grad()
    for gradient in drawn:
        model(gradient).backward()
        plain(gradient).backward()
    assert torch.equal(model.weight.grad, plain.weight.grad)
    assert accumulator.nbytes == 0


def test_a_second_instance_takes_the_place_of_the_first():
    model, drawn = FixedGradient(), gradients(5)
    first = GradientAccumulator(model)
    second = GradientAccumulator(model)
    for gradient in drawn:
        model(gradient).backward()
    assert (first.nbytes, second.nbytes) == (0, 4 * SIZE)
    assert torch.equal(model.weight.grad, torch.from_numpy(numpy_sum(drawn, np.float32)).to(BF16))


def test_a_model_with_sums_can_be_copied_and_pickled():
    model = FixedGradient()
    GradientAccumulator(model)
    model(gradients(1)[0]).backward()
    assert torch.equal(copy.deepcopy(model).weight, model.weight)
    assert torch.equal(pickle.loads(pickle.dumps(model)).weight, model.weight)


@pytest.mark.parametrize("reentrant", [True, False])
def test_with_activation_checkpointing_and_a_parameter_used_twice(reentrant):
    """Reentrant checkpointing accumulates once per use, so a tied parameter has several gradients per backward."""
    torch.manual_seed(0)
    inputs = torch.randn(4, 8, 16, dtype=BF16)

    def run(in_fp32: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        layer = torch.nn.Linear(16, 16).to(BF16)
        if in_fp32:
            GradientAccumulator(layer)
        seen = []
        for part in inputs:
            part = part.clone().requires_grad_()
            hidden = checkpoint(layer, part, use_reentrant=reentrant)
            checkpoint(layer, hidden, use_reentrant=reentrant).square().sum().backward()
            seen.append(layer.weight.grad.clone())
            if not in_fp32:
                layer.zero_grad()
        return seen

    total = run(in_fp32=True)[-1].double()
    exact = torch.stack(run(in_fp32=False)).double().sum(0)
    # Each use's gradient is BF16 in both; where the engine adds two of them first, it rounds: 2^-9 of each.
    assert float((total - exact).norm() / exact.norm()) < 2**-8


def test_with_a_compiled_model():
    model, drawn = FixedGradient(), gradients(4)
    GradientAccumulator(model)
    compiled = torch.compile(model, backend="aot_eager")
    for gradient in drawn:
        compiled(gradient).backward()
    assert torch.equal(model.weight.grad, torch.from_numpy(numpy_sum(drawn, np.float32)).to(BF16))


@pytest.mark.parametrize("change", ["unfrozen", "replaced"])
def test_parameters_that_become_trainable_later_get_the_same_bits(change):
    model, from_the_start, drawn = FixedGradient(), FixedGradient(), gradients(6)
    model.weight.requires_grad_(change == "replaced")
    accumulator = GradientAccumulator(model)
    if change == "unfrozen":
        model.weight.requires_grad_()
    else:
        model(drawn[0]).backward()
        model.weight = torch.nn.Parameter(torch.zeros(SIZE, dtype=BF16))
    GradientAccumulator(from_the_start)
    plain = FixedGradient()
    for gradient in drawn:
        accumulator.watch_parameters()
        for module in (model, from_the_start, plain):
            module(gradient).backward()
    assert torch.equal(model.weight.grad, from_the_start.weight.grad)
    assert not torch.equal(model.weight.grad, plain.weight.grad)


def test_a_model_and_its_replaced_parameters_are_freed():
    model = FixedGradient()
    accumulator = GradientAccumulator(model)
    for gradient in gradients(2):
        model(gradient).backward()
    before = weakref.ref(model.weight)
    model.weight = torch.nn.Parameter(torch.zeros(SIZE, dtype=BF16))
    accumulator.watch_parameters()
    gc.collect()
    assert before() is None
    assert accumulator.nbytes == 0
    last = weakref.ref(model.weight)
    del model
    gc.collect()
    assert last() is None
