"""The sum over a tensor that StableAdamW's mean is made of, in every backend, compared with exact sums of its terms."""

import math

import pytest
import torch
from torch import Tensor, nn

from hf_lowprec.optim import StableAdamW
from hf_lowprec.optim.step.fused_step import evaluate
from tests.support.optim.fp64_sums import USUAL_ERROR
from tests.support.triton_available import device_of, quiet_interpreter, rarely_on_triton

pytestmark = quiet_interpreter
BF16, FP32 = torch.bfloat16, torch.float32


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


def sum_of_squares(backend: str, grad: Tensor) -> float:
    """The sum for gradients of at most 1, which in a first step with ε = 1 has the terms g² / max(g², ε²) = g²."""
    param = nn.Parameter(torch.zeros_like(grad, device=device_of(backend)))
    param.grad = grad.to(param.device)
    optimizer = StableAdamW([param], betas=(0.9, 0.5), eps=1.0, backend=backend)
    (total,), (terms,) = sums_and_terms(optimizer)
    assert torch.equal(terms.cpu(), grad.float().square())
    return total


def exact_sum(values: Tensor) -> float:
    return math.fsum(values.double().tolist())


def relative_error(total: float, exact: float) -> float:
    return abs(total / exact - 1)


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
        assert relative_error(total, exact_sum(values)) <= USUAL_ERROR


@pytest.mark.parametrize("large_first", [False, True])
def test_small_terms_are_not_lost_in_large_ones(backend, large_first):
    """One term of 1 for 63 of 2⁻²⁶ in a thread: an FP32 sum of them would be off by 63·2⁻²⁶, the total by 2⁻²⁰."""
    grad = torch.full((8, 1024), 2.0**-13, dtype=BF16)
    grad[0 if large_first else -1, ::8] = 1.0
    assert sum_of_squares(backend, grad.flatten()) == exact_sum(grad.float().square().flatten())


def test_zeros_and_subnormal_terms(backend):
    grad = torch.zeros(2 * 8192, dtype=BF16)
    grad[::2] = -0.0
    assert sum_of_squares(backend, grad) == 0.0
    grad[9000:9100] = 2.0**-74  # their squares are twice FP32's smallest number
    assert sum_of_squares(backend, grad) == 100 * 2.0**-148


def test_numbers_that_are_not_finite(backend):
    for special in (math.inf, math.nan):
        for place in (5000, 8192 + 100):
            grad = torch.full((8192 + 1100,), 0.5, dtype=BF16)
            grad[place] = special
            param = nn.Parameter(torch.zeros_like(grad, device=device_of(backend)))
            param.grad = grad.to(param.device)
            (total,), _ = sums_and_terms(StableAdamW([param], backend=backend))
            assert math.isnan(total)  # ∞ / ∞
