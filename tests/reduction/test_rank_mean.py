"""The mean over ranks has the bits of the NumPy reference: in torch, and in Triton's interpreter or on a GPU.

The Triton kernel is also compiled to machine code for sm_90.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_lowprec.reduction import mean_in_rank_order, rank_mean
from hf_lowprec.reduction.rank_mean import CHUNK
from tests.support.reduction.numpy_reference import (
    ALL_PATTERNS,
    as_tensor,
    bf16_to_fp32,
    gradients,
    mean,
    mean_in_16_bits,
    round_to_bf16,
    same_bits,
)
from tests.support.triton_available import require_triton

# Triton's interpreter computes with NumPy, which warns of overflow and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "torch": (0, 1, 2, 3, 63, 1001, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5),
    "triton": (0, 1, 1023, 1024, 1025, 5001),
}
EITHER = pytest.mark.parametrize("implementation", SIZES)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Result = Callable[..., torch.Tensor]


@pytest.fixture
def result(implementation: str) -> Result:
    """Returns the mean by one implementation, after checking that it left its argument as it was."""
    compute, device = mean_in_rank_order, "cpu"
    if implementation == "triton":
        require_triton()
        from hf_lowprec.reduction.rank_mean_kernel import launch_mean

        compute, device = launch_mean, "cuda" if torch.cuda.is_available() else "cpu"

    def run(versions: Sequence[np.ndarray], divisor: int | None = None, dtype: torch.dtype | None = None):
        stacked = torch.stack([as_tensor(version) for version in versions]).to(device)
        out = torch.full(stacked.shape[1:], 7, dtype=dtype or stacked.dtype, device=device)
        before = stacked.clone()
        assert compute(stacked, divisor or len(versions), out) is out
        assert torch.equal(stacked.nan_to_num(), before.nan_to_num())
        return out.cpu()

    return run


def test_the_rounding_of_the_definition_is_the_nearest_of_all_values():
    """Checked by exact distances, so that the reference itself is tested."""
    finite = bf16_to_fp32(ALL_PATTERNS)[np.isfinite(bf16_to_fp32(ALL_PATTERNS))].astype(np.float64)
    grid = np.unique(finite)
    values = np.random.default_rng(0).integers(0, 0x7F7F_0000, 20_000, dtype=np.uint32)
    values[:4000] = values[:4000] & 0xFFFF_0000 | 0x8000
    values = values.view(np.float32)
    above = np.searchsorted(grid, values.astype(np.float64)).clip(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    rounded = bf16_to_fp32(round_to_bf16(values)).astype(np.float64)
    wide = values.astype(np.float64)
    assert np.array_equal(np.abs(rounded - wide), np.minimum(wide - low, high - wide))
    tie = wide - low == high - wide
    assert tie.sum() > 3000
    assert not (round_to_bf16(values)[tie] & 1).any()


@pytest.mark.parametrize(
    ("implementation", "ranks"),
    [
        *(("torch", ranks) for ranks in (1, 2, 3, 4, 8)),
        *(("triton", 3), *(pytest.param("triton", ranks, marks=pytest.mark.every_case) for ranks in (1, 8))),
    ],
)
def test_the_mean_over_all_bit_patterns(result: Result, ranks: int) -> None:
    """Every pattern meets random ones, those of its own exponent, and its negative."""
    random, others = np.random.default_rng(ranks), range(1, ranks)
    anything = [ALL_PATTERNS, *(random.permutation(ALL_PATTERNS) for _ in others)]
    similar = [ALL_PATTERNS, *(ALL_PATTERNS ^ random.integers(0, 128, 1 << 16, dtype=np.uint16) for _ in others)]
    opposite = [ALL_PATTERNS, *(ALL_PATTERNS ^ (0x8000 if k % 2 else random.choice(4, 1 << 16)) for k in others)]
    for versions in (anything, similar, opposite, [ALL_PATTERNS] * ranks):
        versions = [version.astype(np.uint16) for version in versions]
        assert same_bits(result(versions), mean(versions))
    halves = [version.view(np.float16) for version in anything]
    for divisor in (ranks, 1):
        assert same_bits(result(halves, divisor), mean(halves, divisor))


@EITHER
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_order_and_width_would_show_on_these_gradients(result: Result, ranks: int) -> None:
    versions = gradients(BF16, (4000,), ranks, seed=1)
    assert not same_bits(as_tensor(mean(versions)), mean(versions[::-1]))
    assert not same_bits(as_tensor(mean(versions)), mean_in_16_bits(versions))
    assert same_bits(result(versions), mean(versions))


@pytest.mark.parametrize(("implementation", "count"), [(name, n) for name, sizes in SIZES.items() for n in sizes])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_any_size(result: Result, dtype: torch.dtype, count: int) -> None:
    versions = gradients(dtype, (count,), 3, seed=count)
    assert same_bits(result(versions), mean(versions))


@EITHER
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_sum_into_fp32_is_not_rounded_to_16_bits(result: Result, ranks: int) -> None:
    """FSDP2 goes on computing with an FP32 sum."""
    versions = gradients(BF16, (3000,), ranks, seed=5)
    with np.errstate(all="ignore"):
        total = bf16_to_fp32(versions[0])
        for version in versions[1:]:
            total = total + bf16_to_fp32(version)
    assert same_bits(result(versions, 1, FP32), total)


@EITHER
@pytest.mark.parametrize("ranks", [3, 5, 8])
def test_means_of_fp32_are_exact_for_equal_values_and_else_correctly_rounded(result: Result, ranks: int) -> None:
    values = np.random.default_rng(0).integers(0, 1 << 32, 20_000, dtype=np.uint32).view(np.float32)
    assert same_bits(result([values] * ranks), values)
    versions = [np.random.default_rng(rank).uniform(0.25, 2, 300).astype(np.float32) for rank in range(ranks)]
    for mine, *numbers in zip(result(versions).tolist(), *(version.tolist() for version in versions), strict=True):
        exact = sum(map(Fraction, numbers)) / ranks
        near = np.float32(mine)
        for neighbour in (np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))):
            assert abs(Fraction(mine) - exact) <= abs(Fraction(float(neighbour)) - exact)


def test_out_may_be_one_of_the_versions_to_send() -> None:
    """DDP's hook writes the mean over the shard of the bucket that was sent."""
    versions = gradients(BF16, (4, 999), 1, seed=2)[0]
    sent = as_tensor(versions[1])
    mean_in_rank_order(as_tensor(versions), 4, sent)
    assert same_bits(sent, mean(list(versions)))


@pytest.mark.parametrize("implementation", ["torch"])
def test_blocks_are_no_part_of_the_result(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = gradients(BF16, (1000,), 3, seed=4)
    monkeypatch.setattr(rank_mean, "CHUNK", 7)
    assert same_bits(result(versions), mean(versions))


COMPILE = """
import re, sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_lowprec.reduction import rank_mean_kernel as mean_kernel

class Recorder:
    # What is launched, in the place of the kernel.
    def __getitem__(self, grid):
        def launch(*values, **options):
            self.values, self.options = values, options
        return launch

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int16: "*i16"}
kernel, mean_kernel.mean = mean_kernel.mean, Recorder()

def compiled(source, target, division, ranks=4, count=1000):
    per_rank = torch.ones(ranks, count, dtype=getattr(torch, source))
    mean_kernel.launch_mean(per_rank, ranks, torch.ones(count, dtype=getattr(torch, target)))
    options, signature, constants = dict(mean_kernel.mean.options), {}, {}
    values = dict(zip(kernel.arg_names, mean_kernel.mean.values))
    values |= {name: options.pop(name) for name in kernel.arg_names if name in options}
    for name in kernel.arg_names:
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif type(value) is int and value != 1 and name.islower():
            signature[name] = "i32"
        else:  # also an integer that is 1: so does Triton when it launches
            signature[name], constants[name] = "constexpr", value
    made = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32), options=options)
    ptx = made.asm["ptx"]
    assert made.asm["cubin"]
    assert not re.search(r"\\bfma\\.|\\.ftz\\b|\\.approx\\b", ptx), "not IEEE arithmetic"
    assert division in ptx, "no IEEE division"
    assert ".local" not in ptx, "spills"

"""
CASES = {
    "mean of BF16": "'bfloat16', 'bfloat16', 'div.rn.f32'",
    "mean of BF16 in FP32": "'bfloat16', 'float32', 'div.rn.f32'",
    "mean of FP16": "'float16', 'float16', 'div.rn.f32'",
    "mean of FP32": "'float32', 'float32', 'div.rn.f64'",
    "one rank": "'bfloat16', 'bfloat16', 'div.rn.f32', 1, 1000",
    "one element": "'bfloat16', 'bfloat16', 'div.rn.f32', 4, 1",
}


@pytest.mark.every_case
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's tools are for Linux")
def test_the_kernel_compiles_for_sm_90():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    calls = "".join(f"print({name!r}, flush=True)\ncompiled({arguments})\n" for name, arguments in CASES.items())
    done = subprocess.run(
        [sys.executable, "-c", COMPILE + calls], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.splitlines() == list(CASES)
