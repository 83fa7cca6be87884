"""Kernels with the inline PTX of a step: divisions, roots and random bits, for comparisons with Triton's own."""

import importlib.util
from pathlib import Path
from types import ModuleType

from hf_lowprec.optim.backends.triton.renderer import PtxRenderer

_KERNELS = """

@triton.jit
def divide(a, b, inlined, exact, BLOCK: tl.constexpr, PTX: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    numerator, denominator = tl.load(a + index), tl.load(b + index)
    tl.store(inlined + index, {divide})
    tl.store(exact + index, tl.div_rn(numerator, denominator))


@triton.jit
def divide_above(a, b, floor, inlined, exact, BLOCK: tl.constexpr, PTX: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    numerator, denominator, least = tl.load(a + index), tl.load(b + index), tl.load(floor)
    tl.store(inlined + index, {divide_above})
    tl.store(exact + index, tl.div_rn(numerator, denominator))


@triton.jit
def random_sums(pattern, word, sums, BLOCK: tl.constexpr, PTX: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits, random = tl.load(pattern + index), tl.load(word + index)
    count = tl.num_programs(0).to(tl.int64) * BLOCK
    tl.store(sums + index, {lane_1})
    tl.store(sums + count + index, {lane_2})


@triton.jit
def root(v, inlined, exact, BLOCK: tl.constexpr, PTX: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(v + index)
    tl.store(inlined + index, {root})
    tl.store(exact + index, tl.sqrt_rn(value))
"""


def fast_path_source() -> str:
    """The Python source of these kernels."""
    renderer = PtxRenderer()
    calls = {
        "divide": renderer.divide("numerator", "denominator"),
        "divide_above": renderer.divide_above("numerator", "denominator", "least"),
        "root": renderer.sqrt_rn("value"),
        "lane_1": renderer.add_lane("bits", "random", 1),
        "lane_2": renderer.add_lane("bits", "random", 2),
    }
    source = "import triton\nimport triton.language as tl\n" + "".join(renderer.functions.values())
    return source + _KERNELS.format(**calls)


def fast_path_kernels(folder: Path) -> ModuleType:
    """A module with these kernels, written to `folder`: Triton reads their source."""
    file = folder / "fast_path_kernels.py"
    file.write_text(fast_path_source())
    spec = importlib.util.spec_from_file_location("fast_path_kernels", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
