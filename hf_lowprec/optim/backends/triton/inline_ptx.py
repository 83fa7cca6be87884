"""PTX for several elements of a thread, which Triton's `inline_asm_elementwise` inserts into kernels for NVIDIA GPUs.

It needs compute capability 8.0; operations on pairs of FP32 numbers need 10.0. Elements are tested together, and what
only a few of them need comes after the test.

Division and square root are rounded correctly. `div.rn.f32` and `sqrt.rn.f32` test each element's range, and branch.
Here a thread performs the operations of their fast paths for all of its elements, tests them together, and takes those
instructions only if the test fails. A fast path is a list of operations. Both its PTX and the C program that checks it
(benchmarks/fast_paths.py) are made from it.

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

import struct
from collections.abc import Mapping, Sequence
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


ELEMENTS = 8
"""Elements that are tested together: as many as a thread has in 128 bits of BF16."""


class InlinePtx(NamedTuple):
    """The arguments of `tl.inline_asm_elementwise` that depend on the PTX.

    Attributes:
        inputs: names of the inputs.
        outputs: the number of results.
        assembly: the instructions; `$0` is the first element of the first result, and inputs follow the results.
        constraints: the kinds of these registers.
        elements: the number of elements.
        dtype: of all results.
    """

    inputs: tuple[str, ...]
    outputs: int
    assembly: str
    constraints: str
    elements: int
    dtype: str = "float32"


FROM_BFLOAT16 = InlinePtx(("bits",), 1, "shl.b32 $0, $2, 16;\nand.b32 $1, $2, 0xFFFF0000;", "=&f,=f,r", 2)
"""The FP32 values of two BF16 bit patterns, which share a register."""

TO_BFLOAT16 = InlinePtx(
    ("x",),
    1,
    "{\n.reg .b32 pair;\ncvt.rn.bf16x2.f32 pair, $3, $2;\nshl.b32 $0, pair, 16;\nand.b32 $1, pair, 0xFFFF0000;\n}",
    "=f,=f,f,f",
    2,
)
"""Two FP32 numbers, rounded to the nearest BF16 numbers. Ties go to even, subnormal numbers are kept, NaN stays NaN."""


_MIX_LANES = {1: "", 2: "shr.b32 high, high, 1;\nand.b32 high, high, 0x7FFF7FFF;\n"}
ADD_LANE = {
    role: InlinePtx(
        ("pattern", "word"),
        1,
        "{\n.reg .b32 high, low;\nprmt.b32 high, $4, $5, 0x7632;\nprmt.b32 low, $4, $5, 0x5410;\n"
        f"{mix}xor.b32 low, low, high;\n"
        "dp2a.lo.u32.u32 $0, low, 0x001, $2;\ndp2a.lo.u32.u32 $1, low, 0x100, $3;\n}",
        "=&r,=r,r,r,r,r",
        2,
        "int32",
    )
    for role, mix in _MIX_LANES.items()
}
"""Two integers, plus the `lane_bits` of two words, by `role % 3`. The halves of two words share registers; a dot
product with 0 and 1 adds one of the results."""


def fast_path(path: FastPath, in_pairs: bool, bounded: str | None = None) -> InlinePtx:
    """The operations of a fast path, the test of their range, the test that admits zeros, and the exact instruction.

    Args:
        path: what to compute.
        in_pairs: whether two elements share an instruction, which rounds each by itself.
        bounded: the input, if there is one, that is nowhere smaller than another one, called `floor`, which is the same
            for all elements. At first, only this one is tested.
    """
    block = _Block(path.inputs if bounded is None else (*path.inputs, "floor"))

    def value(name: str, element: int) -> str:
        return block.input(name, element) if name in path.inputs else f"{name}_{element}"

    def operand(text: str, element: int) -> str:
        if text[0].isdigit():
            return _literal(float(text))
        return block.negative(value(text[1:], element)) if text[0] == "-" else value(text, element)

    for operation in path.operations:
        in_registers = [block.register(f"{operation.result}_{k}") for k in range(ELEMENTS)]
        operands = [[operand(text, k) for text in operation.operands] for k in range(ELEMENTS)]
        if in_pairs and ".rn." in operation.instruction:
            for k in range(0, ELEMENTS, 2):
                pairs = [block.pair(*both) for both in zip(operands[k], operands[k + 1], strict=True)]
                result = block.register(f"{operation.result}_pair_{k}", "b64")
                block.add(operation.instruction.replace(".f32", ".f32x2"), result, *pairs)
                block.add("mov.b64", f"{{{in_registers[k]}, {in_registers[k + 1]}}}", result)
        else:
            for k in range(ELEMENTS):
                block.add(operation.instruction, in_registers[k], *operands[k])

    results = [value(path.result, k) for k in range(ELEMENTS)]

    def smallest(name: str) -> str:
        compared = [value(name, k) for k in range(ELEMENTS)]
        return block.smallest(compared if name in path.inputs else [block.magnitude(x) for x in compared])

    tests = []
    for name, exponent in path.least.items():
        tests.append(block.register(f"{name}_in_range", "pred"))
        tested = block.input("floor", 0) if name == bounded else smallest(name)
        block.add("setp.ge.and.f32", tests[-1], tested, _literal(2.0**exponent), tests[-2] if tests[1:] else "true")
    for k, result in enumerate(results):
        block.add("mov.f32", block.output(0, k), result)
    block.add(f"@{tests[-1]} bra", "done")

    admitted = []
    for k, result in enumerate(results):
        is_zero, increment = block.register(f"zero_{k}", "pred"), block.register(f"increment_{k}")
        block.add("setp.eq.f32", is_zero, value(path.zero, k), _literal(0.0))
        block.add("selp.f32", block.output(0, k), value(path.zero_result, k), result, is_zero)
        # Increased by one, the result for a zero passes the test, but not if it is NaN.
        block.add("selp.f32", increment, _literal(1.0), _literal(0.0), is_zero)
        admitted.append(block.register(f"admitted_{k}"))
        block.add("add.rn.f32", admitted[-1], block.magnitude(block.output(0, k)), increment)
    if bounded is not None:
        block.add("setp.ge.f32", tests[-2], smallest(bounded), _literal(2.0 ** path.least[bounded]))
    bound = _literal(2.0 ** path.least[path.result])
    block.add("setp.ge.and.f32", tests[-1], block.smallest(admitted), bound, tests[-2] if tests[1:] else "true")
    block.add(f"@{tests[-1]} bra", "done")
    for k in range(ELEMENTS):
        block.add(path.instruction, block.output(0, k), *[value(name, k) for name in path.inputs])
    return block.inline_ptx()


def quiet_nans(values: int, tested: Sequence[int]) -> InlinePtx:
    """Render `ptx_graph.quiet_nans` for some tensors.

    Args:
        values: the number of tensors.
        tested: indices of those that are tested.
    """
    block = _Block(tuple(f"x{k}" for k in range(values)), outputs=values)
    places = [(index, k) for index in range(values) for k in range(ELEMENTS)]
    found = block.register("found", "pred")
    for index, k in places:
        block.add("mov.f32", block.output(index, k), block.input(f"x{index}", k))
    block.add("mov.pred", found, "0")
    for index in tested:
        for k in range(0, ELEMENTS, 2):
            # Also true if only one of the two is NaN.
            block.add("setp.nan.or.f32", found, block.input(f"x{index}", k), block.input(f"x{index}", k + 1), found)
    block.add("@!found bra", "done")
    for index, k in places:
        block.add("setp.nan.f32", found, block.input(f"x{index}", k), block.input(f"x{index}", k))
        block.add("@found mov.f32", block.output(index, k), _literal(float("nan")))
    return block.inline_ptx()


class _Block:
    """Instructions for `ELEMENTS` elements, in a block of their own with a label `done` at its end."""

    def __init__(self, inputs: tuple[str, ...], outputs: int = 1) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._lines: list[str] = []
        self._registers: dict[str, str] = {}
        self.register("true", "pred")
        self.add("mov.pred", "true", "1")

    def output(self, index: int, element: int) -> str:
        """The register of an element of a result."""
        return f"${index * ELEMENTS + element}"

    def input(self, name: str, element: int) -> str:
        """The register of an element of an input."""
        return self.output(self._outputs + self._inputs.index(name), element)

    def register(self, name: str, kind: str = "f32") -> str:
        """A register of this name, declared on first use."""
        self._registers[name] = kind
        return name

    def add(self, instruction: str, *operands: str) -> None:
        """Append an instruction."""
        self._lines.append(f"{instruction} {', '.join(operands)};")

    def negative(self, value: str) -> str:
        """A register with the negative of another."""
        result = self.register(f"negative_{len(self._lines)}")
        self.add("neg.f32", result, value)
        return result

    def magnitude(self, value: str) -> str:
        """A register with the magnitude of another."""
        result = self.register(f"magnitude_{len(self._lines)}")
        self.add("abs.f32", result, value)
        return result

    def pair(self, first: str, second: str) -> str:
        """A register with two FP32 numbers."""
        result = self.register(f"pair_{len(self._lines)}", "b64")
        self.add("mov.b64", result, f"{{{first}, {second}}}")
        return result

    def smallest(self, values: Sequence[str]) -> str:
        """A register with the smallest of some registers; NaN if one of them is."""
        remaining = list(values)
        while len(remaining) > 1:
            smaller = self.register(f"smaller_{len(self._lines)}")
            self.add("min.NaN.f32", smaller, *remaining[:2])
            remaining = [*remaining[2:], smaller]
        return remaining[0]

    def inline_ptx(self) -> InlinePtx:
        """The finished block."""
        declared = [f".reg .{kind} {name};" for name, kind in self._registers.items()]
        # Results are written before the last input is read.
        constraints = ["=&f"] * self._outputs * ELEMENTS + ["f"] * len(self._inputs) * ELEMENTS
        assembly = "\n".join(["{", *declared, *self._lines, "done:", "}"])
        return InlinePtx(self._inputs, self._outputs, assembly, ",".join(constraints), ELEMENTS)


def _literal(value: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"
