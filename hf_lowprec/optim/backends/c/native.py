"""The `native` backend (CPU): the traced step, compiled by the system's C compiler on first use.

There is one shared library per spec, in a per-user cache keyed by source, compiler, flags and CPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hf_lowprec.once import cached_property
from hf_lowprec.optim.backends.c.c_source import CHUNK, render
from hf_lowprec.optim.backends.c.compiler import (
    FLAGS,
    CompilerError,
    compile_library,
    compiler_identity,
    load_library,
    require_compiler,
)
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.fused_group import FusedGroup
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.optim.step.matrix_tiles import MatrixSums, MatrixTiles
from hf_lowprec.optim.step.segments import sum_by_entry

_TILE_ROWS = 128
"""Rows of the tiles that threads sum; few, so that all threads get some."""


class NativeStep(BackendStep):
    """Steps a fused group by calling compiled C.

    Raises:
        CompilerError: no compiler was found, or it failed.
    """

    def __init__(self, fused_group: FusedGroup) -> None:
        super().__init__(fused_group)
        self._kernel = kernel(fused_group.spec)
        self._chunks = fused_group.segments.chunks(CHUNK)
        self._chunk_bounds = fused_group.segments.chunk_bounds(self._chunks, len(fused_group.entries))
        self._scalars: Tensor | None = None

    def run(self, entries: range) -> None:
        """Step some consecutive entries of the group in place, in one call."""
        if self.fused_group.skipped:
            return
        # Incrementing a weight's version tells autograd about the write, which it cannot see. States are in no graph.
        # This is done before the step, because the step evicts everything else from the CPU's caches.
        increment_version(self.fused_group.weights[entries.start : entries.stop])
        chunks = self._chunks[self._chunk_bounds[entries.start] : self._chunk_bounds[entries.stop]]
        self._call(self._kernel.step, chunks, self.fused_group.counts)

    def load_tables(self) -> None:
        """Make this step's tables, so that `run` allocates nothing."""
        self._scalars = self.fused_group.all_scalars(self.fused_group.scalars)

    def release_tables(self) -> None:
        """Release this step's tables."""
        self._scalars = None

    def square_sum(self) -> Tensor:
        """Return the sum of the squares of the group's gradients; FP64 scalar on the CPU."""
        sums = torch.empty(len(self._chunks), dtype=torch.float64, device="cpu")
        self._call(self._kernel.square_sum, self._chunks, sums)
        return sums.sum()

    def tensor_sums(self) -> Tensor:
        """Return the sums of `spec.tensor_means` over each parameter; FP64 of shape (entries, means) on the CPU."""
        sums = torch.empty(
            len(self._chunks), len(self.fused_group.spec.tensor_means), dtype=torch.float64, device="cpu"
        )
        self._call(self._kernel.tensor_sum, self._chunks, sums)
        return sum_by_entry(sums, self._chunks_per_entry)

    def matrix_sums(self) -> dict[int, MatrixSums]:
        """Return the sums of `spec.factored` over rows and columns, by the entry's position, except small stacks."""
        group, tiles = self.fused_group, self._tiles
        scalars = group.all_scalars(group.scalars)
        row_sums, column_sums = tiles.empty_sums()
        tables = (tiles.table, group.pointers(), scalars, row_sums, column_sums)
        self._kernel.matrix_sum(len(tiles.table), *map(Tensor.data_ptr, tables), torch.get_num_threads())
        return tiles.add_up(row_sums, column_sums)

    def _call(self, function: Callable[..., None], chunks: Tensor, counts_or_sums: Tensor) -> None:
        """Call a compiled function for some chunks, with this step's tables; the last one is `counts_or_sums`."""
        group = self.fused_group
        scalars = group.all_scalars(group.scalars) if self._scalars is None else self._scalars
        tables = (chunks, group.segments.table, group.pointers(), scalars, counts_or_sums)
        function(len(chunks), *map(Tensor.data_ptr, tables), torch.get_num_threads())

    @cached_property
    def _tiles(self) -> MatrixTiles:
        return MatrixTiles([weight.shape for weight in self.fused_group.weights], _TILE_ROWS, self.fused_group.device)

    @cached_property
    def _chunks_per_entry(self) -> Tensor:
        return self.fused_group.segments.chunks_per_entry(self._chunks, len(self.fused_group.entries))


def kernel(spec: KernelSpec) -> ctypes.CDLL:
    """Return the compiled library with `step`, `square_sum` and, if needed, `tensor_sum` and `matrix_sum`.

    A spec that failed to compile is not compiled again.

    Raises:
        CompilerError: no compiler was found, or it failed.
    """
    compiled = _load(spec)
    if isinstance(compiled, CompilerError):
        raise compiled
    return compiled


@functools.cache
def _load(spec: KernelSpec) -> ctypes.CDLL | CompilerError:
    functions = ["step", "square_sum", *(["tensor_sum"] if spec.tensor_means else [])]
    functions += ["matrix_sum"] if spec.factored is not None else []
    try:
        library = _compiled(render(spec))
    except CompilerError as error:
        return error
    except OSError as error:
        return CompilerError(
            f"the compiled step cannot be written or loaded ({error}); set HF_LOWPREC_CACHE to a folder that has free "
            "space and allows execution, or use backend='eager'"
        )
    for name in functions:
        function = getattr(library, name)
        function.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 5, ctypes.c_int]
        function.restype = None
    return library


def _compiled(source: str) -> ctypes.CDLL:
    compiler = require_compiler()
    identity = [source, *FLAGS, *compiler, compiler_identity(compiler[0]), _cpu_identity()]
    key = hashlib.sha256(chr(0).join(identity).encode(errors="surrogateescape")).hexdigest()[:32]
    return load_library(f"step-{key}.so", functools.partial(compile_library, compiler, source))


@functools.cache
def _cpu_identity() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.platform()}"
    prefixes = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(prefixes)}))
