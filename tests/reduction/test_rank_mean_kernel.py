"""The Triton kernel of the mean: the bits of the NumPy reference, in its interpreter, and machine code for sm_90."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.reduction.numpy_reference import ALL_PATTERNS, as_tensor, bf16_to_fp32, gradients, mean, same_bits
from tests.support.triton_available import require_triton

# Triton's interpreter computes with NumPy, which warns of overflow and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def result(versions: list[np.ndarray], divisor: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    require_triton()
    from hf_lowprec.reduction.rank_mean_kernel import launch_mean

    stacked = torch.stack([as_tensor(version) for version in versions]).to(DEVICE)
    out = torch.full(stacked.shape[1:], 7, dtype=dtype or stacked.dtype, device=DEVICE)
    assert launch_mean(stacked, divisor or len(versions), out) is out
    return out.cpu()


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.every_case) for ranks in (1, 8))])
def test_the_kernel_over_all_bit_patterns(ranks):
    random = np.random.default_rng(ranks)
    anything = [ALL_PATTERNS, *(random.permutation(ALL_PATTERNS) for _ in range(ranks - 1))]
    opposite = [ALL_PATTERNS, *(ALL_PATTERNS ^ np.uint16(0x8000 if rank % 2 else 1) for rank in range(1, ranks))]
    for versions in (anything, opposite):
        assert same_bits(result(versions), mean(versions))
    halves = [version.view(np.float16) for version in anything]
    assert same_bits(result(halves), mean(halves))


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 5001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_for_any_size(dtype, count):
    versions = gradients(dtype, (count,), 3, seed=count)
    assert same_bits(result(versions), mean(versions))


def test_the_kernel_keeps_order():
    versions = gradients(torch.bfloat16, (3000,), 4, seed=3)
    assert not same_bits(as_tensor(mean(versions)), mean(versions[::-1]))
    assert same_bits(result(versions), mean(versions))


def test_the_kernel_sums_into_fp32():
    versions = gradients(torch.bfloat16, (2000,), 2, seed=6)
    with np.errstate(all="ignore"):
        assert same_bits(result(versions, 1, torch.float32), bf16_to_fp32(versions[0]) + bf16_to_fp32(versions[1]))


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
