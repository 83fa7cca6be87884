"""The kernels that are compiled: ours, and those of other packages that are installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import triton.language as tl

from hf_lowprec.optim import ALGORITHMS, SGD, AdamW, LowPrecisionOptimizer
from hf_lowprec.optim.backends.trace import trace_tensor_mean, used_inputs
from hf_lowprec.optim.backends.triton import launch as triton_backend
from hf_lowprec.optim.backends.triton.square_sum import square_sum
from hf_lowprec.optim.step.kernel_spec import KernelSpec
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
LOOKUPS = 3
"""Loads that depend on each other before our step's first element: a chunk, its segment, its parameter's pointers."""
RAGGED_LOOKUPS = 2
"""The table of ragged chunks also names the parameter."""
ONE_LAUNCH, LAUNCH_PER_TENSOR = "1 per kind of parameter", "1 per tensor"


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
        read_bytes: per element, as stored in memory.
        written_bytes: per element.
        launches: how many a step takes.
        package: the distribution that the kernel is from.
        threads: per program; None for Triton's default number of warps.
        fp_fusion: whether multiply-adds may be contracted.
        lookups: loads, each needing the one before, that precede those of elements.
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
    read_bytes: float
    written_bytes: float
    launches: str
    package: str = "hf-lowprec"
    threads: int | None = None
    fp_fusion: bool = True
    lookups: int = 0
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
    waves = triton_backend.waves_per_simd(spec)
    return replace(kernel, waves_per_simd=waves)


def ragged_kernel(name: str, spec: KernelSpec) -> Kernel:
    """The kernel that steps ragged chunks of `spec`: one block each, so it has no loop.

    Its narrow accesses cannot be told from those to tables, so only the widest are expected.
    """
    constants = {"BLOCK": triton_backend.BLOCK}
    function = triton_backend.kernels(spec).step_ragged
    kernel = _rendered(f"{name}, ragged", spec, function, STEP_TABLES, constants, spec.tensors)
    expected = Counter({WIDEST_BITS: (kernel.expected_accesses or Counter())[WIDEST_BITS]})
    return replace(kernel, iterations=0, lookups=RAGGED_LOOKUPS, expected_accesses=expected)


def tensor_sum_kernel(name: str, spec: KernelSpec) -> Kernel | None:
    """The kernel that sums the `tensor_mean` formula of `spec`, if its algorithm has one."""
    function = triton_backend.kernels(spec).tensor_sum
    if function is None:
        return None
    names = ("CHUNK", "BLOCK", "TAIL")
    constants = {constant: getattr(triton_backend, constant) for constant in names}
    used = used_inputs(trace_tensor_mean(spec), spec.tensors)
    return _rendered(f"{name}, tensor_sum", spec, function, TABLES | {"sums": "*fp64"}, constants, used)


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
        read_bytes=_stored_bytes(spec, read),
        written_bytes=_stored_bytes(spec, written),
        lookups=LOOKUPS,
        launches=ONE_LAUNCH,
        expected_accesses=_expected_accesses(spec, [*read, *written]),
    )


def _stored_bytes(spec: KernelSpec, names: Iterable[str]) -> float:
    """Bytes per element of some tensors."""
    return sum(spec.tensors[name].itemsize / (BLOCK if name in spec.per_block_tensors else 1) for name in names)


def _expected_accesses(spec: KernelSpec, names: Iterable[str]) -> Counter[int]:
    """The accesses to some tensors, with all elements of a thread at once."""
    expected: Counter[int] = Counter()
    for name in names:
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
        read_bytes=2,
        written_bytes=0,
        lookups=LOOKUPS,
        launches=ONE_LAUNCH,
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
        read_bytes=0,  # depends on the number of ranks
        written_bytes=2,
        launches="1 per bucket",
        expected_accesses=Counter({WIDEST_BITS: 1}) if aligned else None,
    )


def peer_kernels() -> list[Kernel]:
    """AdamW of torch-optimi (0.3.3 or later) and FlashOptim for BF16 weights, with the types and constants they pass.

    Torch's fused AdamW is CUDA code, and only torch's builds for CUDA contain it.
    """
    kernels = []
    if importlib.util.find_spec("optimi") is not None:
        module = importlib.import_module("optimi.adam")  # in the package, the name is that of a function
        if hasattr(module, "_adam_kernel"):
            kernels.append(_optimi(module._adam_kernel))
    if importlib.util.find_spec("flashoptim") is not None:
        module = importlib.import_module("flashoptim.optimizers")
        kernels += [_flashoptim(module._triton_adam_kernel, bits) for bits in (24, 32)]
    return kernels


def _optimi(function: Any) -> Kernel:
    tensors = dict.fromkeys(["param_ptr", "grad_ptr", "exp_avg_ptr", "exp_avg_sq_ptr", "kahan_ptr"], "*bf16")
    constants = {
        "do_weight_decay": True,
        "kahan_sum": True,
        "decouple_wd": True,
        "update_parameters": True,
        "BLOCK_SIZE": 1024,  # of tensors with 8192 elements and more
    }
    types = tensors | dict.fromkeys(constants, CONSTANT) | {"n_elements": "i32"}
    return Kernel(
        name="optimi AdamW, Kahan, BF16",
        package="torch-optimi",
        function=function,
        arguments={name: types.get(name, "fp32") for name in function.arg_names},
        constants=constants,
        aligned=frozenset({*tensors, "n_elements"}),
        block=1024,
        iterations=0,
        read_bytes=10,
        written_bytes=8,
        launches=LAUNCH_PER_TENSOR,
    )


def _flashoptim(function: Any, bits: int) -> Kernel:
    low_bits, largest = {24: (tl.int8, 127), 32: (tl.int16, 32767)}[bits]
    tensors = {
        "mom_ptr": "*i8",
        "mom_scales_f16_ptr": "*fp16",
        "var_ptr": "*u8",
        "var_scales_f16_ptr": "*fp16",
        "param_ptr": "*bf16",
        "grad_ptr": "*bf16",
        "ecc_ptr": f"*i{bits - 16}",
    }
    constants = {
        "GROUP_SIZE": 32,
        "DECOUPLED_WEIGHT_DECAY": True,
        "PARAM_DTYPE": tl.bfloat16,
        "USE_ECC": True,
        "QUANTIZE_OPTIM_STATES": True,
        "SIGNED_ERROR_T": low_bits,
        "NUM_MANTISSA_BITS": 7,
        "SIGNED_MAX_VAL": largest,
        "BLOCK_SIZE_N": 1024,
    }
    types = tensors | dict.fromkeys(constants, CONSTANT) | {"N": "i32", "step": "i32"}
    weight, moments, scales = bits / 8, 2, 2 * 2 / 32  # an FP16 scale for 32 elements of each moment
    return Kernel(
        name=f"flashoptim AdamW, {bits} bits, 8-bit states",
        package="flashoptim",
        function=function,
        arguments={name: types.get(name, "fp32") for name in function.arg_names},
        constants=constants,
        aligned=frozenset({*tensors, "N"}),
        block=1024,
        iterations=100,  # two programs per multiprocessor step a tensor together, however large it is
        read_bytes=2 + weight + moments + scales,
        written_bytes=weight + moments + scales,
        launches=LAUNCH_PER_TENSOR,
    )
