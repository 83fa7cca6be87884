"""Inline PTX, executed instruction by instruction in Python: for tests without a GPU."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hf_lowprec.optim.codegen.inline_ptx import InlinePtx

_LEAST_NORMAL = 2.0**-126
_fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
_fmaf.restype, _fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3


def emulate(ptx: InlinePtx, inputs: Sequence[Sequence[float]]) -> list[float]:
    """Compute the outputs of a thread.

    Args:
        ptx: the instructions.
        inputs: for each input, its elements: FP32 numbers, or unsigned integers of 32 bits.

    Returns:
        The elements of the first result, then those of the others. All NaN are one, and approximations are as exact as
        FP32 can be.
    """
    results = ptx.outputs * ptx.elements
    registers: dict[str, Any] = {
        f"${results + k}": value for k, value in enumerate(value for values in inputs for value in values)
    }
    lines = ptx.assembly.splitlines()
    skips = False
    for line in lines:
        if line.startswith("done:"):
            skips = False
        if skips or line.startswith((".reg", "{", "}", "done:")):
            continue
        instruction, text = line.removesuffix(";").split(maxsplit=1)
        if instruction.startswith("@"):
            negated, predicate = instruction[1] == "!", instruction.lstrip("@!")
            if registers[predicate] == negated:
                continue
            instruction, text = text.split(maxsplit=1)
        if instruction == "bra":
            skips = True
            continue
        result, *operands = re.findall(r"\{.*?\}|[^\s,]+", text)
        value = _execute(instruction, [_value(operand, registers) for operand in operands])
        if result.startswith("{"):
            registers.update(zip(_names(result), value, strict=True))
        else:
            registers[result] = value
    return [registers[f"${k}"] for k in range(results)]


def _names(pair: str) -> list[str]:
    return pair.strip("{}").split(", ")


def _value(operand: str, registers: dict[str, Any]) -> Any:
    if operand.startswith("{"):
        return tuple(_value(name, registers) for name in _names(operand))
    if re.fullmatch(r"0f[0-9A-F]{8}", operand):
        return struct.unpack("<f", struct.pack("<I", int(operand[2:], 16)))[0]
    return int(operand, 0) if operand[0].isdigit() else registers[operand]


def _execute(instruction: str, operands: list[Any]) -> Any:
    if instruction.endswith(".f32x2"):
        single = _INSTRUCTIONS[instruction.removesuffix("x2")]
        return tuple(single(*elements) for elements in zip(*operands, strict=True))
    return _INSTRUCTIONS[instruction](*operands)


def _fp32(value: float) -> float:
    """Rounded to FP32. Sums, products, quotients and roots of FP32 numbers may be FP64: rounding twice is harmless."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _flushed(value: float) -> float:
    return math.copysign(0.0, value) if abs(value) < _LEAST_NORMAL else value


def divide(a: float, b: float) -> float:
    """The FP32 quotient, correctly rounded."""
    with np.errstate(all="ignore"):
        return _fp32(float(np.float64(a) / np.float64(b)))


def root(v: float) -> float:
    """The FP32 square root, correctly rounded."""
    return _fp32(math.sqrt(v)) if v >= 0 else v if v == 0 else math.nan


def _multiply(a: float, b: float) -> float:
    return _fp32(a * b)


def _permute(low: int, high: int, selector: int) -> int:
    """Four of the eight bytes of two registers."""
    both = (low | high << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(both[selector >> 4 * k & 7] for k in range(4)), "little")


def _dot_product(a: int, b: int, c: int) -> int:
    """Of both 16-bit halves of `a` and the two low bytes of `b`, plus `c`."""
    return ((a & 0xFFFF) * (b & 0xFF) + (a >> 16) * (b >> 8 & 0xFF) + c) & 0xFFFFFFFF


_INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov.pred": bool,
    "mov.f32": lambda a: a,
    "mov.b64": lambda a: a,
    "neg.f32": lambda a: -a,
    "abs.f32": abs,
    "add.rn.f32": lambda a, b: _fp32(a + b),
    "mul.rn.f32": _multiply,
    "mul.rn.ftz.f32": lambda a, b: _flushed(_multiply(_flushed(a), _flushed(b))),
    "fma.rn.f32": _fmaf,
    "rcp.approx.ftz.f32": lambda b: _flushed(divide(1.0, _flushed(b))),
    "rsqrt.approx.ftz.f32": lambda v: _flushed(divide(1.0, root(_flushed(v)))),
    "div.rn.f32": divide,
    "sqrt.rn.f32": root,
    "min.NaN.f32": lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else min(a, b),
    "setp.eq.f32": lambda a, b: a == b,
    "setp.ge.f32": lambda a, b: a >= b,
    "setp.ge.and.f32": lambda a, b, also: a >= b and also,
    "setp.nan.f32": lambda a, b: math.isnan(a) or math.isnan(b),
    "setp.nan.or.f32": lambda a, b, other: math.isnan(a) or math.isnan(b) or other,
    "selp.f32": lambda a, b, condition: a if condition else b,
    "prmt.b32": _permute,
    "shr.b32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "dp2a.lo.u32.u32": _dot_product,
}
"""Of registers with FP32 numbers, tuples of two, and unsigned integers of 32 bits."""
