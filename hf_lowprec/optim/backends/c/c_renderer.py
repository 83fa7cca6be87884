"""The renderer for C, and how the elements of tensors are stored, loaded and stored again.

The C compiler must neither contract nor re-associate floating-point operations; see the flags in `compiler.py`.
"""

from __future__ import annotations

import torch

from hf_lowprec.optim.backends.graph_renderer import Renderer
from hf_lowprec.rounding.random_bits import GOLDEN

WEYL_INCREMENT = f"0x{GOLDEN & 0xFFFFFFFF:x}u"
"""Added to the Weyl sequence of a random word from each element to the next, see `random_bits.py`."""

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

# The same for the two elements of a pair of 16 bits each: the even one is in its lower half, the odd one in its upper.
LOAD_EVEN = {torch.bfloat16: "as_float({0} << 16)", torch.int16: "(uint32_t)((int32_t)({0} << 16) >> 16)"}
LOAD_ODD = {torch.bfloat16: "as_float({0} & 0xffff0000u)", torch.int16: "(uint32_t)((int32_t){0} >> 16)"}
STORE_PAIR = {torch.bfloat16: "as_bits({0}) >> 16 | as_bits({1})", torch.int16: "({0} & 0xffffu) | {1} << 16"}


class CRenderer(Renderer):
    """Renders floats as `float` and integers as `uint32_t`, whose overflow is defined."""

    def assign(self, name: str, expression: str, is_float: bool) -> str:
        return f"const {value_type(is_float)} {name} = {expression};"

    def number(self, value: float, is_float: bool) -> str:
        return f"{float(value).hex()}f" if is_float else f"0x{int(value) & 0xFFFFFFFF:x}u"

    def compare(self, left: str, sign: str, right: str, is_float: bool) -> str:
        return f"{left} {sign} {right}" if is_float else f"(int32_t){left} {sign} (int32_t){right}"

    def divide(self, left: str, right: str) -> str:
        return f"{left} / {right}"

    def shift_right(self, value: str, bits: str) -> str:
        return f"(uint32_t)((int32_t){value} >> {bits})"

    def negate(self, value: str) -> str:
        return f"-{value}"

    def select(self, condition: str, if_true: str, if_false: str) -> str:
        return f"{condition} ? {if_true} : {if_false}"

    def larger(self, left: str, right: str) -> str:
        return f"(int32_t){left} > (int32_t){right} ? {left} : {right}"

    def smaller(self, left: str, right: str) -> str:
        return f"(int32_t){left} < (int32_t){right} ? {left} : {right}"

    def bitcast(self, value: str, to_float: bool) -> str:
        return f"{'as_float' if to_float else 'as_bits'}({value})"

    def sqrt_rn(self, value: str) -> str:
        return f"sqrtf({value})"

    def quiet_nan(self, value: str) -> str:
        return value  # done when the value is loaded, see `quiet` in c_source.py

    def weyl(self, index: str, key0: str) -> str:
        # The loops of `step` carry the sequence from element to element: one addition instead of a multiplication.
        return f"weyl{key0.removeprefix('key').removesuffix('_0')}"

    def block_max(self, value: str) -> str:
        return value  # of one element; `block_loops.py` takes the largest


def value_type(is_float: bool) -> str:
    """The type of a value in an element's operations."""
    return "float" if is_float else "uint32_t"
