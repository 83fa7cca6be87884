"""Compile the Triton kernels without a GPU and report registers, spills, width of memory accesses and instructions.

Compiles the kernels `step` and `tensor_sum` of every spec ahead of time for the given compute capabilities. Exits with
status 1 if a kernel spills registers, accesses full chunks with less than 128 bits (64 for the codes of states in 8
bits, since a thread has eight elements), or contracts, flushes or approximates floating-point operations, which the
arithmetic forbids.

    python benchmarks/compiled_step.py [--capabilities 80 90 100 120] [--specs "AdamW kahan bfloat16" …]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_lowprec.optim import ALGORITHMS, SGD, AdamW, LowPrecisionOptimizer
from hf_lowprec.optim.backends import triton_launch as triton_backend
from hf_lowprec.optim.codegen.trace import trace_tensor_mean, used_inputs
from hf_lowprec.optim.step.kernel_spec import StepSpec
from hf_lowprec.rounding import MODES, dtype_name
from hf_lowprec.rounding.block_floats import BLOCK

ELEMENTS_PER_THREAD = 8
WIDEST_BITS = 128
"""A thread needs one access for its elements of a tensor, or several of these."""
TABLES = {"chunks": "*i64", "segments": "*i64", "pointers": "*i64", "scalars": "*fp32"}
STEP_ARGUMENTS = TABLES | {"counts": "*i64", "enabled": "*i32"}
TENSOR_SUM_ARGUMENTS = TABLES | {"sums": "*fp64"}
CONSTANTS = {"CHUNK": triton_backend.CHUNK, "BLOCK": triton_backend.BLOCK, "TAIL": triton_backend.TAIL}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def specs() -> dict[str, StepSpec]:
    """A spec for every algorithm, rounding mode and dtype, and for AdamW's further options, by name."""
    named = {}
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for cls, rounding, dtype in product(ALGORITHMS.values(), MODES, dtypes):
        if dtype == torch.bfloat16 or rounding == "kahan":
            options = {"momentum": 0.9} if cls is SGD else {}
            named[f"{cls.__name__} {rounding} {dtype_name(dtype)}"] = _spec(cls, dtype, rounding=rounding, **options)
    further = {
        "FP32 states": {"state_dtype": torch.float32},
        "amsgrad": {"amsgrad": True},
        "clipped": {"max_grad_norm": 1.0},
        "8-bit states": {"state_dtype": torch.int8},
    }
    for name, options in further.items():
        for rounding in ("kahan", "split", "stochastic"):
            spec = _spec(AdamW, torch.bfloat16, rounding=rounding, **options)
            named[f"AdamW {rounding} bfloat16, {name}"] = spec
    for cls in ALGORITHMS.values():
        options = {"momentum": 0.9} if cls is SGD else {}
        spec = _spec(cls, torch.bfloat16, rounding="split", state_dtype=torch.int8, **options)
        named[f"{cls.__name__} split bfloat16, 8-bit states"] = spec
    return named


def _spec(cls: type[LowPrecisionOptimizer], dtype: torch.dtype, **options: object) -> StepSpec:
    param = torch.nn.Parameter(torch.zeros(1, BLOCK, dtype=dtype))
    param.grad = torch.zeros_like(param)
    with cls([param], backend="eager", **options).plan_step() as plan:
        return plan.fused_groups[0].spec


@dataclass
class CompiledKernel:
    """The compiled form of one kernel.

    Attributes:
        registers: per thread.
        stack: bytes per thread in local memory, to which registers are spilled.
        accesses: how many accesses to global memory of each width in bits the loop over full chunks has.
        expected_accesses: how many it needs.
        instructions: per element, in the loop over full chunks; includes the rare paths of division and square root.
        faults: what the compiler must not do.
    """

    registers: int
    stack: int
    accesses: Counter[int]
    expected_accesses: Counter[int]
    instructions: float
    faults: list[str]


def compile_kernel(spec: StepSpec, capability: int, tensor_sum: bool = False) -> CompiledKernel:
    """Compile `step`, or `tensor_sum`, of `spec` for NVIDIA GPUs of compute capability `capability` (90 is 9.0)."""
    arguments = TENSOR_SUM_ARGUMENTS if tensor_sum else STEP_ARGUMENTS
    constants = CONSTANTS | {"PTX": triton_backend.inlined_ptx(capability)}
    signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
    aligned = {(k,): [["tt.divisibility", 16]] for k in range(len(arguments))}
    kernel = triton.compile(
        ASTSource(triton_backend.kernels(spec)[tensor_sum], signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": triton_backend.WARPS, "enable_fp_fusion": False},
    )
    # Inlined PTX is exact although it approximates: see optim/codegen/fast_paths.py.
    ptx = re.sub(r"// begin inline asm.*?// end inline asm", "", kernel.asm["ptx"], flags=re.DOTALL)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        machine_code = _tool("nvdisasm", "-c", file.name)

    elements_per_thread = triton_backend.BLOCK // (32 * triton_backend.WARPS)
    accessed = [*spec.tensors, *spec.output_tensors]
    if tensor_sum:
        accessed = used_inputs(trace_tensor_mean(spec), spec.tensors)
    loop = _longest_loop(machine_code)
    result = CompiledKernel(
        registers=int(_match(r"REG:(\d+)", usage)),
        stack=int(_match(r"STACK:(\d+)", usage)),
        accesses=_accesses(loop),
        expected_accesses=_expected_accesses(spec, accessed),
        instructions=len(loop) / elements_per_thread,
        faults=[],
    )
    if result.stack:
        result.faults.append(f"{result.stack} bytes of stack: registers are spilled")
    if result.accesses != result.expected_accesses:
        result.faults.append(f"accesses {_text(result.accesses)}, expected {_text(result.expected_accesses)}")
    forbidden = {r"\bfma\.": "a contraction", r"\.ftz\b": "a flush to zero", r"\.approx\b": "an approximation"}
    for pattern, meaning in forbidden.items():
        if re.search(pattern, ptx):
            result.faults.append(f"{meaning} ({pattern}) in the PTX")
    return result


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([str(_TOOLS / name), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _match(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"{pattern!r} is not in the tool's output:\n{text[:2000]}")
    return match[1]


def _expected_accesses(spec: StepSpec, names: Iterable[str]) -> Counter[int]:
    """The accesses to some tensors, with all elements of a thread at once."""
    expected: Counter[int] = Counter()
    for name in names:
        bits = 8 * spec.tensors[name].itemsize * (1 if name in spec.per_block_tensors else ELEMENTS_PER_THREAD)
        expected[min(bits, WIDEST_BITS)] += -(-bits // WIDEST_BITS)
    return expected


def _accesses(instructions: Iterable[str]) -> Counter[int]:
    """The accesses to global memory among some instructions, by their width in bits."""
    found: Counter[int] = Counter()
    for instruction in instructions:
        if access := re.search(r"\b(?:LDG|STG)((?:\.\w+)*)", instruction):
            widths = re.findall(r"\.[US]?(8|16|64|128|256)\b", access[1])
            found[int(widths[-1]) if widths else 32] += 1
    return found


def _text(accesses: Counter[int]) -> str:
    return ", ".join(f"{count} of {bits} bits" for bits, count in sorted(accesses.items(), reverse=True))


def _longest_loop(machine_code: str) -> list[str]:
    """The instructions of the longest loop that loads 128 bits at once; if there is none, of the longest that loads."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in machine_code.splitlines():
        if label := re.match(r"\s*(\.L_x?_?\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
    loops = []
    for end, instruction in enumerate(instructions):
        target = re.search(r"\bBRA\b.*?(\.L_x?_?\d+)", instruction)
        begin = labels.get(target[1], end) if target else end
        if begin < end and any("LDG" in inside for inside in instructions[begin:end]):
            loops.append(instructions[begin : end + 1])
    return max(loops, key=lambda loop: (_accesses(loop)[WIDEST_BITS] > 0, len(loop)), default=[])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 90, 100, 120])
    parser.add_argument("--output", type=Path, help="a JSON file for the rows of the table")
    parser.add_argument("--specs", nargs="+", choices=list(specs()), default=list(specs()), metavar="NAME")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")
    print(f"Triton {triton.__version__}, {triton_backend.BLOCK} elements per {triton_backend.WARPS} warps\n")
    print("| kernel | sm | registers | stack | accesses to memory | instructions per element |")
    print("|---|---:|---:|---:|---|---:|")
    faults: Counter[str] = Counter()
    rows = []
    selected = {name: specs()[name] for name in options.specs}
    kernels = [(name, spec, False) for name, spec in selected.items()]
    kernels += [(f"{name}, tensor_sum", spec, True) for name, spec in selected.items() if spec.tensor_mean is not None]
    for (name, spec, tensor_sum), capability in product(kernels, options.capabilities):
        result = compile_kernel(spec, capability, tensor_sum)
        cells = {"kernel": name, "sm": capability, "registers": result.registers, "stack": result.stack}
        cells |= {"accesses": _text(result.accesses), "instructions": round(result.instructions)}
        print(f"| {' | '.join(map(str, cells.values()))} |", flush=True)
        rows.append(cells)
        faults.update(f"{name}, sm_{capability}: {fault}" for fault in result.faults)
    if options.output is not None:
        options.output.write_text(json.dumps({"triton": triton.__version__, "rows": rows}) + "\n")
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
