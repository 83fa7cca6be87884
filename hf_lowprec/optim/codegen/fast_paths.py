"""Division and square root on NVIDIA GPUs, correctly rounded, with one test of their range for several elements.

`div.rn.f32` and `sqrt.rn.f32` test each element's range, and branch. Here a thread computes a fast path for all of its
elements, tests them together, and takes those instructions only if the test fails. A fast path is a list of operations,
from which its PTX is made, and the C program that tests it.

**Root.** The operations are those that `sqrt.rn.f32` itself performs within its range, so the bits are the same.

**Division.** `div.rn.f32` corrects the quotient twice; here it is corrected once. Scaling by powers of two changes
nothing within the range, so let a and b be in [1, 2). The approximation is within an ulp of 1/b (PTX ISA, `rcp`). Then y
is 1/b, correctly rounded, for all b but one (Markstein, IBM J. Res. Dev. 34, 1990). q0 is within 3/2 ulp of a/b, and so
what q is rounded from differs from a/b by at most 3/2 ulp · 2^-24, or 5/2 if r is rounded. So q is right unless the
distance of a/b to the middle of two numbers is as small. This distance is k/2 ulp · 2^-24 or more, where k is the
integer by which a differs from the product of that middle and b. `tests/optim/test_fast_paths.py` computes every quotient
with |k| ≤ 8, of all b. One fails, for one approximation: a = 1, b = 2 - 2^-23, y0 = 1/2. There `div.rn.f32`, which begins
with the same y, would be wrong too: each correction ends in the same tie.

**Range.** A correction r is exact if it is a multiple of 2^-149, so the exponents of b and q must add up to -103 or more,
and that of s must be at least -50. If the approximation or the result leaves the range of normal numbers, because an
operand is zero, subnormal, huge, infinite, or NaN, the result is NaN or too small, and the test fails.

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
        least: exponents of the smallest magnitudes within the range, by name of an input or of the result.
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
        Operation("q", "fma.rn.f32", ("-r", "y", "q0")),
    ),
    least={"b": -40, "q": -62},
    zero="a",
    zero_result="q",
)
"""`a / b`. The remainder is that of `b·q - a` and not of `a - b·q`, so that a zero keeps its sign if b is positive."""

ROOT = FastPath(
    instruction="sqrt.rn.f32",
    inputs=("v",),
    operations=(
        Operation("y", "rsqrt.approx.ftz.f32", ("v",)),
        Operation("s0", "mul.rn.f32", ("v", "y")),
        Operation("h", "mul.rn.f32", ("y", "0.5")),
        Operation("r", "fma.rn.f32", ("-s0", "s0", "v")),
        Operation("s", "fma.rn.f32", ("r", "h", "s0")),
    ),
    least={"s": -50},
    zero="v",
    zero_result="v",
)
"""`√v`."""
