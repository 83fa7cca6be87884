"""Machine code of Triton's kernels for NVIDIA GPUs, compiled without one."""

import heapq
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_lowprec.optim.backends import triton_launch
from hf_lowprec.optim.step.kernel_spec import StepSpec

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_LABEL = r"\.L_x?_?\d+"


@dataclass
class MachineCode:
    """Instructions, with labels on lines of their own; registers and bytes of stack per thread."""

    code: list[str]
    registers: int
    stack: int


def compile_kernel(kernel, signature: dict[str, str], constants: dict[str, int], capability: int) -> MachineCode:
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
    lines = re.findall(rf"^\s*(?:/\*[0-9a-f]{{4,}}\*/\s+(.*?)\s*;|({_LABEL}):)", listing, re.MULTILINE)
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))
    return MachineCode([instruction or label for instruction, label in lines], registers, stack)


def compile_step(spec: StepSpec, capability: int) -> MachineCode:
    signature = dict.fromkeys(("chunks", "segments", "pointers"), "*i64")
    signature |= {"scalars": "*fp32", "counts": "*i64", "enabled": "*i32"}
    constants = {"CHUNK": triton_launch.CHUNK, "BLOCK": triton_launch.BLOCK, "TAIL": triton_launch.TAIL}
    constants["PTX"] = triton_launch.inlined_ptx(capability)
    return compile_kernel(triton_launch.kernels(spec)[0], signature, constants, capability)


def usual_path(code: list[str]) -> list[str]:
    """The shortest path through the loop over full chunks: all that needs exact instructions is skipped."""
    labels = {line: place for place, line in enumerate(code) if line.startswith(".L")}

    def target(place: int) -> int | None:
        match = re.search(rf"\bBRA\b.*?({_LABEL})", code[place])
        return labels.get(match[1]) if match else None

    loops = [(target(end), end) for end in range(len(code)) if (target(end) or end) < end]
    loops = [loop for loop in loops if any("LDG.E.128" in line for line in code[slice(*loop)])]
    begin, end = max(loops, key=lambda loop: loop[1] - loop[0])
    reached: dict[int, tuple[int, int | None]] = {begin: (0, None)}
    waiting = [(0, begin)]
    while waiting:
        distance, place = heapq.heappop(waiting)
        jump = target(place)
        always = jump is not None and not re.search(r"^@|BRA\S* !?U?P\d", code[place])
        for following in {jump, None if always else place + 1} - {None}:
            further = distance + (not code[following].startswith(".L"))
            if following <= end and further < reached.get(following, (further + 1, None))[0]:
                reached[following] = (further, place)
                heapq.heappush(waiting, (further, following))
    path: list[str] = []
    place: int | None = end
    while place is not None:
        path.append(code[place])
        place = reached[place][1]
    return [line for line in reversed(path) if not line.startswith(".L")]
