"""Opcodes of Triton kernels for NVIDIA GPUs, compiled without one."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_lowprec.optim.backends.triton import launch as triton_launch

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Opcodes(NamedTuple):
    """The opcodes in the order in which they are listed, and the bytes of stack per thread."""

    opcodes: list[str]
    stack: int


def compiled_opcodes(kernel, signature: dict[str, str], constants: dict[str, int], capability: int) -> Opcodes:
    """Compile `kernel` for a compute capability (90 is 9.0), with arguments that are multiples of 16."""
    aligned = {(k,): [["tt.divisibility", 16]] for k in range(len(signature))}
    compiled = triton.compile(
        ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": triton_launch.WARPS, "enable_fp_fusion": False},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, listing = (
            subprocess.run([_TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    opcodes = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?(\S+)", listing, re.MULTILINE)
    return Opcodes(opcodes, int(re.search(r"STACK:(\d+)", usage)[1]))
