"""Check the fast paths of division and root (`inline_ptx.py`) in C, for every approximation they may get.

The C program is made from the same operations as the PTX. NVIDIA documents the error of the approximations that the
operations begin with; each operand is tried with every approximation within it. The reference is the processor's own
division and square root.

    python benchmarks/fast_paths.py [--pairs 1000000000]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hf_lowprec.optim.backends.triton.inline_ptx import DIVISION, ROOT, FastPath

_OPERATIONS = {"fma.rn.f32": "fmaf({0}, {1}, {2})", "mul.rn.f32": "{0} * {1}"}
_OPERATIONS["mul.rn.ftz.f32"] = "flushed(flushed({0}) * flushed({1}))"
EXCEPTIONS = {
    ("root", 0, 0x6E9372, 0, 0x049780),
    ("root", 1, 0x7C114A, 0, 0x366D09),
    ("divide", 0, 0x000000, 0x7FFFFF, 0x000000),
}
"""Mantissas of operands and approximations for which a fast path is wrong, and for roots the last bit of the exponent.
`div.rn.f32` and `sqrt.rn.f32` perform the same operations, so no processor has these approximations."""


def in_c(path: FastPath, name: str) -> str:
    """The function `name` of the inputs and an approximation; it returns whether a test admits its result."""

    def text(operand: str) -> str:
        return f"{operand}f" if operand[0].isdigit() else operand

    approximation, *others = path.operations
    lines = [f"const float {approximation.result} = approximation;"]
    for result, instruction, operands in others:
        lines.append(f"const float {result} = {_OPERATIONS[instruction].format(*map(text, operands))};")
    bounds = {key: f"0x1p{exponent}f" for key, exponent in path.least.items()}
    inputs_pass = " && ".join(f"{key} >= {bound}" for key, bound in bounds.items() if key != path.result) or "1"
    bound = bounds[path.result]
    lines += [
        f"*result = {path.result};",
        f"if ({inputs_pass} && fabsf(*result) >= {bound}) return 1;",
        f"if ({path.zero} == 0) *result = {path.zero_result};",
        f"return {inputs_pass} && fabsf(*result) + ({path.zero} == 0 ? 1.0f : 0.0f) >= {bound};",
    ]
    inputs = ", ".join(f"float {key}" for key in path.inputs)
    body = "\n    ".join(lines)
    return f"static int {name}({inputs}, float approximation, float *result) {{\n    {body}\n}}\n"


@dataclass
class Result:
    """The result of the program.

    Attributes:
        tested: how many results it has computed.
        admitted: how many of them passed a test of the range.
        wrong: those of them that are not correctly rounded: function, operands and approximation as bit patterns.
    """

    tested: int
    admitted: int
    wrong: list[tuple[str, int, int, int]]

    @property
    def unexpected(self) -> list[tuple[str, int, int, int]]:
        """Those of `wrong` that are no `EXCEPTIONS`."""
        return [case for case in self.wrong if exception(*case) not in EXCEPTIONS]


def exception(name: str, a: int, b: int, approximation: int) -> tuple[str, int, int, int, int]:
    """A wrong result, without what scaling by powers of two (of four, for a root) changes."""
    mantissas = [pattern & 0x7FFFFF for pattern in (a, b, approximation)]
    return name, a >> 23 & 1 if name == "root" else 0, *mantissas


def run(check: str, pairs: int = 0, divide: FastPath = DIVISION, root: FastPath = ROOT) -> Result:
    """Compile and run the program.

    Args:
        check: `"roots"` (all mantissas), `"quotients"` (all that are hard to round), `"exponents"` (all pairs of them),
            or `"pairs"` (random ones).
        pairs: how many random pairs.
        divide: the fast path of division.
        root: the fast path of the root.
    """
    functions = in_c(divide, "divide") + in_c(root, "root")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "fast_paths.c")
        file.write_text(Path(__file__).with_suffix(".c").read_text().replace("/* FAST PATHS */", functions))
        options = ["-O2", "-march=native", "-ffp-contract=off"]
        subprocess.run(["cc", *options, str(file), "-o", f"{folder}/check", "-lm"], check=True)
        command = [f"{folder}/check", check, str(pairs)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    *lines, counts = [line.split() for line in output.splitlines()]
    wrong = [(name, int(a), int(b), int(approximation)) for _, name, a, b, approximation in lines]
    return Result(int(counts[0]), int(counts[1]), wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10**9, help="random pairs to divide")
    options = parser.parse_args()
    print("| check | results | within the range | wrong | of these, exceptions | seconds |")
    print("|---|---:|---:|---:|---:|---:|")
    failed = False
    for check in ("roots", "quotients", "exponents", "pairs"):
        began = time.monotonic()
        result = run(check, options.pairs)
        cells = [f"{result.tested:,}", f"{result.admitted:,}", str(len(result.wrong))]
        cells += [str(len(result.wrong) - len(result.unexpected)), f"{time.monotonic() - began:.0f}"]
        print(f"| {check} | {' | '.join(cells)} |", flush=True)
        failed |= bool(result.unexpected)
        for name, *patterns in result.unexpected[:10]:
            print(name, *(f"{pattern:08x}" for pattern in patterns), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
