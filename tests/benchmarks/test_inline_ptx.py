"""Inline PTX, compiled to NVIDIA machine code without a GPU."""

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


FAST_PATHS = """
import tempfile
from pathlib import Path
from hf_lowprec.optim.backends.triton_launch import inlined_ptx
from tests.support.optim.fast_path_kernels import fast_path_kernels
from tests.support.optim.machine_code import compiled_opcodes
with tempfile.TemporaryDirectory() as folder:
    kernels = fast_path_kernels(Path(folder))
    for capability in (80, 86, 89, 90, 100, 120):
        for kernel, operands in ((kernels.divide, "ab"), (kernels.root, "v")):
            signature = dict.fromkeys([*operands, "inlined", "exact"], "*fp32")
            compiled = compiled_opcodes(kernel, signature, {"BLOCK": 1024, "PTX": inlined_ptx(capability)}, capability)
            # Each operation of the exact instruction's own fast path, as the compiler wrote it.
            own = " ".join(opcode for opcode in compiled.opcodes if opcode.startswith(("MUFU", "FMUL", "FFMA")))
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
