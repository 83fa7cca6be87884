"""The `native` backend (CPU): the traced step, compiled by the system's C compiler on first use.

One shared library per spec, kept in a per-user cache under a key of source, compiler, flags and CPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hf_lowprec.optim.backends import library_cache
from hf_lowprec.optim.backends.c_compiler import (
    FLAGS,
    CompilerError,
    compile_library,
    compiler_identity,
    require_compiler,
)
from hf_lowprec.optim.codegen.c import CHUNK, render
from hf_lowprec.optim.step.fused import StepSpec
from hf_lowprec.optim.step.fused_group import FusedGroup


def prepare(fused_group: FusedGroup) -> None:
    """Compile what `fused_group` needs, so that running cannot fail.

    Raises:
        CompilerError: no compiler was found, or it failed.
    """
    if "kernel" not in fused_group.kept:
        fused_group.kept["kernel"], fused_group.kept["chunks"] = (
            kernel(fused_group.spec),
            fused_group.segments.chunks(CHUNK),
        )


def run(fused_group: FusedGroup) -> None:
    """Step every parameter of `fused_group`, which was prepared, in place and in one call."""
    if fused_group.skipped:
        return
    chunks = fused_group.kept["chunks"]
    tables = (
        chunks,
        fused_group.segments.table,
        fused_group.pointers(),
        fused_group.all_scalars(fused_group.scalars),
        fused_group.counts,
    )
    # By the version of a weight autograd finds out about a write that it did not see; states are in no graph. Before
    # the step, which leaves nothing else in the caches.
    increment_version(fused_group.params)
    fused_group.kept["kernel"].step(len(chunks), *(table.data_ptr() for table in tables), torch.get_num_threads())


def tensor_sums(fused_group: FusedGroup) -> Tensor:
    """The sums of the `tensor_mean` formula over each parameter of `fused_group`; FP64 of shape (entries)."""
    chunks = fused_group.kept["chunks"]
    sums = torch.empty(len(chunks), dtype=torch.float64, device="cpu")
    tables = (
        chunks,
        fused_group.segments.table,
        fused_group.pointers(),
        fused_group.all_scalars(fused_group.scalars),
        sums,
    )
    fused_group.kept["kernel"].tensor_sum(len(chunks), *(table.data_ptr() for table in tables), torch.get_num_threads())
    return fused_group.sums_by_work(chunks, sums)


def kernel(spec: StepSpec) -> ctypes.CDLL:
    """The compiled functions `step` and, if it has a `tensor_mean`, `tensor_sum` of `spec`.

    A spec that failed to compile is not tried again.

    Raises:
        CompilerError: no compiler was found, or it failed.
    """
    compiled = _load(spec)
    if isinstance(compiled, CompilerError):
        raise compiled
    return compiled


@functools.cache
def _load(spec: StepSpec) -> ctypes.CDLL | CompilerError:
    functions = ["step"] if spec.tensor_mean is None else ["step", "tensor_sum"]
    try:
        library = _compiled(render(spec), functions)
    except CompilerError as error:
        return error
    except OSError as error:
        return CompilerError(
            f"the compiled step cannot be written or loaded ({error}); set HF_LOWPREC_CACHE to a folder with room from "
            "which programs may run, or use backend='eager'"
        )
    for name in functions:
        function = getattr(library, name)
        function.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 5, ctypes.c_int]
        function.restype = None
    return library


def _compiled(source: str, functions: list[str]) -> ctypes.CDLL:
    compiler = require_compiler()
    identity = [source, *FLAGS, *compiler, compiler_identity(compiler[0]), _cpu_identity(), "checksum at the end"]
    key = hashlib.sha256(chr(0).join(identity).encode(errors="surrogateescape")).hexdigest()[:32]
    return library_cache.load(f"step-{key}.so", functions, functools.partial(compile_library, compiler, source))


@functools.cache
def _cpu_identity() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.platform()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))
