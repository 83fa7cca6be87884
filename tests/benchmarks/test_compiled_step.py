"""The Triton step as NVIDIA machine code, compiled without a GPU: no spills, 128-bit accesses, IEEE arithmetic."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="Triton's tools are for Linux")]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "compiled_step.py"
LAYOUTS = ["AdamW kahan bfloat16", "AdamW stochastic bfloat16", "AdamW kahan float32", "SGD kahan bfloat16"]
LAYOUTS += ["StableAdamW kahan bfloat16", "Muon kahan bfloat16"]


def run(*command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=280, check=False
    )


def test_the_kernels_are_what_they_should_be():
    done = run(str(SCRIPT), "--layouts", *LAYOUTS)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if " kahan " in line or " stochastic " in line]
    assert len(rows) == 2 * (len(LAYOUTS) + 1)  # StableAdamW has a measure
    # What an H200 issues per element in the time its memory needs (docs/performance.md): above, issue is the limit.
    assert max(int(row.split("|")[-2]) for row in rows) <= 140


@pytest.mark.parametrize(
    ("plant", "complaint"),
    [
        ("launch.WARPS = 8", "128 bits"),
        ("triton.compile = functools.partial(compile_, fusion=True)", "contraction"),
        ("triton_source.Triton.sqrt_rn = lambda self, value: f'tl.sqrt({value})'", "a guess"),
    ],
)
def test_a_planted_fault_is_reported(plant, complaint):
    program = f"""
import functools, sys, triton
import benchmarks.compiled_step as script
from hf_lowprec.optim.backends import triton as launch
from hf_lowprec.optim.codegen import triton as triton_source
original = triton.compile
def compile_(*args, fusion, options, **kwargs):
    return original(*args, options={{**options, "enable_fp_fusion": fusion}}, **kwargs)
{plant}
sys.argv = ["compiled_step", "--capabilities", "90", "--layouts", "AdamW kahan bfloat16"]
sys.exit(script.main())
"""
    done = run("-c", program)
    assert done.returncode == 1, done.stderr
    assert complaint in done.stdout
