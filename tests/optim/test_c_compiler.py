"""The flags of the C compiler: what they make of a step."""

import platform
import re
import subprocess

import pytest
import torch

from hf_lowprec.optim import AdamW
from hf_lowprec.optim.backends.c.compiler import FLAGS, require_compiler
from hf_lowprec.optim.backends.c.kernel_source import render


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX-512 belongs to x86-64")
def test_vectors_have_512_bits_on_processors_of_intel(tmp_path):
    """Compilers prefer 256 bits there, which takes twice the instructions."""
    param = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    param.grad = torch.zeros_like(param)
    with AdamW([param], backend="eager").plan_step() as plan:
        source = render(plan.fused_groups[0].spec)
    file = tmp_path / "step.c"
    file.write_text(source)
    processor = ["-mtune=skylake-avx512", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
    command = [*require_compiler(), *processor, *FLAGS, "-fopenmp", "-S", "-o", "-", str(file)]
    assembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    roots = re.findall(r"vsqrtps.*%([xyz]mm)", assembly)
    assert "zmm" in roots
