"""Sums over tensors in every backend: of squares, whose root is the norm, and of the terms of StableAdamW's mean."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_lowprec.optim import AdamW, StableAdamW
from hf_lowprec.optim.step.fused_step import evaluate
from tests.support.triton_available import device_of, quiet_interpreter, rarely_on_triton

pytestmark = quiet_interpreter
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUND = 2.0**-41
"""Relative error that `square_sum` in `backends/triton/handwritten_kernels.py` derives for pairs of FP32 numbers."""
USUAL_ERROR = 2.0**-45
"""n additions in FP64 whose errors do not conspire are off by √n·2⁻⁵³; `eager` adds chunks of 2¹⁶, the others less."""


def parameters(backend: str, grads: list[Tensor]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros_like(grad, device=device_of(backend))) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param.device)
    return params


def square_sum(backend: str, *grads: Tensor) -> float:
    params = parameters(backend, grads)
    with AdamW(params, rounding="kahan", backend=backend).plan_step() as plan:
        (step,) = plan.backend_steps
        total = step.square_sum()
    assert (total.dtype, total.shape, total.device) == (torch.float64, (), params[0].device)
    return total.item()


def sums_and_terms(optimizer: StableAdamW) -> tuple[list[float], list[Tensor]]:
    """The backend's sum for each parameter in the coming step, and the FP32 terms that it should add up, by `eager`."""
    with optimizer.plan_step() as plan:
        (step,) = plan.backend_steps
        group = step.fused_group
        group.step_scalars.compute(optimizer.scalars)
        sums = step.tensor_sums()
        assert (sums.dtype, sums.shape) == (torch.float64, (len(group.entries), 1))
        ((_, formula),) = group.spec.tensor_means
        terms = [
            evaluate(formula, group.spec, *group.elements(k, slice(0, entry.weight.numel())))
            for k, entry in enumerate(group.entries)
        ]
    return sums[:, 0].tolist(), terms


def tensor_sum(backend: str, grad: Tensor) -> float:
    """The sum for gradients of at most 1, which in a first step with ε = 1 has the terms g² / max(g², ε²) = g²."""
    optimizer = StableAdamW(parameters(backend, [grad]), betas=(0.9, 0.5), eps=1.0, backend=backend)
    (total,), (terms,) = sums_and_terms(optimizer)
    assert torch.equal(terms.cpu(), grad.float().square()) or not grad.isfinite().all()
    return total


def exact_square_sum(*grads: Tensor) -> Fraction:
    """The sum of squares of finite numbers, added up as integers."""
    total = Fraction(0)
    for grad in grads:
        mantissa, exponent = np.frexp(grad.flatten().double().numpy())
        squares = (mantissa * 2.0**24).astype(np.int64) ** 2  # of 48 bits
        for twice in np.unique(exponent):
            same = squares[exponent == twice]
            count = int(np.sum(same >> 24)) * 2**24 + int(np.sum(same & (2**24 - 1)))
            total += count * Fraction(2) ** (2 * int(twice) - 48)
    return total


def randn(count: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64) * scale
    return values.clamp(*(sign * torch.finfo(dtype).max for sign in (-1, 1))).to(dtype)


def pairs_with_large_errors() -> Tensor:
    """Squares whose errors and errors of errors are as large as squares of 16 bits allow, in random order."""
    generator = torch.Generator().manual_seed(0)
    mantissas = torch.randint(128, 256, (8192,), generator=generator).double()
    return (mantissas * torch.exp2(torch.randint(-24, 1, (8192,), generator=generator).double())).to(BF16)


EXPONENTS = [-131, -126, -100, -75, -63, -43, -42, 40, 60, 64, 100, 124]
"""Of gradients whose squares underflow and overflow in FP32, where all of them are far from the limits of FP64."""
SUMS = {
    **{str(dtype): [randn(n, 1e-3, dtype) for n in (100_003, 8192, 1, 0, 16384)] for dtype in (BF16, FP16, FP32)},
    **{f"2**{exponent}": [randn(20_000, 2.0**exponent)] for exponent in EXPONENTS},
    "misaligned": [randn(3 * 8192)[shift : shift + 16387] for shift in (1, 4, 8)],
}


@pytest.mark.parametrize("name", SUMS)
def test_the_sum_of_squares(backend, name):
    grads = SUMS[name]
    assert abs(Fraction(square_sum(backend, *grads)) / exact_square_sum(*grads) - 1) <= USUAL_ERROR


def test_the_bound_of_pairs(backend):
    grad = pairs_with_large_errors()
    assert abs(Fraction(square_sum(backend, grad)) / exact_square_sum(grad) - 1) <= BOUND


def special(first: float, place: int, value: float, size: int = 8192 + 1100) -> Tensor:
    grad = torch.full((size,), first, dtype=BF16)
    grad[place] = value
    return grad


LARGE_AND_SMALL = torch.full((8, 1024), 2.0**-13, dtype=BF16)
LARGE_AND_SMALL[0, ::8] = 1.0
EXACT = {
    # One square of 1 for 63 of 2⁻²⁶ in a thread: an FP32 sum of them would be off by 63·2⁻²⁶, the total by 2⁻²⁰.
    "large first": LARGE_AND_SMALL.flatten(),
    "large last": LARGE_AND_SMALL.flip(0).flatten(),
    "zeros": torch.tensor([0.0, -0.0] * 8192, dtype=BF16),
    "one subnormal square": special(-0.0, 9000, 2.0**-74),  # which is FP32's smallest number, doubled
    "one tiny square": special(0.0, 9000, 2.0**-133),
    "the largest": torch.full((8192 + 5,), torch.finfo(BF16).max, dtype=BF16),
}


@pytest.mark.parametrize("name", EXACT)
def test_sums_that_are_exact(backend, name):
    grad = EXACT[name]
    assert square_sum(backend, grad) == exact_square_sum(grad)
    if name not in ("the largest", "one tiny square"):
        assert tensor_sum(backend, grad) == exact_square_sum(grad)


@pytest.mark.parametrize("scale", [0, 2.0**-70, 1, 2.0**90])
@pytest.mark.parametrize("bad", [(math.inf,), (-math.inf,), (math.nan,), (math.inf, -math.inf), (math.inf, math.nan)])
def test_numbers_that_are_not_finite(backend, scale, bad):
    """Infinity gives infinity and NaN gives NaN, in a full chunk and in the last one, alone or together in a lane."""
    for first in (7000, 8192 + 2):
        grad = randn(8192 + 1100, scale)
        for k, value in enumerate(bad):
            grad[first + 1024 * k] = value
        total = square_sum(backend, grad)
        assert math.isnan(total) if any(map(math.isnan, bad)) else total == math.inf
        if scale == 1:
            assert math.isnan(tensor_sum(backend, grad))  # ∞ / ∞


@rarely_on_triton()
@pytest.mark.combinations(1)
@pytest.mark.parametrize("state_dtype", [BF16, FP32, torch.int8], ids=str)
def test_the_sums_of_several_tensors(backend, state_dtype):
    """In the second step, with gradients that have grown or shrunk by up to 2¹⁶, so that terms differ as well."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 8192), (8192,), (300, 32), (1,), (20_011,)]
    if state_dtype == torch.int8:  # other shapes have states in BF16
        shapes = [(257, 32), (3, 8192)]
    params = [nn.Parameter(torch.zeros(shape, dtype=BF16, device=device_of(backend))) for shape in shapes]
    optimizer = StableAdamW(params, backend=backend, state_dtype=state_dtype)
    for _ in range(2):
        for param in params:
            size = torch.exp2(torch.randint(-8, 9, param.shape, generator=generator).float())
            param.grad = (size * torch.randn(param.shape, generator=generator)).to(param.device, BF16)
        sums, terms = sums_and_terms(optimizer)
        optimizer.step()
    for total, values in zip(sums, terms, strict=True):
        assert values.max() < 101  # 1 / (1 - β2), and roundings
        assert len(values) == 1 or values.min() < 2.0**-10
        assert abs(total / math.fsum(values.double().tolist()) - 1) <= USUAL_ERROR
