"""Do all 2³² FP32 patterns survive being split into a BF16 weight and a 16-bit remainder?

`split` and `join` of `hf_lowprec/rounding/split.py` are rendered as C by the renderer of the native backend, and tried
on every pattern, stored as 16 + 16 bits in between:

1. every number comes back bit for bit, and every NaN as a NaN, with a NaN as weight;
2. no BF16 number is nearer to the number than its weight, by FP64 arithmetic, and of two equally near ones the weight
   is the one of larger magnitude; infinity counts as 2¹²⁸.

Takes a minute or two.

    python benchmarks/split_patterns.py [--output FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import fx

from hf_lowprec.optim.backends.c.compiler import FLAGS, require_compiler
from hf_lowprec.optim.backends.c.renderer import CRenderer
from hf_lowprec.optim.backends.renderer import indent, statements
from hf_lowprec.rounding import join, split

SOURCE = """\
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float as_float(uint32_t bits) {{ float value; memcpy(&value, &bits, 4); return value; }}
static inline uint32_t as_bits(float value) {{ uint32_t bits; memcpy(&bits, &value, 4); return bits; }}
static inline float quiet(float value) {{ return value != value ? NAN : value; }}

static inline void split(float master, uint16_t *stored_weight, int16_t *stored_remainder)
{{
{split}
    *stored_weight = (uint16_t)(as_bits({weight}) >> 16);
    *stored_remainder = (int16_t){rest};
}}

static inline float join(float weight, uint32_t remainder)
{{
{join}
    return {joined};
}}

/* The magnitude of a pattern without sign; infinity as the next power of two. */
static double magnitude(uint32_t pattern) {{ return pattern >= 0x7f800000u ? 0x1p128 : (double)as_float(pattern); }}

/* counts: patterns tried, NaNs among them, changed patterns, weights that are not the nearest. */
void check(uint64_t first, uint64_t end, int64_t *counts)
{{
    int64_t nans = 0, changed = 0, far = 0;
    for (uint64_t k = first; k < end; k++) {{
        const uint32_t pattern = (uint32_t)k;
        uint16_t weight;
        int16_t remainder;
        split(quiet(as_float(pattern)), &weight, &remainder);
        const uint32_t stored = (uint32_t)weight << 16;
        const uint32_t back = as_bits(join(as_float(stored), (uint32_t)remainder));
        if ((pattern & 0x7fffffffu) > 0x7f800000u) {{
            nans++;
            changed += (back & 0x7fffffffu) <= 0x7f800000u || (stored & 0x7fffffffu) <= 0x7f800000u;
            continue;
        }}
        changed += back != pattern;
        const uint32_t inner = pattern & 0x7fff0000u, sign = pattern & 0x80000000u;
        const int is_inner_nearer = magnitude(pattern & 0x7fffffffu) - magnitude(inner)
            < magnitude(inner + 0x10000u) - magnitude(pattern & 0x7fffffffu);
        const uint32_t nearest = inner == 0x7f800000u || is_inner_nearer ? inner : inner + 0x10000u;
        far += stored != (sign | nearest);
    }}
    counts[0] += (int64_t)(end - first);
    counts[1] += nans;
    counts[2] += changed;
    counts[3] += far;
}}
"""


def rendered(function: Callable[..., Any], names: list[str], integers: set[str]) -> tuple[str, list[str]]:
    """The C statements of a function of scalars called `names`, and the variables that hold its results."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    results = function(*(fx.Proxy(graph.placeholder(name), tracer) for name in names))
    graph.output(tuple(result.node for result in (results if isinstance(results, tuple) else (results,))))
    lines, variables = statements(graph, CRenderer(), integers)
    return indent(4, lines), variables


def library(folder: str) -> ctypes.CDLL:
    """Compile both functions and the check."""
    split_lines, (weight, rest) = rendered(split, ["master"], set())
    join_lines, (joined,) = rendered(join, ["weight", "remainder"], {"remainder"})
    source = Path(folder) / "split.c"
    source.write_text(SOURCE.format(split=split_lines, weight=weight, rest=rest, join=join_lines, joined=joined))
    compiled = source.with_suffix(".so")
    subprocess.run([*require_compiler(), *FLAGS, str(source), "-o", str(compiled), "-lm"], check=True)
    return ctypes.CDLL(str(compiled))


def check(first: int, end: int) -> dict[str, int]:
    """Try the patterns from `first` up to, not including, `end`."""
    with tempfile.TemporaryDirectory() as folder:
        counts = torch.zeros(4, dtype=torch.int64)
        library(folder).check(ctypes.c_uint64(first), ctypes.c_uint64(end), ctypes.c_void_p(counts.data_ptr()))
    return dict(zip(("patterns", "nans", "changed", "not nearest"), counts.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(f"benchmarks/results/split-patterns-{date.today()}.json"))
    options = parser.parse_args()
    began = time.perf_counter()
    found = check(0, 1 << 32)
    seconds = time.perf_counter() - began
    print(f"{', '.join(f'{name} {count:,}' for name, count in found.items())}; {seconds:.0f} s")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({**found, "seconds": round(seconds, 1)}) + "\n")
    if found["changed"] or found["not nearest"]:
        raise SystemExit("some patterns did not survive")


if __name__ == "__main__":
    main()
