"""Kernels that divide and take roots by the fast paths in inline PTX, for comparisons with Triton's own."""

import importlib.util
from pathlib import Path
from types import ModuleType

from hf_lowprec.optim.codegen.triton_source import PtxRenderer

_KERNELS = """

@triton.jit
def divide(a, b, inlined, exact, BLOCK: tl.constexpr, PTX: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    numerator, denominator = tl.load(a + index), tl.load(b + index)
    tl.store(inlined + index, {divide})
    tl.store(exact + index, tl.div_rn(numerator, denominator))


@triton.jit
def root(v, inlined, exact, BLOCK: tl.constexpr, PTX: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(v + index)
    tl.store(inlined + index, {root})
    tl.store(exact + index, tl.sqrt_rn(value))
"""


def fast_path_kernels(folder: Path) -> ModuleType:
    """A module with the kernels `divide` and `root`, written to `folder`: Triton reads their source."""
    renderer = PtxRenderer()
    calls = {"divide": renderer.divide("numerator", "denominator"), "root": renderer.sqrt_rn("value")}
    source = "import triton\nimport triton.language as tl\n" + "".join(renderer.functions.values())
    file = folder / "fast_path_kernels.py"
    file.write_text(source + _KERNELS.format(**calls))
    spec = importlib.util.spec_from_file_location("fast_path_kernels", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
