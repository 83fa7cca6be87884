"""Division and square root on NVIDIA GPUs, correctly rounded, with one test of their range for several elements.

`div.rn.f32` and `sqrt.rn.f32` test each element's range, and branch. Here a thread performs the operations of their
fast paths for all of its elements, tests them together, and takes those instructions only if the test fails. A fast
path is a list of operations. Both its PTX and the C program that checks it (benchmarks/fast_paths.py) are made from it.

**The operations** are those that ptxas makes of the two instructions for sm_80 to sm_120, with the same approximation:
so the bits are the same where both take their fast paths. They are also right by themselves, for every approximation
within the error that the PTX ISA documents (`rcp`: an ulp, `rsqrt`: 2^-22.9), but for three exceptions.

- Root: the program computes the roots of all mantissas, with all approximations. Two are wrong.
- Division: within the range, scaling by powers of two changes nothing, so let a and b be in [1, 2). Then y is 1/b,
  correctly rounded, unless b is the number below 2 (Markstein, IBM J. Res. Dev. 34, 1990), q0 is within 3/2 ulp of
  a/b, and r within a unit of what it stands for. Let m be the middle between two neighbours that is nearest to a/b, and
  k the integer difference of a and m·b in units of their last bits. From these errors, q is a/b rounded unless |k| is
  less than 3/4·b² + 2, which is less than 5. There are few such quotients for each b, and the program computes all with
  |k| ≤ 8. One is wrong: a = 1, b = 2 - 2^-23, if y0 = 1/2.

In the exceptions, the two instructions would be wrong too, so processors do not have these approximations.

**The range.** A remainder r is exact if it is a multiple of 2^-149: the exponents of b and q must add up to -103 or
more, and that of s must be -51 or more. If an approximation or a result is not a normal number, since an operand is
zero, subnormal, huge, infinite or NaN, the result is NaN or too small, and the test fails.

Zeros are frequent: moments of rows of an embedding that have not been seen. They fail the first test, and a second one
admits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Operation(NamedTuple):
    """An FP32 operation. Operands are inputs, earlier results, or numbers; `-x` is the negative of x."""

    result: str
    instruction: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class FastPath:
    """A correctly rounded function, for operands within a range.

    Attributes:
        instruction: the PTX instruction for all operands.
        inputs: names of its operands.
        operations: in order; the last one is the result.
        least: exponents of the smallest numbers within the range: of inputs, and of the magnitude of the result.
        zero: the input that may also be zero.
        zero_result: what the result is then: a name.
    """

    instruction: str
    inputs: tuple[str, ...]
    operations: tuple[Operation, ...]
    least: Mapping[str, int]
    zero: str
    zero_result: str

    @property
    def result(self) -> str:
        """The name of the result."""
        return self.operations[-1].result


DIVISION = FastPath(
    instruction="div.rn.f32",
    inputs=("a", "b"),
    operations=(
        Operation("y0", "rcp.approx.ftz.f32", ("b",)),
        Operation("e", "fma.rn.f32", ("-b", "y0", "1.0")),
        Operation("y", "fma.rn.f32", ("y0", "e", "y0")),
        Operation("q0", "mul.rn.f32", ("a", "y")),
        Operation("r", "fma.rn.f32", ("b", "q0", "-a")),
        Operation("q", "fma.rn.f32", ("-y", "r", "q0")),
    ),
    least={"b": -40, "q": -62},
    zero="a",
    zero_result="q",
)
"""`a / b`. A zero keeps its sign if b is positive, since r is `b·q0 - a`, not `a - b·q0`, and y is negated, not r: a
compiler may compute `-(b·q0 - a)` as the other difference."""

ROOT = FastPath(
    instruction="sqrt.rn.f32",
    inputs=("v",),
    operations=(
        Operation("y", "rsqrt.approx.ftz.f32", ("v",)),
        Operation("s0", "mul.rn.ftz.f32", ("v", "y")),
        Operation("h", "mul.rn.f32", ("y", "0.5")),
        Operation("r", "fma.rn.f32", ("-s0", "s0", "v")),
        Operation("s", "fma.rn.f32", ("r", "h", "s0")),
    ),
    least={"s": -50},
    zero="v",
    zero_result="v",
)
"""`√v`. Subnormal operands are flushed twice, as zeros: so all of them give NaN, negative ones as well."""
