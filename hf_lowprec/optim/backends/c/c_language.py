"""How C writes the traced operations, and how it loads and stores the elements of tensors.

The C compiler must neither contract nor re-associate floating-point operations; see the flags in `compiler.py`.
"""

from __future__ import annotations

import operator

import torch

from hf_lowprec.optim.backends.graph_renderer import COMPARISONS, FLOAT_BITS, INTEGER_BITS, Language
from hf_lowprec.rounding import quiet_nan, sqrt_rn
from hf_lowprec.rounding.block_floats import block_max
from hf_lowprec.rounding.random_bits import GOLDEN, weyl

WEYL_INCREMENT = f"0x{GOLDEN & 0xFFFFFFFF:x}u"
"""The increment of a random word's Weyl sequence from one element to the next, see `random_bits.py`."""

# How elements are stored, and how they are converted when they are loaded and stored, by storage dtype.
STORAGE = {
    torch.float32: "float",
    torch.bfloat16: "uint16_t",
    torch.float16: "_Float16",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
}
LOAD = {
    torch.float32: "quiet({0})",
    torch.bfloat16: "as_float((uint32_t){0} << 16)",
    torch.float16: "quiet((float){0})",
    torch.int16: "(uint32_t){0}",
    torch.int8: "(uint32_t){0}",
    torch.uint8: "(uint32_t){0}",
}
STORE = {
    torch.float32: "{0}",
    torch.bfloat16: "(uint16_t)(as_bits({0}) >> 16)",
    torch.float16: "(_Float16){0}",
    torch.int16: "(int16_t){0}",
    torch.int8: "(int8_t){0}",
    torch.uint8: "(uint8_t){0}",
}

# The same for a pair of 16-bit elements: the even one is in the lower half, the odd one in the upper.
LOAD_EVEN = {torch.bfloat16: "as_float({0} << 16)", torch.int16: "(uint32_t)((int32_t)({0} << 16) >> 16)"}
LOAD_ODD = {torch.bfloat16: "as_float({0} & 0xffff0000u)", torch.int16: "(uint32_t)((int32_t){0} >> 16)"}
STORE_PAIR = {torch.bfloat16: "as_bits({0}) >> 16 | as_bits({1})", torch.int16: "({0} & 0xffffu) | {1} << 16"}


def value_type(is_float: bool) -> str:
    """Return the type of a value in an element's operations."""
    return "float" if is_float else "uint32_t"


C = Language(
    assign=lambda name, expression, is_float: f"const {value_type(is_float)} {name} = {expression};",
    number=lambda value, is_float: f"{float(value).hex()}f" if is_float else f"0x{int(value) & 0xFFFFFFFF:x}u",
    operations={
        operator.truediv: "{0} / {1}".format,
        operator.rshift: "(uint32_t)((int32_t){0} >> {1})".format,
        torch.where: "{0} ? {1} : {2}".format,
        torch.clamp_min: "(int32_t){0} > (int32_t){1} ? {0} : {1}".format,
        torch.clamp_max: "(int32_t){0} < (int32_t){1} ? {0} : {1}".format,
        FLOAT_BITS: "as_float({0})".format,
        INTEGER_BITS: "as_bits({0})".format,
        sqrt_rn: "sqrtf({0})".format,
        quiet_nan: "{0}".format,  # done when the value is loaded, see `quiet` in c_source.py
        # The loops of `step` carry the sequence from element to element: one addition instead of a multiplication.
        weyl: lambda index, key0: f"weyl{key0.removeprefix('key').removesuffix('_0')}",
        block_max: "{0}".format,  # of one element; `block_loops.py` takes the largest
    },
    of_floats={operator.neg: "-{0}".format},
    of_integers={function: f"(int32_t){{0}} {sign} (int32_t){{1}}".format for function, sign in COMPARISONS.items()},
)
"""Floats are `float`, and integers `uint32_t`, whose overflow is defined."""
