"""The Triton kernels, compiled to NVIDIA machine code without a GPU: no spills, 128-bit accesses, IEEE arithmetic."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.without_transformers import STUB

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="Triton's tools are for Linux")]
ROOT = Path(__file__).resolve().parents[2]
SPECS = ["AdamW kahan bfloat16", "AdamW stochastic bfloat16", "AdamW kahan float32", "SGD kahan bfloat16"]
SPECS += ["StableAdamW kahan bfloat16", "Muon kahan bfloat16"]
NO_CHANGE = "pass"
FAULTS = {
    "triton_backend.WARPS = 8": "128 bits",
    "triton.compile = functools.partial(compile_, fusion=True)": "contraction",
    "TritonRenderer.sqrt_rn = lambda self, value: f'tl.sqrt({value})'": "an approximation",
}
"""Changes of the code, and what is to be reported of each."""

PROGRAM = """
import functools, json, os, sys, triton
import benchmarks.compiled_step as script
from hf_lowprec.optim.backends import triton_launch as triton_backend
from hf_lowprec.optim.codegen.triton_source import TritonRenderer
original = triton.compile
def compile_(*args, fusion, options, **kwargs):
    return original(*args, options={**options, "enable_fp_fusion": fusion}, **kwargs)
for change, words in json.loads(sys.argv[1]).items():
    print("CHANGE", change, flush=True)
    child = os.fork()
    if child == 0:
        exec(change)
        sys.argv[1:] = words
        sys.exit(script.main())
    print("STATUS", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def reports() -> dict[str, str]:
    """What the script prints after each change, with its status: in children of one process that has imported all."""
    runs = {NO_CHANGE: ["--specs", *SPECS]}
    runs |= {change: ["--capabilities", "90", "--specs", SPECS[0]] for change in FAULTS}
    # A new interpreter, since Triton reads the variable when it is imported.
    done = subprocess.run(
        [sys.executable, "-c", STUB + PROGRAM, json.dumps(runs)],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [report.partition("\n") for report in done.stdout.split("CHANGE ")[1:]]
    assert [change for change, _, _ in printed] == list(runs), done.stdout + done.stderr
    return {change: report for change, _, report in printed}


def test_kernels_do_not_spill_and_access_128_bits_at_once(reports):
    report = reports[NO_CHANGE]
    assert report.endswith("STATUS 0\n"), report
    rows = [line for line in report.splitlines() if " kahan " in line or " stochastic " in line]
    assert len(rows) == 2 * (len(SPECS) + 1)  # StableAdamW has a tensor_mean formula
    # What an H200 issues per element in the time its memory needs (docs/performance.md); issue must not be the limit.
    assert max(int(row.split("|")[-2]) for row in rows) <= 140


@pytest.mark.parametrize(("change", "fault"), FAULTS.items())
def test_a_planted_fault_is_reported(reports, change, fault):
    assert reports[change].endswith("STATUS 1\n"), reports[change]
    assert fault in reports[change]
