"""The Triton kernel of the mean: the bits of the definition, in its interpreter, and machine code for sm_90."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.reduction.definition import ALL, agrees, as_tensor, gradients, mean, widen
from tests.triton_here import require_triton

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def result(versions: list[np.ndarray], divisor: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    require_triton()
    from hf_lowprec.reduction.kernels import launch_mean

    stacked = torch.stack([as_tensor(version) for version in versions]).to(DEVICE)
    out = torch.full(stacked.shape[1:], 7, dtype=dtype or stacked.dtype, device=DEVICE)
    assert launch_mean(stacked, divisor or len(versions), out) is out
    return out.cpu()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_kernel_over_all_bit_patterns(ranks):
    random = np.random.default_rng(ranks)
    anything = [ALL, *(random.permutation(ALL) for _ in range(ranks - 1))]
    opposite = [ALL, *(ALL ^ np.uint16(0x8000 if rank % 2 else 1) for rank in range(1, ranks))]
    for versions in (anything, opposite):
        assert agrees(result(versions), mean(versions))
    halves = [version.view(np.float16) for version in anything]
    assert agrees(result(halves), mean(halves))


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 5001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_for_any_size(dtype, count):
    versions = gradients(dtype, (count,), 3, seed=count)
    assert agrees(result(versions), mean(versions))


def test_the_kernel_keeps_order():
    versions = gradients(torch.bfloat16, (3000,), 4, seed=3)
    assert not agrees(as_tensor(mean(versions)), mean(versions[::-1]))
    assert agrees(result(versions), mean(versions))


def test_the_kernel_sums_into_fp32():
    versions = gradients(torch.bfloat16, (2000,), 2, seed=6)
    with np.errstate(all="ignore"):
        assert agrees(result(versions, 1, torch.float32), widen(versions[0]) + widen(versions[1]))


COMPILE = """
import re, sys, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_lowprec.reduction import kernels

types, wide, narrow, ones = sys.argv[1].split(","), getattr(tl, sys.argv[2]), sys.argv[3] == "True", sys.argv[4:]
signature = dict(zip(["versions", "out"], types)) | {"ranks": "i32", "count": "i32", "divisor": "fp32"}
constants = {"WIDE": wide, "NARROW": narrow, "BLOCK": kernels._BLOCK} | dict.fromkeys(ones, 1)
order = ["versions", "out", "ranks", "count", "divisor", "WIDE", "NARROW", "BLOCK"]
signature = {name: "constexpr" if name in constants else signature[name] for name in order}
source = ASTSource(kernels.mean, signature, constants)
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
ptx = kernel.asm["ptx"]
assert kernel.asm["cubin"]
assert not re.search(r"\\bfma\\.rn\\.f32|\\.ftz\\b|\\.approx\\b", ptx), "not IEEE arithmetic"
assert re.search(r"div\\.rn\\.f" + sys.argv[2][-2:], ptx), "no IEEE division"
assert ".local" not in ptx, "spills"
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's tools are for Linux")
@pytest.mark.parametrize(
    "arguments",
    [
        ("*bf16,*i16", "float32", "True"),
        ("*bf16,*fp32", "float32", "False"),
        ("*fp16,*fp16", "float32", "False"),
        ("*fp32,*fp32", "float64", "False"),
        # Triton compiles an integer argument that is 1 as a constant: one element per rank, one rank.
        ("*bf16,*i16", "float32", "True", "count"),
        ("*bf16,*i16", "float32", "True", "ranks"),
    ],
    ids=" ".join,
)
def test_the_kernel_compiles_for_sm_90(arguments):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
