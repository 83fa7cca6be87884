"""The Triton kernels, compiled to NVIDIA machine code without a GPU: no spills, 128-bit accesses, IEEE arithmetic."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="Triton's tools are for Linux")]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "compiled_step.py"
SPECS = ["AdamW kahan bfloat16", "AdamW stochastic bfloat16", "AdamW kahan float32", "SGD kahan bfloat16"]
SPECS += ["StableAdamW kahan bfloat16", "Muon kahan bfloat16"]


def run(*command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=280, check=False
    )


def test_kernels_do_not_spill_and_access_128_bits_at_once():
    done = run(str(SCRIPT), "--specs", *SPECS)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if " kahan " in line or " stochastic " in line]
    assert len(rows) == 2 * (len(SPECS) + 1)  # StableAdamW has a tensor_mean formula
    # What an H200 issues per element in the time its memory needs (docs/performance.md); issue must not be the limit.
    assert max(int(row.split("|")[-2]) for row in rows) <= 140


FAULTS = {
    "triton_backend.WARPS = 8": "128 bits",
    "triton.compile = functools.partial(compile_, fusion=True)": "contraction",
    "TritonRenderer.sqrt_rn = lambda self, value: f'tl.sqrt({value})'": "an approximation",
}
"""Changes of the code, and what is to be reported of each."""


def test_a_planted_fault_is_reported():
    """Each in a child of one process, which has imported everything and compiled nothing."""
    program = f"""
import functools, os, sys, triton
import benchmarks.compiled_step as script
from hf_lowprec.optim.backends import triton_launch as triton_backend
from hf_lowprec.optim.codegen.triton_source import TritonRenderer
original = triton.compile
def compile_(*args, fusion, options, **kwargs):
    return original(*args, options={{**options, "enable_fp_fusion": fusion}}, **kwargs)
sys.argv = ["compiled_step", "--capabilities", "90", "--specs", "AdamW kahan bfloat16"]
for change in {list(FAULTS)}:
    print("CHANGE", change, flush=True)
    child = os.fork()
    if child == 0:
        exec(change)
        sys.exit(script.main())
    print("STATUS", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
    reports = done.stdout.split("CHANGE ")[1:]
    for (change, fault), report in zip(FAULTS.items(), reports, strict=True):
        assert report.startswith(change) and report.endswith("STATUS 1\n"), report + done.stderr
        assert fault in report
