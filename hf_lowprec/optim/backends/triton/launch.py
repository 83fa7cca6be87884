"""The `triton` backend: at most two kernel launches for all parameters of a spec, whatever their number.

A model has hundreds of tensors, and launching a kernel for each would take the host longer than the device needs to
step a billion parameters. Instead, a table of pointers and tables of chunks are sent to the device, and one program
per chunk looks up its tensors. One launch steps whole aligned chunks, and another ragged ones (`tables.py`).
"""

from __future__ import annotations

import functools
import linecache
import os
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hf_lowprec.once import cached_property
from hf_lowprec.optim.backends.triton.availability import TritonError, check_available
from hf_lowprec.optim.backends.triton.rendered_sums import TILE_ROWS
from hf_lowprec.optim.backends.triton.tables import ChunkTables, DeviceTables
from hf_lowprec.optim.backends.triton.triton_source import render
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.fused_group import FusedGroup
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.optim.step.matrix_tiles import TILE_COLUMNS, MatrixSums, MatrixTiles
from hf_lowprec.optim.step.segments import segment_columns, sum_by_entry
from hf_lowprec.rounding import dtype_name

BLOCK = 1024
"""Elements per program and iteration: eight per thread, 128 bits of BF16. A ragged chunk has no more."""
CHUNK = 8 * BLOCK
"""Elements per program: enough to amortize reading the tables."""
TAIL = BLOCK // 4
"""Elements per iteration of a `tensor_sum` whose accesses are masked and narrow; few, so that it needs no extra
registers."""
WAVES_PER_SIMD = 4
"""Wavefronts for which a SIMD unit of AMD's data-center GPUs has registers, with states in 8 bits: 128 per thread. The
compiler would use a few more registers, without saving instructions. With at most 8 bytes per element, it uses far
fewer.
"""
WARPS = 4
"""Warps per program for warps of 32 threads; half as many for warps of 64, as on AMD's data-center GPUs."""


class _StepInputs(NamedTuple):
    """The inputs that all launches of a step share.

    Attributes:
        chunks: the chunks, from which each launch takes those of its entries.
        arguments: the tables that the kernels take after them.
    """

    chunks: ChunkTables
    arguments: tuple[Tensor, ...]


class TritonStep(BackendStep):
    """Steps a fused group with one or two kernel launches, without synchronizing with the device.

    Attributes:
        step_kernel: the Triton function that steps a whole chunk.
        ragged_kernel: the Triton function that steps a ragged chunk.

    Raises:
        TritonError: Triton is not installed, does not run on the group's device, or cannot compile a kernel for it.
    """

    def __init__(self, fused_group: FusedGroup) -> None:
        check_available(fused_group.device)
        super().__init__(fused_group)
        self.step_kernel, self.ragged_kernel, self._tensor_sum_kernel, self._matrix_sum_kernel = kernels(
            fused_group.spec
        )
        self._tables = DeviceTables(fused_group, CHUNK, BLOCK)
        self._options = _kernel_options(fused_group.spec, fused_group.device)
        self._inputs: _StepInputs | None = None
        self._compile()

    def _compile(self) -> None:
        """Compile and load every kernel of a step: after one of them has changed weights, the others must not fail."""
        # The dtypes of the kernels' tables, which `warmup` takes instead of tensors.
        chunks = segments = pointers = counts = torch.int64
        scalars, enabled, sums = torch.float32, torch.int32, torch.float64
        step_tables = (chunks, segments, pointers, scalars, counts, enabled)
        kernels: list[tuple[Any, tuple[torch.dtype, ...], dict[str, Any]]] = [
            (self.ragged_kernel, step_tables, self._options.step_ragged),
            (self.step_kernel, step_tables, self._options.step),
        ]
        if self._tensor_sum_kernel is not None:
            sum_tables = (chunks, segments, pointers, scalars, sums)
            kernels.append((self._tensor_sum_kernel, sum_tables, self._options.tensor_sum))
        if self._matrix_sum_kernel is not None:
            kernels.append((self._matrix_sum_kernel, (chunks, pointers, scalars, sums, sums), self._options.matrix_sum))
        if self.fused_group.spec.clipped:
            kernels.append((_square_sum(), (chunks, segments, pointers, sums), self._options.square_sum))
        try:
            with _on(self.fused_group.device):
                for kernel, tables, options in kernels:
                    compiled = kernel.warmup(*tables, grid=(1,), **options)
                    _ = compiled and compiled.run  # loads the machine code; the interpreter has none
        except Exception as error:
            raise TritonError(
                f"backend='triton' cannot compile its kernels for {self.fused_group.device} ({error}); use 'auto' or "
                "'eager'"
            ) from error

    def load_tables(self) -> None:
        """Make this step's tables, so that `run` allocates nothing."""
        if len(self._tables.all_chunks) > 0:
            self._step_inputs()

    def run(self, entries: range) -> None:
        """Step some consecutive entries in place: at most two launches, without synchronizing with the device."""
        if len(self._tables.all_chunks) == 0:
            return
        group, (chunks, arguments) = self.fused_group, self._step_inputs()
        whole, ragged = chunks.of_entries(entries)
        with _on(group.device):
            if len(ragged) > 0:  # first, so that nothing waits for its few slow programs
                self.ragged_kernel[(len(ragged),)](ragged, *arguments, **self._options.step_ragged)
            if len(whole) > 0:
                self.step_kernel[(len(whole),)](whole, *arguments, **self._options.step)
        # Incrementing a weight's version tells autograd about the write, which it cannot see. States are in no graph.
        increment_version(group.weights[entries.start : entries.stop])

    def _step_inputs(self) -> _StepInputs:
        """Return the inputs of this step's launches, which the first launch makes."""
        if self._inputs is None:
            group, tables = self.fused_group, self._tables.of_step()
            enabled = self._tables.always_enabled if group.enabled is None else group.enabled.to(torch.int32)
            scalars = group.all_scalars(tables.scalars)
            arguments = (self._tables.segments, tables.pointers, scalars, tables.counts, enabled)
            self._inputs = _StepInputs(self._tables.chunks(), arguments)
        return self._inputs

    def square_sum(self) -> Tensor:
        """Return the sum of the squares of the group's gradients; FP64 scalar on its device."""
        group, chunks, segments = self.fused_group, self._tables.all_chunks, self._tables.segments
        sums = torch.empty(len(chunks), dtype=torch.float64, device=group.device)
        if len(chunks) > 0:
            pointers = self._tables.of_step().pointers
            with _on(group.device):
                _square_sum()[(len(chunks),)](chunks, segments, pointers, sums, **self._options.square_sum)
        return sums.sum()

    def tensor_sums(self) -> Tensor:
        """Return the sums of `spec.tensor_means` over each parameter; FP64 of shape (entries, means) on its device."""
        group, chunks, segments = self.fused_group, self._tables.all_chunks, self._tables.segments
        sums = torch.empty(len(chunks), len(group.spec.tensor_means), dtype=torch.float64, device=group.device)
        if len(chunks) > 0:
            tables = self._tables.of_step()
            with _on(group.device):
                scalars = group.all_scalars(tables.scalars)
                arguments = (chunks, segments, tables.pointers, scalars, sums)
                self._tensor_sum_kernel[(len(chunks),)](*arguments, **self._options.tensor_sum)
        return sum_by_entry(sums, self._tables.chunks_per_entry)

    def matrix_sums(self) -> dict[int, MatrixSums]:
        """Return the sums of `spec.factored` over rows and columns, by the entry's position, except small stacks."""
        tiles, group = self._tiles, self.fused_group
        row_sums, column_sums = tiles.empty_sums()
        if len(tiles.table) > 0:
            tables = self._tables.of_step()
            with _on(group.device):
                arguments = (tiles.table, tables.pointers, group.all_scalars(tables.scalars), row_sums, column_sums)
                self._matrix_sum_kernel[(len(tiles.table),)](*arguments, **self._options.matrix_sum)
        return tiles.add_up(row_sums, column_sums)

    @cached_property
    def _tiles(self) -> MatrixTiles:
        return MatrixTiles([weight.shape for weight in self.fused_group.weights], TILE_ROWS, self.fused_group.device)

    def release_tables(self) -> None:
        """Release this step's tables: at the end of the step, or because addresses in them have changed."""
        self._inputs = None
        self._tables.release()


class _KernelOptions(NamedTuple):
    """The constants and options with which each kernel is compiled and launched."""

    step: dict[str, Any]
    step_ragged: dict[str, Any]
    tensor_sum: dict[str, Any]
    matrix_sum: dict[str, Any]
    square_sum: dict[str, Any]


def _kernel_options(spec: KernelSpec, device: torch.device) -> _KernelOptions:
    import triton.language as tl

    common = {"BLOCK": BLOCK, "num_warps": _warps(device), "enable_fp_fusion": False}
    dtypes = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    gradients = {"DTYPE": dtypes[spec.grad_dtype], "COLUMNS": len(segment_columns(spec)), "TENSORS": len(spec.tensors)}
    return _KernelOptions(
        step={**common, "CHUNK": CHUNK} | ({"waves_per_eu": waves_per_simd(spec)} if _warp_size(device) == 64 else {}),
        step_ragged=common,
        tensor_sum={**common, "CHUNK": CHUNK, "TAIL": TAIL},
        matrix_sum={**common, "BLOCK": TILE_COLUMNS},
        square_sum={**common, "CHUNK": CHUNK, **gradients},
    )


def waves_per_simd(spec: KernelSpec) -> int:
    """Return how many wavefronts step whole chunks on one SIMD unit of AMD's data-center GPUs, as registers allow.

    Return 0 if the compiler may choose.
    """
    read = sum(dtype.itemsize for dtype in spec.tensors.values())
    return WAVES_PER_SIMD if spec.per_block_tensors and read > 8 else 0


def _warps(device: torch.device) -> int:
    return WARPS * 32 // _warp_size(device)


def _warp_size(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def _square_sum() -> Any:
    """Return the kernel `square_sum`, whose module imports Triton."""
    from hf_lowprec.optim.backends.triton.handwritten_kernels import square_sum

    return square_sum


def _on(device: torch.device) -> Any:
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


class Kernels(NamedTuple):
    """The Triton functions of a spec.

    Attributes:
        step: steps whole chunks.
        step_ragged: steps ragged chunks.
        tensor_sum: sums `spec.tensor_means`; None if there are none.
        matrix_sum: sums `spec.factored` over rows and columns; None if there is none.
    """

    step: Any
    step_ragged: Any
    tensor_sum: Any
    matrix_sum: Any


@functools.cache
def kernels(spec: KernelSpec) -> Kernels:
    """Return the Triton functions of `spec`, rendered once."""
    source = render(spec)
    description = " ".join([spec.update.__qualname__, spec.rounding, *map(dtype_name, spec.tensors.values())])
    name = f"<hf_lowprec {description} {hash(spec) & 0xFFFFFFFF:08x}>"
    # Triton reads a function's source through `inspect`, which looks in this cache.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": f"{__name__}.{os.path.basename(name)}"}
    exec(compile(source, name, "exec"), namespace)
    return Kernels(namespace["step"], namespace["step_ragged"], *map(namespace.get, ("tensor_sum", "matrix_sum")))
