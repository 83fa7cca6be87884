"""The `native` backend (CPU): the traced step, compiled by the system's C compiler on first use.

One shared library per layout, kept in a per-user cache under a key of source, compiler, flags and CPU.
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

from hf_lowprec.optim import library_cache
from hf_lowprec.optim.batch import Batch
from hf_lowprec.optim.c_compiler import FLAGS, CompilerError, compile_library, compiler_identity, require_compiler
from hf_lowprec.optim.c_source import CHUNK, render
from hf_lowprec.optim.step import Layout


def prepare(batch: Batch) -> None:
    """Compile what `batch` needs, so that running cannot fail.

    Raises:
        CompilerError: no compiler was found, or it failed.
    """
    if "kernel" not in batch.kept:
        batch.kept["kernel"], batch.kept["chunks"] = kernel(batch.layout), batch.rows.chunks(CHUNK)


def run(batch: Batch) -> None:
    """Step every parameter of `batch`, which was prepared, in place and in one call."""
    if batch.skipped:
        return
    chunks = batch.kept["chunks"]
    tables = (chunks, batch.rows.table, batch.pointers(), batch.factors(batch.scalars), batch.counts)
    # By the version of a weight autograd finds out about a write that it did not see; states are in no graph. Before
    # the step, which leaves nothing else in the caches.
    increment_version(batch.params)
    batch.kept["kernel"].step(len(chunks), *(table.data_ptr() for table in tables), torch.get_num_threads())


def measure(batch: Batch) -> Tensor:
    """The sums of the algorithm's measure over each parameter of `batch`; FP64 of shape (works)."""
    chunks = batch.kept["chunks"]
    sums = torch.empty(len(chunks), dtype=torch.float64, device="cpu")
    tables = (chunks, batch.rows.table, batch.pointers(), batch.factors(batch.scalars), sums)
    batch.kept["kernel"].measure(len(chunks), *(table.data_ptr() for table in tables), torch.get_num_threads())
    return batch.sums_by_work(chunks, sums)


def kernel(layout: Layout) -> ctypes.CDLL:
    """The compiled functions `step` and, if it has a measure, `measure` of `layout`.

    A layout that failed to compile is not tried again.

    Raises:
        CompilerError: no compiler was found, or it failed.
    """
    compiled = _load(layout)
    if isinstance(compiled, CompilerError):
        raise compiled
    return compiled


@functools.cache
def _load(layout: Layout) -> ctypes.CDLL | CompilerError:
    functions = ["step"] if layout.measure is None else ["step", "measure"]
    try:
        library = _compiled(render(layout), functions)
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
