"""Compile the Triton kernels without a GPU and report registers, spills, width of memory accesses and instructions.

Compiles the kernels `step`, `step_ragged`, `tensor_sum` and `matrix_sum` of every spec, the gradient norm, and the mean
of `reduction/` ahead of time for the given targets. Instructions are counted per element on the path that is executed
if every input is ordinary, apart from the slow paths of division and square root; see `compiled/control_flow.py`. Exits
with status 1 if a kernel spills registers, accesses elements that are all there and aligned with less than 128 bits (64
for the codes of states in 8 bits, since a thread has eight elements), or contracts, flushes or approximates
floating-point operations of a step, which the arithmetic forbids.

    python benchmarks/compiled_step.py [--targets sm_90 gfx942] [--kernels "AdamW kahan bfloat16" …]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import triton
from compiled import amdgcn, sass
from compiled.compiler import TARGETS, CompiledKernel, compile_for
from compiled.kernels import (
    Kernel,
    handwritten_kernels,
    matrix_sum_kernel,
    ragged_kernel,
    specs,
    step_kernel,
    tensor_sum_kernel,
)


def kernels() -> dict[str, Kernel]:
    """All kernels, by name."""
    found: list[Kernel | None] = []
    for make in (step_kernel, ragged_kernel, tensor_sum_kernel, matrix_sum_kernel):
        found += [make(name, spec) for name, spec in specs().items()]
    found += handwritten_kernels()
    return {kernel.name: kernel for kernel in found if kernel is not None}


def compile_kernel(kernel: Kernel, target: str) -> CompiledKernel:
    """Compile a kernel for a target, and note in `faults` what must not be in one of ours."""
    result = compile_for(kernel, target)
    if result.spilled_bytes:
        result.faults.append(f"{result.spilled_bytes} bytes of stack: registers are spilled")
    expected = kernel.expected_accesses
    if target.startswith("gfx") and kernel.threads is None:
        expected = None  # Triton's default number of warps means twice the threads
    if expected:
        unrolled = max(1, result.accesses.total() // expected.total())
        if result.accesses != Counter({bits: unrolled * count for bits, count in expected.items()}):
            result.faults.append(f"accesses {_text(result.accesses)}, expected {_text(expected)}")
    ptx = "" if kernel.fp_fusion else result.ptx
    forbidden = {r"\bfma\.": "a contraction", r"\.ftz\b": "a flush to zero", r"\.approx\b": "an approximation"}
    for pattern, meaning in forbidden.items():
        if re.search(pattern, ptx):
            result.faults.append(f"{meaning} ({pattern}) in the PTX")
    return result


def _text(accesses: Counter[int]) -> str:
    return ", ".join(f"{count} of {bits} bits" for bits, count in sorted(accesses.items(), reverse=True))


def row(kernel: Kernel, target: str, result: CompiledKernel) -> dict[str, Any]:
    """The row of a compiled kernel in the record."""
    return {
        "kernel": kernel.name,
        "target": target,
        "registers": result.registers,
        "spilled_bytes": result.spilled_bytes,
        "warps": result.warps,
        "accesses": _text(result.accesses),
        "hot": round(result.hot, 2),
        "outside": round(result.outside, 2),
        "longest": round(result.longest, 2),
        "by_pipe": {pipe: round(count, 2) for pipe, count in result.by_pipe.items()},
        "elements": result.elements,
        "iterations": result.iterations,
    }


_COLUMNS = {
    "kernel": "kernel",
    "target": "target",
    "registers": "registers",
    "spilled_bytes": "spilled bytes",
    "warps": "warps that fit",
    "accesses": "accesses to memory",
    "hot": "instructions per element",
    "longest": "with all slow paths",
    "outside": "outside of the loop",
}


def _heading() -> str:
    pipes = " ".join(sass.PIPES)
    return f"| {' | '.join([*_COLUMNS.values(), pipes])} |\n| --- | --- | {'---: | ' * 3}--- | {'---: | ' * 4}".rstrip()


def _cells(recorded: dict[str, Any]) -> str:
    pipes = " ".join(f"{count:.1f}" for count in recorded["by_pipe"].values())
    return f"| {' | '.join(str(recorded[key]) for key in _COLUMNS)} | {pipes} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--output", type=Path, help="a JSON file for all counts")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")
    known = kernels()
    names = options.kernels or list(known)
    if unknown := set(names) - set(known):
        parser.error(f"--kernels {sorted(unknown)}: there are {list(known)}")
    print(f"Triton {triton.__version__}; operations by pipe on NVIDIA: {', '.join(sass.PIPES)}; on AMD: ", end="")
    print(f"{', '.join(amdgcn.PIPES)}\n\n{_heading()}")
    faults: Counter[str] = Counter()
    rows = []
    for name, target in product(names, options.targets):
        result = compile_kernel(known[name], target)
        rows.append({"triton": triton.__version__, **row(known[name], target, result)})
        print(_cells(rows[-1]), flush=True)
        faults.update(f"{name}, {target}: {fault}" for fault in result.faults)
    if options.output is not None:
        options.output.write_text(json.dumps({"rows": rows}) + "\n")
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
