"""The kernels that Triton compiles for NVIDIA GPUs, executed in NumPy: their steps have the bits of `eager`.

Kernels, tables and launches are the backend's own; only the GPU is emulated. See docs/contributing/gpu.md.
"""

import itertools

import pytest
import torch
from torch import nn

from hf_lowprec.optim import Adafactor, AdamW
from tests.support.chosen_cases import nightly_except
from tests.support.optim.emulated_gpu import CAPABILITIES, EmulatedGpu
from tests.support.optim.every_optimizer import NAMES, OPTIONS
from tests.support.optim.trained_everywhere import EVERY_MODE, same, trained
from tests.support.triton_available import require_triton

require_triton()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CLIPPED = (BF16, {"rounding": "kahan", "max_grad_norm": 1.0, "skip_nonfinite": True})
"""The third step is skipped, since some gradients are NaN."""
CASES = [*itertools.product(NAMES, EVERY_MODE), ("SGD", CLIPPED)]
FEW = [("AdamW", (BF16, {"rounding": "stochastic", "state_dtype": torch.int8})), ("SGD", CLIPPED)]
"""Those of the short suite, since a second per kernel is the compiler's."""


@pytest.mark.combinations(1)
@pytest.mark.parametrize("capability", nightly_except({80, 90}, CAPABILITIES))
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}-{str(case[1][0])[6:]}-{case[1][1]}",
            marks=() if case in FEW else pytest.mark.every_case,
        )
        for case in CASES
    ],
)
def test_a_step_has_the_same_bits(name, mode, capability):
    dtype, options = mode
    options = {**OPTIONS[name][0], **options}
    gpu = EmulatedGpu(capability)
    with gpu.steps():
        stepped = trained(name, dtype, "triton", **options)
    assert gpu.launches["step"] >= 3 or name == "Muon"  # its matrices
    assert gpu.launches["step_ragged"] >= 3
    assert (gpu.launches["tensor_sum"] > 0) == (name in ("Adafactor", "Prodigy", "StableAdamW"))
    assert (gpu.launches["square_sum"] > 0) == ("max_grad_norm" in options)
    assert same(stepped, trained(name, dtype, "eager", **options))
    weight = stepped[4]
    assert weight.isnan().any()
    assert not weight.isnan().all()


@pytest.mark.parametrize("dtype", nightly_except({BF16}, [BF16, FP16, FP32]))
def test_the_sum_of_squares(dtype):
    """Of a whole chunk, of the end of a tensor, of misaligned gradients, and of some that have to be scaled."""
    generator = torch.Generator().manual_seed(2)
    params = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (8192 + 1000, 1001, 500)]
    for param, scale, shift in zip(params, (1.0, 1e-3, 1e-30), (0, 1, 0), strict=True):
        values = torch.randn(param.numel() + shift, generator=generator, dtype=torch.float64) * scale
        param.grad = values.to(dtype)[shift:]
    gpu = EmulatedGpu(90)
    with gpu.steps(), AdamW(params, backend="triton").plan_step() as plan:
        (step,) = plan.backend_steps
        total = step.square_sum()
    expected = sum(param.grad.double().square().sum() for param in params)
    assert gpu.launches["square_sum"] == 1
    assert abs(total / expected - 1) <= 2 * 2.0**-41  # see `test_sums.py`


@pytest.mark.every_case  # that the kernel is right, tests/optim/test_backends.py sees
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_sums_over_rows_and_columns(dtype):
    """Of tiles that are whole or not, also in the row of a tile, of several matrices, and of misaligned gradients."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(1026, 1032), (3, 65, 70), (1, 4099), (5, 2048)]
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for param, shift in zip(params, (0, 0, 1, 1), strict=True):
        values = torch.randn(param.numel() + shift, generator=generator, dtype=torch.float64)
        param.grad = values.to(dtype)[shift:].view(param.shape)
    gpu = EmulatedGpu(90)
    with gpu.steps(), Adafactor(params, backend="triton").plan_step() as plan:
        (step,) = plan.backend_steps
        step.fused_group.step_scalars.compute(Adafactor(params).scalars)
        sums = step.matrix_sums()
    assert gpu.launches["matrix_sum"] == 1
    for k, param in enumerate(params):
        squares = param.grad.float().square().double()
        for found, dim in zip(sums[k], (-1, -2), strict=True):
            expected = squares.sum(dim).view(-1)
            # FP64 sums of n nonnegative terms are off by at most n·2⁻⁵³.
            assert found.shape == expected.shape
            assert ((found / expected - 1).abs() <= 2 * param.shape[dim] * 2.0**-53).all()
