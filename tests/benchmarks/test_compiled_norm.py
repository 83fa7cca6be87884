"""The kernel of the gradient norm, compiled without a GPU: hardly any FP64, wide accesses, no flushes to zero."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="Triton's tools are for Linux")]
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_lowprec.optim.backends.triton.launch import BLOCK, CHUNK, WARPS
from hf_lowprec.optim.backends.triton.square_sum import square_sum

tables = {"chunks": "*i64", "segments": "*i64", "pointers": "*i64", "sums": "*fp64"}
constants = {"COLUMNS": 6, "TENSORS": 5, "DTYPE": tl.bfloat16, "CHUNK": CHUNK, "BLOCK": BLOCK}
aligned = {(k,): [["tt.divisibility", 16]] for k in range(len(tables))}
source = ASTSource(square_sum, tables | dict.fromkeys(constants, "constexpr"), constants, aligned)
options = {"num_warps": WARPS, "enable_fp_fusion": False}
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


@pytest.mark.every_case
def test_instructions_of_the_norm():
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    ptx = done.stdout
    # A thread has 64 elements, twice in the code, for what is computed again. Twelve operations convert its pair, add
    # and compare; a norm with FP64 for each element would have 256.
    assert len(re.findall(r"\b(?:cvt|add|sub|mul|fma|setp)\.\S*f64", ptx)) < 64
    assert len(re.findall(r"\bfma\.rn\.f32\b", ptx)) >= 2 * 2 * 64
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) == 2 * 8
    assert not re.findall(r"\.ftz\b|\.approx\b", ptx)
