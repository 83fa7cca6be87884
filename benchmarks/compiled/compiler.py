"""Compiles kernels ahead of time for a GPU that need not be there, and counts what it executes."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compiled import amdgcn, sass
from compiled.control_flow import MachineCode
from compiled.control_flow import Path as CodePath
from compiled.gpus import ARCHITECTURES, resident_warps
from compiled.kernels import CONSTANT, Kernel

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
DEFAULT_WARPS = 4
"""Of a launch that does not say how many."""
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass
class CompiledKernel:
    """The compiled form of one kernel.

    Attributes:
        registers: per thread.
        spilled_bytes: bytes per thread in local memory, to which registers are spilled.
        warps: of how many a multiprocessor has room for.
        elements: per thread, in one iteration of the loop over full chunks, or in all if there is no loop.
        iterations: of that loop, for a full chunk.
        accesses: how many accesses to global memory of each width in bits are in the loop.
        hot: instructions per element that are executed in the loop if all inputs are ordinary.
        longest: the same if every branch takes its longest way, subroutines included.
        outside: instructions per element before and after the loop.
        by_pipe: operations per element of the ordinary path and outside of the loop, by the pipe that executes them.
        ptx: the code in NVIDIA's intermediate language; empty for AMD.
        faults: what the compiler must not do.
    """

    registers: int
    spilled_bytes: int
    warps: int
    elements: int
    iterations: int
    accesses: Counter[int]
    hot: float
    longest: float
    outside: float
    by_pipe: dict[str, float]
    ptx: str = ""
    faults: list[str] = field(default_factory=list)


def compile_for(kernel: Kernel, target: str) -> CompiledKernel:
    """Compile `kernel` for a target such as "sm_90" (NVIDIA, compute capability 9.0) or "gfx942" (AMD)."""
    on_amd = target.startswith("gfx")
    warp_size = 64 if on_amd else 32
    warps = DEFAULT_WARPS if kernel.threads is None else kernel.threads // warp_size
    arguments = {**kernel.arguments, **dict.fromkeys(kernel.constants, CONSTANT)}
    options = {"num_warps": warps, "enable_fp_fusion": kernel.fp_fusion}
    if on_amd:
        options["waves_per_eu"] = kernel.waves_per_simd
    compiled = triton.compile(
        ASTSource(kernel.function, arguments, dict(kernel.constants), _alignments(kernel)),
        target=GPUTarget("hip", target, 64) if on_amd else GPUTarget("cuda", int(target.removeprefix("sm_")), 32),
        options=options,
    )
    name = compiled.metadata.name
    if on_amd:
        text = compiled.asm["amdgcn"]
        registers, spilled = _metadata(text, "vgpr_count"), _metadata(text, "private_segment_fixed_size")
        code: MachineCode = amdgcn.parse(text, name)
        reader: ModuleType = amdgcn
    else:
        usage, listing = _disassembled(compiled.asm["cubin"])
        registers, spilled = int(_match(r"REG:(\d+)", usage)), int(_match(r"STACK:(\d+)", usage))
        code, reader = sass.parse(listing, name), sass
    result = _counted(kernel, code, reader, kernel.block // (warp_size * warps))
    result.registers, result.spilled_bytes = registers, spilled
    result.warps = resident_warps(ARCHITECTURES[target], registers, warps)
    result.ptx = compiled.asm.get("ptx", "")
    return result


def _alignments(kernel: Kernel) -> dict[tuple[int], Any]:
    return {(k,): [["tt.divisibility", 16]] for k, name in enumerate(kernel.arguments) if name in kernel.aligned}


def _counted(kernel: Kernel, code: MachineCode, reader: ModuleType, elements: int) -> CompiledKernel:
    loop = code.main_loop if kernel.iterations else None
    path = code.ordinary_path(loop)
    around: CodePath = code.path_around(loop) if loop is not None else ()
    accesses = Counter(bits for position in path if (bits := code.instructions[position].access_bits))
    if loop is None and kernel.reads_tables:  # with the narrower ones
        accesses = Counter({max(accesses): accesses[max(accesses)]})
    iterations = max(kernel.iterations, 1)
    if kernel.iterations and kernel.expected_accesses:  # a compiler may unroll the loop, even altogether
        unrolled = max(1, accesses.total() // kernel.expected_accesses.total())
        elements, iterations = elements * unrolled, max(1, iterations // unrolled)
    by_pipe = dict.fromkeys(reader.PIPES, 0.0)
    for positions, count in ((path, elements), (around, elements * iterations)):
        for position in positions:
            pipe, operations = reader.pipe(code.instructions[position].opcode)
            by_pipe[pipe] += operations / count
    return CompiledKernel(
        registers=0,
        spilled_bytes=0,
        warps=0,
        elements=elements,
        iterations=iterations,
        accesses=accesses,
        hot=len(path) / elements,
        longest=code.longest_path(loop) / elements,
        outside=len(around) / (elements * iterations),
        by_pipe=by_pipe,
    )


def _disassembled(cubin: bytes) -> tuple[str, str]:
    """Resource usage and listing of a compiled kernel, by the tools that Triton ships."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _tool("cuobjdump", "-res-usage", file.name), _tool("nvdisasm", "-c", file.name)


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([str(_TOOLS / name), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _metadata(assembly: str, name: str) -> int:
    return int(_match(rf"\.{name}:\s+(\d+)", assembly))


def _match(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"{pattern!r} is not in the tool's output:\n{text[:2000]}")
    return match[1]
