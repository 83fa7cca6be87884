"""What Triton's compiler makes of the step, without a GPU: registers, spills, width of memory accesses, instructions.

Every layout, and the measure of those that have one, is compiled ahead of time for the given compute
capabilities. Exits with status 1 if a kernel spills, moves whole chunks in pieces of less than 128 bits, contracts or
flushes where the arithmetic forbids it.

    python benchmarks/compiled_step.py [--capabilities 80 90] [--layouts "AdamW kahan bfloat16" …]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_lowprec.optim import ALGORITHMS, SGD, AdamW, LowPrecisionOptimizer
from hf_lowprec.optim.backends import triton as launch
from hf_lowprec.optim.codegen.trace import trace_tensor_mean, used
from hf_lowprec.optim.step.spec import StepSpec

BITS = 128
TABLES = {"chunks": "*i64", "segments": "*i64", "pointers": "*i64", "scalars": "*fp32"}
SIGNATURE = TABLES | {"counts": "*i64", "enabled": "*i32"}
MEASURE_SIGNATURE = TABLES | {"sums": "*fp64"}
CONSTANTS = {"CHUNK": launch.CHUNK, "BLOCK": launch.BLOCK, "TAIL": launch.TAIL}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def layouts() -> dict[str, StepSpec]:
    """Every algorithm with every rounding mode and dtype, and AdamW's further options, by name."""
    found = {}
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for cls, rounding, dtype in product(ALGORITHMS.values(), ("kahan", "stochastic", "nearest"), dtypes):
        if dtype == torch.bfloat16 or rounding == "kahan":
            options = {"momentum": 0.9} if cls is SGD else {}
            found[f"{cls.__name__} {rounding} {_short(dtype)}"] = _layout(cls, dtype, rounding=rounding, **options)
    further = {
        "FP32 states": {"state_dtype": torch.float32},
        "amsgrad": {"amsgrad": True},
        "clipped": {"max_grad_norm": 1.0},
    }
    for name, options in further.items():
        found[f"AdamW kahan bfloat16, {name}"] = _layout(AdamW, torch.bfloat16, rounding="kahan", **options)
    return found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layout(cls: type[LowPrecisionOptimizer], dtype: torch.dtype, **options: object) -> StepSpec:
    param = torch.nn.Parameter(torch.zeros(1, 1, dtype=dtype))
    param.grad = torch.zeros_like(param)
    with cls([param], backend="eager", **options).plan_step() as plan:
        return plan.fused_groups[0].spec


@dataclass
class Compiled:
    """What came out of the compiler for one layout.

    Attributes:
        registers: per thread.
        stack: bytes per thread in local memory, where spilled registers go.
        wide: 128-bit accesses to global memory in the source of the machine code.
        expected: how many there must be for whole chunks.
        instructions: per element, in the loop over whole chunks; the rare paths of division and root included.
        complaints: what must not be.
    """

    registers: int
    stack: int
    wide: int
    expected: int
    instructions: float
    complaints: list[str]


def compiled(layout: StepSpec, capability: int, measure: bool = False) -> Compiled:
    """Compile the step or the measure of `layout` for an NVIDIA GPU of compute capability `capability` (90 is 9.0)."""
    arguments = MEASURE_SIGNATURE if measure else SIGNATURE
    signature = {**arguments, **dict.fromkeys(CONSTANTS, "constexpr")}
    aligned = {(k,): [["tt.divisibility", 16]] for k in range(len(arguments))}
    kernel = triton.compile(
        ASTSource(launch.kernels(layout)[measure], signature, dict(CONSTANTS), aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": launch.WARPS, "enable_fp_fusion": False},
    )
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        machine_code = _tool("nvdisasm", "-c", file.name)

    per_thread = launch.BLOCK // (32 * launch.WARPS)
    accesses = [*layout.tensors.values(), *layout.output_tensors.values()]
    if measure:
        accesses = [layout.tensors[name] for name in used(trace_tensor_mean(layout), layout.tensors)]
    result = Compiled(
        registers=int(_found(r"REG:(\d+)", usage)),
        stack=int(_found(r"STACK:(\d+)", usage)),
        wide=len(re.findall(r"(?:ld|st)\.global(?:\.\w+)*\.v4\.b32", ptx)),
        expected=sum(-(-dtype.itemsize * 8 * per_thread // BITS) for dtype in accesses),
        instructions=_loop_length(machine_code) / per_thread,
        complaints=[],
    )
    if result.stack:
        result.complaints.append(f"{result.stack} bytes of stack: registers are spilled")
    if result.wide != result.expected:
        result.complaints.append(f"{result.wide} accesses of {BITS} bits, {result.expected} expected")
    for pattern, what in ((r"\bfma\.", "a contraction"), (r"\.ftz\b", "a flush to zero"), (r"\.approx\b", "a guess")):
        if re.search(pattern, ptx):
            result.complaints.append(f"{what} ({pattern}) in the PTX")
    return result


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([str(_TOOLS / name), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"{pattern!r} is not in the tool's output:\n{text[:2000]}")
    return match[1]


def _loop_length(machine_code: str) -> int:
    """Instructions of the longest loop that loads 128 bits at once."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in machine_code.splitlines():
        if label := re.match(r"\s*(\.L_x?_?\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
    lengths = []
    for end, instruction in enumerate(instructions):
        target = re.search(r"\bBRA\b.*?(\.L_x?_?\d+)", instruction)
        begin = labels.get(target[1], end) if target else end
        if begin < end and any("LDG.E.128" in inside for inside in instructions[begin:end]):
            lengths.append(end - begin + 1)
    return max(lengths, default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--layouts", nargs="+", choices=list(layouts()), default=list(layouts()), metavar="NAME")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")
    print(f"Triton {triton.__version__}, {launch.BLOCK} elements per {launch.WARPS} warps\n")
    print("| layout | sm | registers | stack | 128-bit accesses | instructions per element |")
    print("|---|---:|---:|---:|---:|---:|")
    complaints: Counter[str] = Counter()
    chosen = {name: layouts()[name] for name in options.layouts}
    kernels = [(name, layout, False) for name, layout in chosen.items()]
    kernels += [(f"{name}, measure", layout, True) for name, layout in chosen.items() if layout.tensor_mean is not None]
    for (name, layout, measure), capability in product(kernels, options.capabilities):
        result = compiled(layout, capability, measure)
        wide = f"{result.wide} of {result.expected}"
        print(
            f"| {name} | {capability} | {result.registers} | {result.stack} | {wide} | {result.instructions:.0f} |",
            flush=True,
        )
        complaints.update(f"{name}, sm_{capability}: {complaint}" for complaint in result.complaints)
    print(*complaints, sep="\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
