"""The sum of squares of which the gradient norm is the root, in every backend, compared with integers."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_lowprec.optim import AdamW
from tests.support.optim.fp64_sums import BOUND, USUAL_ERROR
from tests.support.triton_available import device_of, quiet_interpreter, require_triton

pytestmark = quiet_interpreter
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def square_sum(backend: str, *grads: Tensor) -> float:
    params = [nn.Parameter(torch.zeros_like(grad, device=device_of(backend))) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param.device)
    with AdamW(params, backend=backend).plan_step() as plan:
        (step,) = plan.backend_steps
        total = step.square_sum()
    assert (total.dtype, total.shape, total.device) == (torch.float64, (), params[0].device)
    return total.item()


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


def relative_error(total: float, exact: Fraction) -> float:
    return float(abs(Fraction(total) / exact - 1))


def randn(count: int, scale: float = 1.0, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * scale).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_the_sum_of_several_tensors(backend, dtype):
    grads = [randn(count, 1e-3, dtype, seed=count) for count in (100_003, 8192, 1, 0, 2 * 8192)]
    assert relative_error(square_sum(backend, *grads), exact_square_sum(*grads)) <= USUAL_ERROR


@pytest.mark.parametrize("exponent", [-131, -126, -100, -75, -63, -43, -42, 40, 60, 64, 100, 124])
def test_gradients_whose_squares_have_no_place_in_fp32(backend, exponent):
    """Their squares underflow and overflow in FP32, where all of them are far from the limits of FP64."""
    grad = randn(20_000, 2.0**exponent).clamp(*(sign * torch.finfo(BF16).max for sign in (-1, 1)))
    exact = exact_square_sum(grad)
    assert exact > 0
    assert relative_error(square_sum(backend, grad), exact) <= USUAL_ERROR


def test_a_chunk_of_the_largest_numbers(backend):
    grad = torch.full((8192 + 5,), torch.finfo(BF16).max, dtype=BF16)
    assert square_sum(backend, grad) == float(exact_square_sum(grad))


def test_zeros(backend):
    grad = torch.zeros(20_000, dtype=BF16)
    grad[::2] = -0.0
    assert square_sum(backend, grad) == 0.0
    grad[17_000] = 2.0**-133
    assert square_sum(backend, grad) == 2.0**-266


@pytest.mark.parametrize("large_first", [False, True])
def test_small_squares_are_not_lost_in_large_ones(backend, large_first):
    """One square of 1 for 63 of 2⁻²⁶ in a thread: an FP32 sum of them would be off by 63·2⁻²⁶, the total by 2⁻²⁰."""
    grad = torch.full((8, 1024), 2.0**-13, dtype=BF16)
    grad[0 if large_first else -1, ::8] = 1.0
    grad = grad.flatten()
    assert square_sum(backend, grad) == float(exact_square_sum(grad))


def test_the_bound_of_pairs(backend):
    """Squares whose errors and errors of errors are as large as squares of 16 bits allow, in random order."""
    generator = torch.Generator().manual_seed(0)
    mantissas = torch.randint(128, 256, (16, 8192), generator=generator).double()
    exponents = torch.randint(-24, 1, (16, 8192), generator=generator)
    for grad in (mantissas * torch.exp2(exponents.double())).to(BF16):
        assert relative_error(square_sum(backend, grad), exact_square_sum(grad)) <= BOUND


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_the_norm_in_fp32_does_not_depend_on_how_tensors_are_cut(backend, dtype):
    generator = torch.Generator().manual_seed(3)
    for seed in range(2):
        grad = randn(30_011, 1e-2, dtype, seed)
        norms = set()
        for parts in (1, 2, 9):
            cuts = torch.randint(0, 30_012, (parts - 1,), generator=generator).sort().values
            grads = [part.clone() for part in grad.tensor_split(cuts)]
            norms.add(torch.tensor(square_sum(backend, *grads), dtype=torch.float64).sqrt().float().item())
        assert len(norms) == 1


@pytest.mark.parametrize(
    ("dtype", "scale"), [(BF16, 0), (BF16, 2.0**-70), (BF16, 1), (BF16, 2.0**90), (FP16, 1), (FP32, 1)]
)
@pytest.mark.parametrize("bad", [(math.inf,), (-math.inf,), (math.nan,), (math.inf, -math.inf), (math.inf, math.nan)])
def test_numbers_that_are_not_finite(backend, dtype, scale, bad):
    """Infinity gives infinity and NaN gives NaN, in a full chunk and in the last one, alone or together in a lane."""
    for first in (7000, 8192 + 2):
        grad = randn(8192 + 1100, scale, dtype)
        for k, value in enumerate(bad):
            grad[first + 1024 * k] = value
        total = square_sum(backend, grad)
        assert math.isnan(total) if any(map(math.isnan, bad)) else total == math.inf


def test_misaligned_gradients(backend):
    storage = randn(3 * 8192)
    for shift in (1, 4, 8):
        grad = storage[shift : shift + 2 * 8192 + 3]
        assert relative_error(square_sum(backend, grad), exact_square_sum(grad)) <= USUAL_ERROR


def test_the_triton_kernel_is_compiled_without_contraction(monkeypatch):
    """Triton 3.9 also warns of launches that leave this to a default, which differs between its versions."""
    require_triton()
    from hf_lowprec.optim.backends.triton import square_sum as triton_square_sum

    kernel, options = triton_square_sum.square_sum, []

    class Recorded:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: (options.append(kwargs), kernel[grid](*args, **kwargs))

    monkeypatch.setattr(triton_square_sum, "square_sum", Recorded())
    square_sum("triton", randn(100))
    (launch,) = options
    assert launch["enable_fp_fusion"] is False
