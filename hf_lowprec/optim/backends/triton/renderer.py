"""The renderer for Triton, and how the elements of tensors are stored, loaded and stored again.

BF16 is loaded and stored as 16-bit integers, so that neither the compiler nor Triton's interpreter rounds it a second
time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from hf_lowprec.optim.backends.renderer import Renderer, arguments, indent, statements
from hf_lowprec.rounding.random_bits import GOLDEN

# How elements are stored, and how they are converted when they are loaded and stored, by storage dtype.
STORAGE = {
    torch.float32: "float32",
    torch.bfloat16: "uint16",
    torch.float16: "float16",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
}
LOAD = {
    torch.float32: "{0}",
    torch.bfloat16: "({0}.to(tl.uint32) << 16).to(tl.float32, bitcast=True)",
    torch.float16: "{0}.to(tl.float32)",
    torch.int16: "{0}.to(tl.int32)",
    torch.int8: "{0}.to(tl.int32)",
    torch.uint8: "{0}.to(tl.int32)",
}
STORE = {
    torch.float32: "{0}",
    torch.bfloat16: "({0}.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)",
    torch.float16: "{0}.to(tl.float16)",
    torch.int16: "{0}.to(tl.int16)",
    torch.int8: "{0}.to(tl.int8)",
    torch.uint8: "{0}.to(tl.uint8)",
}


class TritonRenderer(Renderer):
    """Renders floats as `tl.float32` and integers as `tl.int32`."""

    def assign(self, name: str, expression: str, is_float: bool) -> str:
        return f"{name} = {expression}"

    def number(self, value: float, is_float: bool) -> str:
        return repr(torch.tensor(value, dtype=torch.float32, device="cpu").item() if is_float else int(value))

    def divide(self, left: str, right: str) -> str:
        return f"tl.div_rn({left}, {right})"

    def shift_right(self, value: str, bits: str) -> str:
        return f"{value} >> {bits}"

    def negate(self, value: str) -> str:
        return f"{value} * -1.0"  # Triton's unary minus computes 0 - x, which loses the sign of zero

    def select(self, condition: str, if_true: str, if_false: str) -> str:
        return f"tl.where({condition}, {if_true}, {if_false})"

    def larger(self, left: str, right: str) -> str:
        return f"tl.maximum({left}, {right})"

    def smaller(self, left: str, right: str) -> str:
        return f"tl.minimum({left}, {right})"

    def bitcast(self, value: str, to_float: bool) -> str:
        return f"{value}.to(tl.{'float32' if to_float else 'int32'}, bitcast=True)"

    def sqrt_rn(self, value: str) -> str:
        return f"tl.sqrt_rn({value})"

    def quiet_nan(self, value: str) -> str:
        return f"tl.where({value} != {value}, float('nan'), {value})"  # NVIDIA's arithmetic gives NaN as 0x7FFFFFFF

    def weyl(self, index: str, key0: str) -> str:
        return f"{index} * {GOLDEN} + {key0}"

    def block_max(self, value: str) -> str:
        return f"tl.max({value}, axis=1, keep_dims=True)"


_FORMULA = """

@triton.jit
def {name}(
    {inputs}
):
    # BLOCK elements: the operations traced from {traced}.
{body}
    return {results}
"""


def render_formula(name: str, traced: str, inputs: Sequence[str], graph: fx.Graph, integers: Collection[str]) -> str:
    """Render a function that performs the operations of `graph`, which is a trace of `traced`."""
    lines, results = statements(graph, TritonRenderer(), integers)
    return _FORMULA.format(
        name=name, traced=traced, inputs=arguments(inputs, 4), body=indent(4, lines), results=", ".join(results)
    )
