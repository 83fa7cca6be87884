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
from hf_lowprec.optim.backends.triton.launch import inlined_ptx
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


@pytest.mark.every_case
def test_fast_paths_assemble_for_every_gpu_and_are_those_of_the_exact_instructions():
    rows = run(FAST_PATHS)
    assert len(rows) == 12
    for capability, operands, stack, in_pairs, own_division, own_root in rows:
        assert stack == "0"
        assert in_pairs == str(capability == "100")  # for 12.0, the assembler splits the pairs
        assert (own_division if operands == "ab" else own_root) == "True"


OTHERS = """
import tempfile
from pathlib import Path
from hf_lowprec.optim.backends.triton.launch import inlined_ptx
from tests.support.optim.fast_path_kernels import fast_path_kernels
from tests.support.optim.machine_code import compiled_opcodes
with tempfile.TemporaryDirectory() as folder:
    kernels = fast_path_kernels(Path(folder))
    above = dict.fromkeys(["a", "b", "floor", "inlined", "exact"], "*fp32")
    sums = dict.fromkeys(["pattern", "word", "sums"], "*i32")
    for capability in (80, 86, 89, 90, 100, 120):
        for kernel, signature in ((kernels.divide_above, above), (kernels.random_sums, sums)):
            compiled = compiled_opcodes(kernel, signature, {"BLOCK": 1024, "PTX": inlined_ptx(capability)}, capability)
            print(capability, kernel.fn.__name__, compiled.stack, sum("IDP" in name for name in compiled.opcodes),
                  sum("PRMT" in name for name in compiled.opcodes))
"""


@pytest.mark.every_case
def test_bounded_divisions_and_random_bits_assemble_for_every_gpu():
    """The bits of eight elements: four pairs with two permutations each, for two roles, and a dot product per sum."""
    rows = run(OTHERS)
    assert len(rows) == 12
    for _, kernel, stack, dot_products, permutations in rows:
        assert stack == "0"
        if kernel == "random_sums":
            assert int(dot_products) == 16
            assert 8 <= int(permutations) <= 16  # both roles may share them
