"""Sums over micro-batches against FP32 and FP64 sums of the same gradients, computed with NumPy."""

import contextlib
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


def backward(accumulator: GradientAccumulator, loss: torch.Tensor, **kwargs) -> None:
    with accumulator.active():
        loss.backward(**kwargs)


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


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_fp32_sums_are_rounded_once_and_valid_at_any_time(dtype):
    """FP32 parameters are summed in FP64."""
    model = FixedGradient(dtype)
    accumulator = GradientAccumulator(model)
    drawn, wide = gradients(7, dtype), np.float64 if dtype == FP32 else np.float32
    for count, gradient in enumerate(drawn, 1):
        backward(accumulator, model(gradient))
        # NumPy's addition is IEEE's; torch's cast rounds to nearest, which tests of rounding show.
        assert torch.equal(model.weight.grad, torch.from_numpy(numpy_sum(drawn[:count], wide)).to(dtype))
    assert model.weight.grad.dtype == dtype
    assert accumulator.nbytes == 2 * SIZE * dtype.itemsize


def in_place(tensor: torch.Tensor, times: int) -> torch.Tensor:
    for _ in range(times):
        tensor.mul_(1.0)
    return tensor


@pytest.mark.parametrize(
    ("change", "start"),
    [
        (lambda param: setattr(param, "grad", None), 0.0),
        (lambda param: param.grad.zero_(), 0.0),
        (lambda param: param.grad.mul_(0.5), 0.5),
        (lambda param: setattr(param, "grad", param.grad * 0.5), 0.5),
        (lambda param: setattr(param, "grad", in_place(param.grad * 0.5, param.grad._version)), 0.5),
    ],
    ids=["None", "zeroed", "in place", "replaced", "replaced by a tensor of the same version"],
)
def test_a_new_sum_begins_from_a_gradient_that_other_code_has_changed(change, start):
    model, drawn = FixedGradient(), gradients(5)
    accumulator = GradientAccumulator(model)
    for gradient in drawn[:3]:
        backward(accumulator, model(gradient))
    total = model.weight.grad.float() * start
    change(model.weight)
    for gradient in drawn[3:]:
        backward(accumulator, model(gradient))
        total += gradient.float()
    assert torch.equal(model.weight.grad, total.to(BF16))


def test_other_uses_of_autograd_are_left_alone():
    """`torch.autograd.grad`, backward passes of other loops, a kept graph, and hooks of the user's on the parameter."""
    model, plain = FixedGradient(), FixedGradient()
    accumulator = GradientAccumulator(model)
    seen: list[torch.Tensor] = []
    first, second, third = gradients(3)
    backward(accumulator, model(first))
    model.weight.register_hook(seen.append)
    backward(accumulator, model(second))
    assert torch.equal(seen[0], second)
    before = model.weight.grad.clone()
    with accumulator.active():
        (gradient,) = torch.autograd.grad(model(third), model.weight)
    assert torch.equal(gradient, third)
    assert torch.equal(model.weight.grad, before)
    plain.weight.grad = before.clone()
    for loss in (model(third), plain(third)):
        loss.backward()
    assert torch.equal(model.weight.grad, plain.weight.grad)
    model.weight.grad = None
    backward(accumulator, (model.weight * third).square().sum(), create_graph=True)
    backward(accumulator, (model.weight * third).square().sum(), create_graph=True)
    (twice,) = torch.autograd.grad(model.weight.grad.sum(), model.weight)
    assert torch.equal(twice, 4 * third.square())  # of 2 · 2 (w · g) · g, in powers of two of one rounding
    model.weight.grad = None


def test_signed_zeros_infinities_and_nans_arrive():
    model = FixedGradient(size=5)
    accumulator = GradientAccumulator(model)
    inf, nan = math.inf, math.nan
    backward(accumulator, model(torch.tensor([-0.0, inf, inf, 1.0, nan], dtype=BF16)))
    backward(accumulator, model(torch.tensor([-0.0, 1.0, -inf, nan, 0.0], dtype=BF16)))
    zero, *others = model.weight.grad.tolist()
    assert zero == 0
    assert math.copysign(1, zero) == -1
    assert others[0] == inf
    assert all(map(math.isnan, others[1:]))
    backward(accumulator, model(torch.ones(5, dtype=BF16)))
    assert model.weight.grad[1] == inf


def test_a_model_with_sums_can_be_copied_and_pickled():
    model = FixedGradient()
    accumulator = GradientAccumulator(model)
    for gradient in gradients(2):
        backward(accumulator, model(gradient))
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
        accumulator = GradientAccumulator(layer)
        seen = []
        for part in inputs:
            part = part.clone().requires_grad_()
            hidden = checkpoint(layer, part, use_reentrant=reentrant)
            with accumulator.active() if in_fp32 else contextlib.nullcontext():
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
    accumulator = GradientAccumulator(model)
    compiled = torch.compile(model, backend="aot_eager")
    for gradient in drawn:
        backward(accumulator, compiled(gradient))
    assert torch.equal(model.weight.grad, torch.from_numpy(numpy_sum(drawn, np.float32)).to(BF16))


@pytest.mark.parametrize("change", ["unfrozen", "replaced"])
def test_parameters_that_become_trainable_later_are_included_and_former_ones_freed(change):
    model, drawn = FixedGradient(), gradients(6)
    model.weight.requires_grad_(change == "replaced")
    accumulator = GradientAccumulator(model)
    former = weakref.ref(model.weight)
    if change == "unfrozen":
        model.weight.requires_grad_()
    else:
        for gradient in drawn:
            backward(accumulator, model(gradient))
        model.weight = torch.nn.Parameter(torch.zeros(SIZE, dtype=BF16))
        gc.collect()
        assert former() is None
        assert accumulator.nbytes == 0
    for gradient in drawn:
        backward(accumulator, model(gradient))
    assert torch.equal(model.weight.grad, torch.from_numpy(numpy_sum(drawn, np.float32)).to(BF16))
    last = weakref.ref(model.weight)
    del model
    gc.collect()
    assert last() is None
    assert accumulator.nbytes == 0
