"""Inline PTX, compiled to NVIDIA machine code without a GPU: for which GPUs, and how many instructions remain."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="Triton's tools are for Linux")]
ROOT = Path(__file__).resolve().parents[2]


def run(program: str) -> list[list[str]]:
    """The words of each line that a program prints, in a process that compiles."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split() for line in done.stdout.splitlines()]


COUNTS = """
from benchmarks.compiled_step import specs
from tests.support.optim.machine_code import compile_step, usual_path
for rounding, capability in (("kahan", 90), ("kahan", 100), ("stochastic", 90), ("split", 100)):
    kernel = compile_step(specs()[f"AdamW {rounding} bfloat16"], capability)
    print(rounding, capability, len(usual_path(kernel.code)) / 8, kernel.registers, kernel.stack)
"""
LIMITS = {
    ("kahan", "90"): (59, 76),
    ("kahan", "100"): (54, 77),
    ("stochastic", "90"): (52.5, 68),
    ("split", "100"): (54, 80),
}
"""Instructions per element that is neither zero nor out of range, and registers (Triton 3.7.1)."""


def test_instructions_do_not_grow():
    rows = run(COUNTS)
    assert len(rows) == len(LIMITS)
    for rounding, capability, instructions, registers, stack in rows:
        most_instructions, most_registers = LIMITS[rounding, capability]
        assert 40 < float(instructions) <= most_instructions
        assert int(registers) <= most_registers
        assert stack == "0"


FAST_PATHS = """
import tempfile
from pathlib import Path
from hf_lowprec.optim.backends.triton_launch import inlined_ptx
from tests.support.optim.fast_path_kernels import fast_path_kernels
from tests.support.optim.machine_code import compile_kernel
with tempfile.TemporaryDirectory() as folder:
    kernels = fast_path_kernels(Path(folder))
    for capability in (80, 86, 89, 90, 100, 120):
        for kernel, operands in ((kernels.divide, "ab"), (kernels.root, "v")):
            signature = dict.fromkeys([*operands, "inlined", "exact"], "*fp32")
            compiled = compile_kernel(kernel, signature, {"BLOCK": 1024, "PTX": inlined_ptx(capability)}, capability)
            # Each operation of the exact instruction's own fast path, as the compiler wrote it.
            own = " ".join(line.split()[0] for line in compiled.code if line.startswith(("MUFU", "FMUL", "FFMA")))
            print(capability, operands, compiled.stack, "FFMA2" in own, "MUFU.RCP FFMA FFMA FFMA FFMA FFMA" in own,
                  "MUFU.RSQ FMUL.FTZ FMUL.FTZ FFMA FFMA" in own)
"""


def test_fast_paths_assemble_for_every_gpu_and_are_those_of_the_exact_instructions():
    rows = run(FAST_PATHS)
    assert len(rows) == 12
    for capability, operands, stack, in_pairs, own_division, own_root in rows:
        assert stack == "0"
        assert in_pairs == str(capability == "100")  # for 12.0, the assembler splits the pairs
        assert (own_division if operands == "ab" else own_root) == "True"
