"""The kernels that are compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import triton.language as tl

from hf_lowprec.optim import ALGORITHMS, SGD, AdamW, LowPrecisionOptimizer
from hf_lowprec.optim.backends.trace import trace_factored, trace_tensor_means, used_inputs
from hf_lowprec.optim.backends.triton import launch as triton_backend
from hf_lowprec.optim.backends.triton.loads import FACTORS
from hf_lowprec.optim.backends.triton.matrix_sum import TILE_ROWS
from hf_lowprec.optim.backends.triton.square_sum import square_sum
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.optim.step.matrix_tiles import TILE_COLUMNS
from hf_lowprec.optim.step.segments import segment_columns
from hf_lowprec.reduction import rank_mean_kernel
from hf_lowprec.rounding import MODES, dtype_name
from hf_lowprec.rounding.block_floats import BLOCK

CONSTANT = "constexpr"
ELEMENTS_PER_THREAD = 8
WIDEST_BITS = 128
"""A thread needs one access for its elements of a tensor, or several of these."""
TABLES = {"chunks": "*i64", "segments": "*i64", "pointers": "*i64", "scalars": "*fp32"}
STEP_TABLES = TABLES | {"counts": "*i64", "enabled": "*i32"}


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel and what it is compiled with.

    Attributes:
        name: for tables.
        function: the Triton function.
        arguments: type of each argument, in order; `CONSTANT` for constants.
        constants: their values.
        aligned: arguments that are multiples of 16.
        block: elements that a program handles at once.
        iterations: of the loop over blocks; 0 if the kernel has none.
        threads: per program; None for Triton's default number of warps.
        fp_fusion: whether multiply-adds may be contracted.
        reads_tables: whether it looks up where elements are, with narrow loads.
        waves_per_simd: wavefronts for which there must be registers, on AMD GPUs; 0: the compiler is free to choose.
        expected_accesses: how many accesses to global memory of each width in bits an iteration needs; None: not known.
    """

    name: str
    function: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: frozenset[str]
    block: int
    iterations: int
    threads: int | None = None
    fp_fusion: bool = True
    reads_tables: bool = False
    waves_per_simd: int = 0
    expected_accesses: Counter[int] | None = None


def specs() -> dict[str, KernelSpec]:
    """A spec for every algorithm, rounding mode and dtype, and for AdamW's further options, by name."""
    named = {}
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for cls, rounding, dtype in product(ALGORITHMS.values(), MODES, dtypes):
        if dtype == torch.bfloat16 or rounding == "kahan":
            options = {"momentum": 0.9} if cls is SGD else {}
            named[f"{cls.__name__} {rounding} {dtype_name(dtype)}"] = _spec(cls, dtype, rounding=rounding, **options)
    further = {
        "FP32 states": {"state_dtype": torch.float32},
        "amsgrad": {"amsgrad": True},
        "clipped": {"max_grad_norm": 1.0},
        "8-bit states": {"state_dtype": torch.int8},
    }
    for name, options in further.items():
        for rounding in ("kahan", "split", "stochastic"):
            spec = _spec(AdamW, torch.bfloat16, rounding=rounding, **options)
            named[f"AdamW {rounding} bfloat16, {name}"] = spec
    for cls in ALGORITHMS.values():
        options = {"momentum": 0.9} if cls is SGD else {}
        spec = _spec(cls, torch.bfloat16, rounding="split", state_dtype=torch.int8, **options)
        named[f"{cls.__name__} split bfloat16, 8-bit states"] = spec
    return named


def _spec(cls: type[LowPrecisionOptimizer], dtype: torch.dtype, **options: object) -> KernelSpec:
    param = torch.nn.Parameter(torch.zeros(1, BLOCK, dtype=dtype))
    param.grad = torch.zeros_like(param)
    with cls([param], backend="eager", **options).plan_step() as plan:
        return plan.fused_groups[0].spec


def step_kernel(name: str, spec: KernelSpec) -> Kernel:
    """The kernel that steps whole chunks of `spec`."""
    constants = {"CHUNK": triton_backend.CHUNK, "BLOCK": triton_backend.BLOCK}
    kernel = _rendered(name, spec, triton_backend.kernels(spec).step, STEP_TABLES, constants, spec.tensors)
    return replace(kernel, waves_per_simd=triton_backend.waves_per_simd(spec))


def ragged_kernel(name: str, spec: KernelSpec) -> Kernel:
    """The kernel that steps ragged chunks of `spec`: one block each, so it has no loop.

    Its narrow accesses cannot be told from those to tables, so only the widest are expected.
    """
    constants = {"BLOCK": triton_backend.BLOCK}
    function = triton_backend.kernels(spec).step_ragged
    kernel = _rendered(f"{name}, ragged", spec, function, STEP_TABLES, constants, spec.tensors)
    expected = Counter({WIDEST_BITS: (kernel.expected_accesses or Counter())[WIDEST_BITS]})
    return replace(kernel, iterations=0, expected_accesses=expected)


def tensor_sum_kernel(name: str, spec: KernelSpec) -> Kernel | None:
    """The kernel that sums the `tensor_means` of `spec`, if it has any."""
    function = triton_backend.kernels(spec).tensor_sum
    if function is None:
        return None
    names = ("CHUNK", "BLOCK", "TAIL")
    constants = {constant: getattr(triton_backend, constant) for constant in names}
    used = used_inputs(trace_tensor_means(spec), spec.tensors)
    return _rendered(f"{name}, tensor_sum", spec, function, TABLES | {"sums": "*fp64"}, constants, used)


def matrix_sum_kernel(name: str, spec: KernelSpec) -> Kernel | None:
    """The kernel that sums the `factored` formula of `spec` over rows and columns, if it has one."""
    function = triton_backend.kernels(spec).matrix_sum
    if function is None:
        return None
    tables = {"tiles": "*i64", "pointers": "*i64", "scalars": "*fp32", "row_sums": "*fp64", "column_sums": "*fp64"}
    used = used_inputs(trace_factored(spec), spec.tensors)
    kernel = _rendered(f"{name}, matrix_sum", spec, function, tables, {"BLOCK": TILE_COLUMNS}, used)
    expected = (kernel.expected_accesses or Counter()) + Counter({64: 1})  # the sum over a row
    return replace(kernel, block=TILE_COLUMNS, iterations=TILE_ROWS, expected_accesses=expected)


def _rendered(
    name: str, spec: KernelSpec, function: Any, tables: dict[str, str], constants: dict[str, Any], read: Iterable[str]
) -> Kernel:
    """A kernel that reads some tensors and, if its tables are those of a step, writes all output tensors."""
    written = spec.output_tensors if tables == STEP_TABLES else ()
    return Kernel(
        name=name,
        function=function,
        arguments=tables | dict.fromkeys(constants, CONSTANT),
        constants=constants,
        aligned=frozenset(tables),
        threads=32 * triton_backend.WARPS,
        fp_fusion=False,
        block=triton_backend.BLOCK,
        iterations=triton_backend.CHUNK // triton_backend.BLOCK,
        reads_tables=True,
        expected_accesses=_expected_accesses(spec, [*read, *written]),
    )


def _expected_accesses(spec: KernelSpec, names: Iterable[str]) -> Counter[int]:
    """The accesses to some tensors, with all elements of a thread at once."""
    expected: Counter[int] = Counter()
    for name in names:
        if name in FACTORS:  # wherever rows begin
            expected[32] += ELEMENTS_PER_THREAD
            continue
        bits = 8 * spec.tensors[name].itemsize * (1 if name in spec.per_block_tensors else ELEMENTS_PER_THREAD)
        expected[min(bits, WIDEST_BITS)] += -(-bits // WIDEST_BITS)
    return expected


def handwritten_kernels() -> list[Kernel]:
    """The gradient norm, and the mean over ranks."""
    spec = _spec(AdamW, torch.bfloat16, rounding="kahan")
    tables = {"chunks": "*i64", "segments": "*i64", "pointers": "*i64", "sums": "*fp64"}
    constants = {
        "COLUMNS": len(segment_columns(spec)),
        "TENSORS": len(spec.tensors),
        "DTYPE": tl.bfloat16,
        "CHUNK": triton_backend.CHUNK,
        "BLOCK": triton_backend.BLOCK,
    }
    norm = Kernel(
        name="gradient norm, square_sum",
        function=square_sum,
        arguments=tables | dict.fromkeys(constants, CONSTANT),
        constants=constants,
        aligned=frozenset(tables),
        threads=32 * triton_backend.WARPS,
        block=triton_backend.BLOCK,
        iterations=triton_backend.CHUNK // triton_backend.BLOCK,
        reads_tables=True,
        expected_accesses=Counter({WIDEST_BITS: 1}),
    )
    return [norm, _mean_kernel(True), _mean_kernel(False)]


def _mean_kernel(aligned: bool) -> Kernel:
    """The mean of BF16 gradients over ranks; the count of elements is a multiple of 16 or not."""
    arguments = {"per_rank": "*i16", "out": "*i16", "ranks": "i32", "count": "i32", "divisor": "fp32"}
    constants = {"FROM_BF16": True, "SUM_DTYPE": tl.float32, "TO_BF16": True, "BLOCK": rank_mean_kernel._BLOCK}
    return Kernel(
        name=f"mean over ranks, count {'' if aligned else 'not '}a multiple of 16",
        function=rank_mean_kernel.mean,
        arguments=arguments | dict.fromkeys(constants, CONSTANT),
        constants=constants,
        aligned=frozenset({"per_rank", "out", "count"} if aligned else {"per_rank", "out"}),
        fp_fusion=False,
        block=rank_mean_kernel._BLOCK,
        iterations=0,
        expected_accesses=Counter({WIDEST_BITS: 1}) if aligned else None,
    )
