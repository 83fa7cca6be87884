"""PTX of whole kernels, executed in NumPy: an instruction at a time, for all threads of a launch.

A register is an array with its bits in every thread. Threads are at the lowest place that any of them has reached, and
the others wait, so that branches converge. An instruction that is not known raises an error, and so does an access
outside of the given tensors or to a misaligned address, a second store to an address, and an instruction for a whole
warp or block that some of its threads do not reach.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

WARP = 32
_DTYPES = {
    **{"pred": np.bool_, "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64},
    **{"u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64},
    **{"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64},
    **{"f16": np.float16, "f32": np.float32, "f64": np.float64},
}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_NAN = {np.float16: 0x7FFF, np.float32: 0x7FFFFFFF, np.float64: 0x7FFFFFFFFFFFFFFF}
"""The NaN that arithmetic gives."""
_UNSET = 0xA5A5A5A5A5A5A5A5
_fma = ctypes.CDLL(None).fma
_fma.restype, _fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3
_fma_of_doubles = np.frompyfunc(_fma, 3, 1)


class _Instruction(NamedTuple):
    opcode: str
    operands: tuple[Any, ...]
    guard: str | None
    negated: bool


class Program:
    """A kernel, read from PTX.

    Args:
        ptx: the text of a module with one kernel.
        shared: bytes of shared memory per block.
    """

    def __init__(self, ptx: str, shared: int) -> None:
        self.shared = shared
        self.threads = int(_match(r"\.reqntid (\d+)", ptx))
        self.parameters = re.findall(r"\.param \S+ .*?(\w+_param_\d+)", ptx)
        self._widths: dict[str, Any] = {}
        self.code: list[_Instruction] = []
        self.labels: dict[str, int] = {}
        body = re.sub(r"//.*", "", ptx[ptx.index(".reqntid") :])
        scopes: list[str] = []
        for number, line in enumerate(body[body.index("{") :].splitlines()):
            line = line.strip().removesuffix(";")
            if line == "{":
                scopes.append(f"{number}.")
            elif line == "}":
                scopes.pop()
                if not scopes:
                    break
            elif line.startswith(".reg"):
                kind, names = line.removeprefix(".reg").split(maxsplit=1)
                for name in names.split(","):
                    name = name.strip()
                    key = name.split("<")[0] if "<" in name else scopes[-1] + name
                    self._widths[key] = _UNSIGNED[np.dtype(_DTYPES[kind[1:]]).itemsize] if kind != ".pred" else np.bool_
            elif line.endswith(":"):
                self.labels[self._name(line[:-1], scopes)] = len(self.code)
            elif line and not line.startswith("."):
                self.code.append(self._instruction(line, scopes))

    def _name(self, name: str, scopes: Sequence[str]) -> str:
        return name if name.startswith(("%", "$")) else scopes[-1] + name

    def _instruction(self, line: str, scopes: Sequence[str]) -> _Instruction:
        guard, negated = None, False
        if line.startswith("@"):
            text, line = line[1:].split(maxsplit=1)
            guard, negated = self._name(text.lstrip("!"), scopes), text[0] == "!"
        opcode, text = [*line.split(maxsplit=1), ""][:2]
        operands = re.findall(r"\{.*?\}|\[.*?\]|[^\s,]+", text)
        return _Instruction(opcode, tuple(self._operand(operand, scopes) for operand in operands), guard, negated)

    def _operand(self, text: str, scopes: Sequence[str]) -> Any:
        """A number, the name of a register or label, a list of operands, or a pair of base and offset."""
        if text[0] == "{":
            return [self._operand(part.strip(), scopes) for part in text[1:-1].split(",")]
        if text[0] == "[":
            base, _, offset = text[1:-1].replace(" ", "").partition("+")
            return (base if base.startswith("%") or base in self.parameters else 0), int(offset or 0)
        if text[:2] in ("0f", "0d"):
            return np.array([int(text[2:], 16)], np.uint32 if text[1] == "f" else np.uint64)
        if re.fullmatch(r"-?\d\w*", text):
            return int(text.rstrip("U"), 0)
        return 0 if text == "global_smem" else self._name(text, scopes)

    def width(self, register: str) -> Any:
        """The dtype of a register's bits."""
        if register not in self._widths:
            self._widths[register] = self._widths[register.rstrip("0123456789")]
        return self._widths[register]


def run(program: Program, blocks: int, arguments: Iterable[int], tensors: Iterable[Tensor]) -> None:
    """Execute a launch.

    Args:
        program: the kernel.
        blocks: how many, in one dimension.
        arguments: the values of its parameters.
        tensors: all memory that it may access, besides shared memory.
    """
    with np.errstate(all="ignore"):
        _Launch(program, blocks, arguments, _Memory(tensors)).run()


class _Memory:
    """The tensors, at their own addresses."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        spans: dict[int, int] = {}
        for tensor in tensors:
            if tensor.nbytes == 0:
                continue
            begin = tensor.data_ptr()
            spans[begin] = max(spans.get(begin, 0), begin + tensor.nbytes)
        self._begins = np.array(sorted(spans), np.uint64)
        self._ends = np.array([spans[begin] for begin in sorted(spans)], np.uint64)
        self._low = int(self._begins[0]) & ~15
        size = -(-(int(self._ends.max()) - self._low) // 16) * 16
        # A view of all addresses in between, of which only the tensors' are read.
        self._bytes = np.frombuffer((ctypes.c_uint8 * size).from_address(self._low), np.uint8)
        self._stored: list[np.ndarray] = []

    def places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Positions in `view`, of accesses of `size` bytes."""
        found = np.maximum(np.searchsorted(self._begins, addresses, side="right"), 1) - 1
        inside = (addresses >= self._begins[found]) & (addresses + np.uint64(size) <= self._ends[found])
        assert inside.all(), f"{(~inside).sum()} threads access {size} bytes outside of every tensor"
        assert (addresses % np.uint64(size) == 0).all(), f"an access of {size} bytes is misaligned"
        return (addresses - np.uint64(self._low)).astype(np.int64)

    def record_stores(self, places: np.ndarray, size: int) -> None:
        self._stored.append((places[:, None] + np.arange(size)).ravel())

    def check_stores(self) -> None:
        """A launch stores an element once: otherwise, one of the stores could not have seen the other."""
        stored = np.sort(np.concatenate(self._stored)) if self._stored else np.zeros(0)
        assert (stored[1:] != stored[:-1]).all(), "an address is stored to twice"

    def view(self, dtype: Any) -> np.ndarray:
        return self._bytes.view(dtype)


class _Launch:
    def __init__(self, program: Program, blocks: int, arguments: Iterable[int], memory: _Memory) -> None:
        self._program, self._memory = program, memory
        self._threads = blocks * program.threads
        thread = np.arange(self._threads, dtype=np.uint32)
        self._block = (thread // program.threads).astype(np.int64)
        self._shared = np.full(blocks * program.shared + 16, _UNSET & 0xFF, np.uint8)
        self._registers: dict[str, np.ndarray] = {
            "%tid.x": thread % program.threads,
            "%ctaid.x": self._block.astype(np.uint32),
            "%nctaid.x": np.full(self._threads, blocks, np.uint32),
        }
        padded = [*arguments, *[0] * len(program.parameters)]  # Triton's own parameters come last
        for name, value in zip(program.parameters, padded, strict=False):
            self._registers[name] = np.full(self._threads, value, np.uint64)

    def run(self) -> None:
        """Execute until all threads have returned."""
        code, labels = self._program.code, self._program.labels
        waiting = {0: np.ones(self._threads, bool)}
        while waiting:
            place = min(waiting)
            active = waiting.pop(place)
            full = bool(active.all())
            while place not in waiting:
                instruction = code[place]
                chosen, every = active, full
                if instruction.guard is not None:
                    chosen = active & (self._registers[instruction.guard] ^ instruction.negated)
                    every = bool(chosen.all())
                place += 1
                branch = instruction.opcode.split(".")[0] in ("bra", "ret")
                if not branch and (every or chosen.any()):
                    self._execute(instruction, chosen, every)
                elif branch and chosen.any():
                    remaining = active & ~chosen
                    if instruction.opcode != "ret":
                        self._wait(waiting, labels[instruction.operands[0]], chosen)
                    if not remaining.any():
                        active = remaining
                        break
                    active, full = remaining, False
                    if min(waiting, default=place) < place:
                        break
            if active.any():
                self._wait(waiting, place, active)
        self._memory.check_stores()

    @staticmethod
    def _wait(waiting: dict[int, np.ndarray], place: int, threads: np.ndarray) -> None:
        waiting[place] = waiting[place] | threads if place in waiting else threads

    def _bits(self, register: str) -> np.ndarray:
        """A register's bits: some, before it is written to, since a permutation may take no byte of an operand."""
        if register not in self._registers:
            self._registers[register] = np.full(self._threads, _UNSET, np.uint64).astype(self._program.width(register))
        return self._registers[register]

    def read(self, operand: Any, kind: str) -> np.ndarray:
        """An operand as numbers of a type: those of all threads, or one."""
        dtype = _DTYPES[kind.removesuffix("x2")]
        if isinstance(operand, int):
            return np.array([operand & 2 ** (8 * np.dtype(dtype).itemsize) - 1]).astype(dtype)
        bits = operand if isinstance(operand, np.ndarray) else self._bits(operand)
        if kind.endswith("x2"):
            return bits.view(dtype).reshape(-1, 2)
        size = np.dtype(dtype).itemsize
        return (bits if bits.itemsize == size else bits.astype(_UNSIGNED[size])).view(dtype)

    def write(self, register: str, value: np.ndarray, chosen: np.ndarray, every: bool) -> None:
        """Write numbers to the chosen threads' registers."""
        if register.endswith("_"):
            return
        width = self._program.width(register)
        if value.ndim == 2:
            value = np.ascontiguousarray(value).view(np.uint64).ravel()
        if value.itemsize < np.dtype(width).itemsize:  # keeps the sign of signed integers
            assert value.dtype.kind in "ui"
            value = value.astype(f"{value.dtype.kind}{np.dtype(width).itemsize}")
        value = np.ascontiguousarray(value).view(width)
        if not every:
            value = np.where(chosen, value, self._bits(register))
        self._registers[register] = value if len(value) == self._threads else np.full(self._threads, value)

    def _execute(self, instruction: _Instruction, chosen: np.ndarray, every: bool) -> None:
        opcode, operands = instruction.opcode, instruction.operands
        name, *modifiers = opcode.split(".")
        if name in ("ld", "st"):
            self._access(modifiers, operands, chosen)
        elif name == "bar":
            self._together(chosen, self._program.threads)
        elif name in ("ldmatrix", "stmatrix"):
            self._matrix(name, modifiers, operands, chosen)
        elif name == "mov" and (isinstance(operands[0], list) or isinstance(operands[1], list)):
            self._move_parts(modifiers[-1], *operands, chosen, every)
        else:
            sources, compute = _decoded(opcode)
            if name == "shfl":
                self._together(chosen, WARP)
            if len(sources) != len(operands) - 1:
                raise NotImplementedError(f"{opcode} with {len(operands)} operands")
            values = [self.read(operand, kind) for operand, kind in zip(operands[1:], sources, strict=True)]
            result = compute(*values)
            targets = operands[0].split("|") if isinstance(operands[0], str) else operands[:1]
            # A comparison of two pairs has two results.
            for target, value in zip(targets, result.T if len(targets) > 1 else [result], strict=True):
                self.write(target, value, chosen, every)

    def _together(self, chosen: np.ndarray, threads: int) -> None:
        arrived = chosen.reshape(-1, threads)
        assert (arrived.all(axis=1) | ~arrived.any(axis=1)).all(), f"some of {threads} threads are somewhere else"

    def _access(self, modifiers: list[str], operands: tuple[Any, ...], chosen: np.ndarray) -> None:
        """Load or store a number, or two or four next to each other, in the chosen threads."""
        space, kind = modifiers[0], modifiers[-1]
        loads = isinstance(operands[1], tuple)
        (base, offset), registers = operands[::-1] if loads else operands
        registers = registers if isinstance(registers, list) else [registers]
        if space == "param":
            self.write(registers[0], self._registers[base], chosen, bool(chosen.all()))
            return
        dtype = np.dtype(_DTYPES[kind])
        size = dtype.itemsize * len(registers)
        if space == "global":
            places = self._memory.places(self._registers[base][chosen] + np.uint64(offset), size)
            memory = self._memory.view(dtype)
            if not loads:
                self._memory.record_stores(places, size)
        elif space == "shared":
            places = self._shared_places(base, offset, chosen, size)
            memory = self._shared.view(dtype)
        else:
            raise NotImplementedError(f"memory {space!r}")
        for k, register in enumerate(registers):
            if loads:
                values = np.zeros(self._threads, dtype)
                values[chosen] = memory[places // dtype.itemsize + k]
                self.write(register, values, chosen, bool(chosen.all()))
            else:
                values = np.broadcast_to(self.read(register, kind), self._threads)
                memory[places // dtype.itemsize + k] = values[chosen]

    def _shared_places(self, base: Any, offset: int, chosen: np.ndarray, size: int) -> np.ndarray:
        """Positions in `_shared`, of accesses of `size` bytes."""
        addresses = np.broadcast_to(self.read(base, "u32").astype(np.int64) + offset, self._threads)[chosen]
        assert ((addresses >= 0) & (addresses + size <= self._program.shared)).all(), "outside of shared memory"
        assert (addresses % size == 0).all(), f"an access of {size} bytes to shared memory is misaligned"
        return self._block[chosen] * self._program.shared + addresses

    def _matrix(self, name: str, modifiers: list[str], operands: tuple[Any, ...], chosen: np.ndarray) -> None:
        """Load or store four 8x8 matrices per warp, of which each thread names a row and holds two elements of each."""
        if [m for m in modifiers if m != "trans"] != ["sync", "aligned", "m8n8", "x4", "shared", "b16"]:
            raise NotImplementedError(f"{name} {modifiers}")
        self._together(chosen, WARP)
        registers, (base, offset) = operands if name == "ldmatrix" else operands[::-1]
        rows = self._shared_places(base, offset, chosen, 16).reshape(-1, 4, 8) // 2
        memory = self._shared.view(np.uint16)
        places = rows[..., None] + np.arange(8)  # warp, matrix, row, column
        if "trans" in modifiers:
            places = places.swapaxes(2, 3)
        places = places.reshape(-1, 4, WARP, 2)  # warp, matrix, thread, element
        for k, register in enumerate(registers):
            if name == "ldmatrix":
                values = np.zeros(self._threads, np.uint32)
                values[chosen] = np.ascontiguousarray(memory[places[:, k]]).view(np.uint32).ravel()
                self.write(register, values, chosen, bool(chosen.all()))
            else:
                values = np.broadcast_to(self.read(register, "b32"), self._threads)
                memory[places[:, k]] = np.ascontiguousarray(values[chosen]).view(np.uint16).reshape(-1, WARP, 2)

    def _move_parts(self, kind: str, target: Any, source: Any, chosen: np.ndarray, every: bool) -> None:
        """Split a register into parts, or put it together."""
        parts = target if isinstance(target, list) else source
        size = np.dtype(_DTYPES[kind]).itemsize // len(parts)
        if isinstance(target, list):
            values = self.read(source, kind).view(_UNSIGNED[size]).reshape(-1, len(parts))
            for k, register in enumerate(parts):
                self.write(register, np.ascontiguousarray(values[:, k]), chosen, every)
        else:
            read = [np.broadcast_to(self.read(part, f"b{8 * size}"), self._threads) for part in parts]
            self.write(target, np.stack(read, axis=1).view(_DTYPES[kind]).ravel(), chosen, every)


_ORDERED = {"eq": operator.eq, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
_ORDERED["ne"] = lambda a, b: (a < b) | (a > b)
_COMPARISONS = _ORDERED | {"nan": lambda a, b: np.isnan(a) | np.isnan(b)}
_COMPARISONS |= {
    f"{name}u": lambda a, b, test=test: test(a, b) | np.isnan(a) | np.isnan(b) for name, test in _ORDERED.items()
}
_JOINED = {"and": operator.and_, "or": operator.or_}
_BITWISE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_INTEGER = {"add": operator.add, "sub": operator.sub, "min": np.minimum, "max": np.maximum}
_FLOAT = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}


@functools.cache
def _decoded(opcode: str) -> tuple[tuple[str, ...], Callable[..., np.ndarray]]:
    """The types of an instruction's operands, and the function that computes its result."""
    name, *modifiers, kind = opcode.split(".")
    is_float = kind in ("f32", "f64", "f32x2")
    match name, modifiers:
        case "mov", []:
            return (kind,), lambda a: a
        case "neg", [] if kind == "f32":
            return ("b32",), lambda a: a ^ np.uint32(0x80000000)
        case "abs", [] if kind == "f32":
            return ("b32",), lambda a: a & np.uint32(0x7FFFFFFF)
        case "neg", [] if kind[0] == "s":
            return (kind,), operator.neg
        case "not", []:
            return (kind,), operator.invert
        case "and" | "or" | "xor", []:
            return (kind, kind), _BITWISE[name]
        case "add" | "sub" | "min" | "max", [] if kind[0] in "us":
            return (kind, kind), _INTEGER[name]
        case "div" | "rem", [] if kind[0] in "us":
            return (kind, kind), functools.partial(_divided, rest=name == "rem")
        case "mul", ["lo"]:
            return (kind, kind), operator.mul
        case "mad", ["lo"]:
            return (kind, kind, kind), lambda a, b, c: a * b + c
        case "mul" | "mad", ["wide"]:
            wide = f"{kind[0]}{2 * int(kind[1:])}"
            add = (wide,) if name == "mad" else ()
            return (kind, kind, *add), lambda a, b, *c: sum(c, a.astype(_DTYPES[wide]) * b.astype(_DTYPES[wide]))
        case "shl" | "shr", []:
            return (kind, "u32"), functools.partial(_shift, left=name == "shl")
        case "bfe", [] if kind == "u32":
            return (kind, "u32", "u32"), lambda a, first, count: a >> first & ((np.uint32(1) << count) - np.uint32(1))
        case "bfe", [] if kind == "s32":
            return (kind, "s32", "s32"), lambda a, first, count: a >> first << 32 - count >> 32 - count
        case "prmt", [] if kind == "b32":
            return (kind, kind, "u32"), _permute
        case "selp", []:
            return (kind, kind, "pred"), lambda a, b, condition: np.where(condition, a, b)
        case "setp", [comparison] if comparison in _COMPARISONS:
            return (kind, kind), _COMPARISONS[comparison]
        case "setp", [comparison, joined] if comparison in _COMPARISONS and joined in _JOINED:
            return (kind, kind, "pred"), lambda a, b, other: _JOINED[joined](_COMPARISONS[comparison](a, b), other)
        case "cvt", [to] if kind[0] in "us" and to[0] in "us":
            return (kind,), lambda a: a.astype(_DTYPES[to])
        case "cvt", [to] if (to, kind) in (("f32", "f16"), ("f64", "f32")):
            return (kind,), lambda a: _with_one_nan(a.astype(_DTYPES[to]))
        case "cvt", ["rn", "f32"] if kind == "s32":
            return (kind,), lambda a: a.astype(np.float32)
        case "cvt", ["rzi", "s32"] if kind == "f32":
            return (kind,), lambda a: a.astype(np.int32)
        case "cvt", ["rn", "f16"] if kind == "f32":
            return (kind,), lambda a: _with_one_nan(a.astype(np.float16))
        case "cvt", ["rn", "f16x2"] if kind == "f32":
            return (kind, kind), lambda a, b: _pair(
                *(_with_one_nan(x.astype(np.float16)).view(np.uint16) for x in (a, b))
            )
        case "cvt", ["rn", "bf16x2"] if kind == "f32":
            return (kind, kind), lambda a, b: _pair(_bfloat16(a), _bfloat16(b))
        case "shfl", ["sync", "bfly"] if kind == "b32":
            return (kind, "u32", "u32", "u32"), _butterfly
        case "min" | "max", ["NaN"] | [] if kind == "f32":
            return (kind, kind), functools.partial(_extreme, largest=name == "max", keeps_nan=bool(modifiers))
        case "sqrt", ["rn"] if is_float:
            return (kind,), lambda a: _with_one_nan(np.sqrt(a))
        case "add" | "sub", ["rn", "f32"] if kind == "f16":
            return ("f16", "f32"), lambda a, b: _with_one_nan(_FLOAT[name](a.astype(np.float32), b))
        case "fma", ["rn"] if kind == "f64":
            return (kind,) * 3, lambda a, b, c: _with_one_nan(_fma_of_doubles(a, b, c).astype(np.float64))
        case "fma", ["rn"] if is_float:
            return (kind,) * 3, lambda a, b, c: _with_one_nan(_fused(a, b, c))
        case "add" | "sub" | "mul" | "div", ["rn"] if is_float:
            return (kind, kind), lambda a, b: _with_one_nan(_FLOAT[name](a, b))
        case "add" | "sub" | "mul", ["rn", "ftz"] if is_float:
            return (kind, kind), lambda a, b: _flushed(_with_one_nan(_FLOAT[name](_flushed(a), _flushed(b))))
    raise NotImplementedError(f"the instruction {opcode}")


def _with_one_nan(value: np.ndarray) -> np.ndarray:
    bits = value.view(_UNSIGNED[value.itemsize])
    bits[value != value] = _NAN[value.dtype.type]
    return value


def _flushed(value: np.ndarray) -> np.ndarray:
    return np.where(np.abs(value) < np.float32(2.0**-126), np.copysign(np.float32(0), value), value)


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The product is exact in FP64. Their sum is rounded to odd, so that rounding it to FP32 is the only rounding."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error) & (bits & 1 == 0)
    bits += np.where(inexact, np.where((error > 0) == (total > 0), 1, -1), 0)
    return total.astype(np.float32)


def _divided(a: np.ndarray, b: np.ndarray, rest: bool) -> np.ndarray:
    """The quotient of integers, rounded towards zero, or what it leaves. Threads that are elsewhere may divide by 0."""
    b = np.where(b == 0, b.dtype.type(1), b)
    return np.fmod(a, b) if rest else (a - np.fmod(a, b)) // b


def _shift(a: np.ndarray, bits: np.ndarray, left: bool) -> np.ndarray:
    width = 8 * a.itemsize
    shift = np.minimum(bits, width - 1).astype(a.dtype)
    if left or a.dtype.kind == "u":
        return np.where(bits < width, a << shift if left else a >> shift, a.dtype.type(0))
    return a >> shift


def _permute(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Four of the eight bytes of two registers, or their signs."""
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(both)
    for k in range(4):
        chosen = (selector >> np.uint32(4 * k)).astype(np.uint64)
        byte = both >> np.uint64(8) * (chosen & np.uint64(7)) & np.uint64(0xFF)
        if (of_sign := chosen & np.uint64(8) != 0).any():
            byte = np.where(of_sign, np.where(byte >= 0x80, np.uint64(0xFF), np.uint64(0)), byte)
        result |= byte << np.uint64(8 * k)
    return result.astype(np.uint32)


def _pair(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    return upper.astype(np.uint32) << np.uint32(16) | lower


def _bfloat16(value: np.ndarray) -> np.ndarray:
    """The pattern of the nearest BF16 number."""
    bits = value.view(np.uint32)
    nearest = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(0x7FFF), nearest)


def _butterfly(value: np.ndarray, lane_mask: np.ndarray, clamp: np.ndarray, members: np.ndarray) -> np.ndarray:
    if clamp.tolist() != [31] or members.tolist() != [0xFFFFFFFF]:
        raise NotImplementedError("shuffles of a part of a warp")
    return value.reshape(-1, WARP)[:, np.arange(WARP) ^ int(lane_mask[0])].ravel()


def _extreme(a: np.ndarray, b: np.ndarray, largest: bool, keeps_nan: bool) -> np.ndarray:
    """-0 is smaller than 0. Only `NaN` keeps it if one operand is a number."""
    choice = ((np.maximum if largest else np.minimum) if keeps_nan else (np.fmax if largest else np.fmin))(a, b)
    of_equals = (operator.and_ if largest else operator.or_)(a.view(np.uint32), b.view(np.uint32)).view(np.float32)
    return _with_one_nan(np.where(a == b, of_equals, choice))


def _match(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"{pattern!r} is not in the PTX"
    return match[1]
