"""The `triton` backend: at most two kernel launches for all parameters of a spec, whatever their number.

A model has hundreds of tensors, and launching a kernel for each would take the host longer than the device needs to
step a billion parameters. Instead, a table of pointers and tables of chunks are sent to the device, and one program
per chunk looks up its tensors. Whole aligned chunks are a launch, and ragged ones are another (`triton_chunks.py`).
"""

from __future__ import annotations

import functools
import linecache
import os
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hf_lowprec.optim.backends.triton_chunks import Chunks, alignment, divide
from hf_lowprec.optim.codegen.triton_source import render
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.fused_group import FusedGroup
from hf_lowprec.optim.step.graph_capture import is_capturing
from hf_lowprec.optim.step.kernel_spec import StepSpec
from hf_lowprec.optim.step.segments import sum_by_entry
from hf_lowprec.rounding import dtype_name

BLOCK = 1024
"""Elements per program and iteration: eight per thread, 128 bits of BF16. A ragged chunk has no more."""
CHUNK = 8 * BLOCK
"""Elements per program: enough to amortize reading the tables."""
TAIL = BLOCK // 4
"""Elements per iteration of a `tensor_sum` whose accesses are masked and narrow; few, so that it needs no extra
registers."""
INLINED_PTX = (80, 100)
"""Compute capabilities, times 10, from which on PTX is inlined; see codegen/inline_ptx.py."""
MAX_REGISTERS = {8: 64, 10: 72}
"""Registers of a thread that steps whole chunks with inlined PTX, by the bytes that it reads per element, at most: room
for 32 and 28 warps per multiprocessor. The compiler would take a few more. With fewer, it would spill some to memory.
"""
SUM_REGISTERS = 56
"""Registers of a thread that sums a `tensor_mean` formula with inlined PTX: room for 36 warps per multiprocessor. These
kernels are short, so they mostly wait for what they load. With FP32 numbers or states in 8 bits, some would be spilled.
"""
WAVES_PER_SIMD = 4
"""Wavefronts for which a SIMD unit of AMD's data-center GPUs has registers, with states in 8 bits: 128 for each thread.
The compiler would take a few more, and save no instructions. With 8 bytes per element or less, it takes far fewer.
"""
WARPS = 4
"""Warps per program if a warp has 32 threads; half as many if it has 64, as on AMD's data-center GPUs."""


class TritonError(RuntimeError):
    """Triton cannot run here; the message says why and what to do."""


def check_available(device: torch.device | None = None) -> None:
    """Raise TritonError unless Triton is installed and can run on `device`, or on any device if that is None."""
    try:
        import triton
    except ImportError as error:
        raise TritonError(
            f"backend='triton' needs the package triton ({error}); install it (pip install triton), or use 'auto', "
            "'native' (CPU) or 'eager' (any device)"
        ) from None
    on_gpu = torch.cuda.is_available() or torch.xpu.is_available() if device is None else device.type != "cpu"
    if device is not None and on_gpu:
        try:
            triton.runtime.driver.active.get_current_target()  # builds Triton's own launcher with a C compiler
        except Exception as error:
            raise TritonError(
                f"backend='triton' cannot start on {device} ({error}); use 'auto' or 'eager' (any device)"
            ) from error
    if not on_gpu and not _interpreted():
        where = "there is none" if device is None else "a parameter is on the CPU"
        raise TritonError(
            f"backend='triton' runs on a GPU, but {where}; use 'auto', 'native' (CPU) or 'eager' (any device), or set "
            "TRITON_INTERPRET=1 before anything imports triton, to run its kernels in Triton's interpreter"
        )


def supports_bfloat16(device: torch.device) -> bool:
    """Return whether `device` is a GPU (NVIDIA, AMD, Intel) with BF16 arithmetic. If so, `"auto"` is this backend."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "xpu"


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


class _StepTables(NamedTuple):
    """This step's tables on the device: see `FusedGroup.pointers`, `scalars` and `counts`."""

    pointers: Tensor
    scalars: Tensor
    counts: Tensor


class _ChunkTables(NamedTuple):
    """The chunks of a fused group on the device; see `triton_chunks.Chunks`.

    Attributes:
        alignment: of the addresses for which they were made.
        whole: the table of whole chunks.
        ragged: that of ragged chunks.
        whole_bounds: the first whole chunk of each entry, as a position in the table, and at last the end of all.
        ragged_bounds: the same of ragged chunks.
    """

    alignment: Tensor
    whole: Tensor
    ragged: Tensor
    whole_bounds: list[int]
    ragged_bounds: list[int]

    def of_entries(self, entries: range) -> Chunks:
        """The chunks of some consecutive entries."""
        if entries == range(len(self.whole_bounds) - 1):
            return Chunks(self.whole, self.ragged)
        whole, ragged = (
            slice(bounds[entries.start], bounds[entries.stop]) for bounds in (self.whole_bounds, self.ragged_bounds)
        )
        return Chunks(self.whole[whole], self.ragged[ragged])


class TritonStep(BackendStep):
    """Steps a fused group with one or two kernel launches, without synchronizing with the device.

    Attributes:
        step_kernel: the Triton function that steps a whole chunk.
        ragged_kernel: the one that steps a ragged chunk.

    Raises:
        TritonError: Triton is not installed, or does not run on the group's device.
    """

    capturable = True

    def __init__(self, fused_group: FusedGroup) -> None:
        check_available(fused_group.device)
        super().__init__(fused_group)
        self.step_kernel, self.ragged_kernel, self._tensor_sum_kernel = kernels(fused_group.spec)
        self._host_chunks = fused_group.segments.chunks(CHUNK)
        always = torch.ones((), dtype=torch.int32, device="cpu")
        static = (self._host_chunks, fused_group.segments.table, always)
        self._chunks, self._segments, self._always = _upload(fused_group.device, *static)
        self._tables: _StepTables | None = None
        self._last_chunks: _ChunkTables | None = None
        self._captured_chunks: list[_ChunkTables] = []
        self._sent_pointers: _SentPointers | None = None
        self._pinned_reserve: list[Tensor] = []
        self._captured_pointers: list[Tensor] = []
        self._has_run = False

    def run(self, entries: range) -> None:
        """Step some consecutive entries in place: at most two launches, without synchronizing with the device."""
        if len(self._chunks) == 0:
            return
        group, tables = self.fused_group, self._step_tables()
        whole, ragged = self._step_chunks().of_entries(entries)
        enabled = self._always if group.enabled is None else group.enabled.to(torch.int32)
        arguments = (self._segments, tables.pointers, group.all_scalars(tables.scalars), tables.counts, enabled)
        constants, options = {"BLOCK": BLOCK, "PTX": _ptx(group.device)}, _options(group.device)
        with _on(group.device):
            if len(ragged) > 0:  # first, so that nothing waits for the few programs that are slow
                self.ragged_kernel[(len(ragged),)](ragged, *arguments, **constants, **options)
            if len(whole) > 0:
                options |= _register_options(group.spec, constants["PTX"], group.device)
                self.step_kernel[(len(whole),)](whole, *arguments, CHUNK=CHUNK, **constants, **options)
        self._has_run = True
        # Incrementing a weight's version tells autograd about the write, which it cannot see. States are in no graph.
        increment_version(group.weights[entries.start : entries.stop])

    def _step_chunks(self) -> _ChunkTables:
        """The chunks for this step's addresses; divided again, and sent to the device, if their alignment has changed.

        Gradients may be new tensors in every step, but hardly ever with another alignment.
        """
        tables = self._known_chunks()
        if tables is None:
            tables = self._divided()
        self._last_chunks = tables
        if is_capturing() and not any(tables is captured for captured in self._captured_chunks):
            self._captured_chunks.append(tables)  # every replay reads them
        return tables

    def _known_chunks(self) -> _ChunkTables | None:
        """The last chunks or captured ones, if they are for addresses with the alignment of this step's."""
        now = alignment(self.fused_group.pointers())
        known = [tables for tables in (self._last_chunks, *self._captured_chunks) if tables is not None]
        return next((tables for tables in known if torch.equal(tables.alignment, now)), None)

    def _divided(self) -> _ChunkTables:
        """The chunks for this step's addresses, on the device."""
        group = self.fused_group
        now = alignment(group.pointers())
        chunks = divide(group.spec, group.segments, now, CHUNK, BLOCK)
        whole_bounds = _bounds(group.segments.entry_index[chunks.whole[:, 0]], len(group.entries))
        ragged_bounds = _bounds(chunks.ragged[:, 0], len(group.entries))
        if len(chunks.ragged) == 0:  # all chunks are whole
            return _ChunkTables(now, self._chunks, chunks.ragged, whole_bounds, ragged_bounds)
        whole, ragged = _upload(group.device, *chunks)
        return _ChunkTables(now, whole, ragged, whole_bounds, ragged_bounds)

    def square_sum(self) -> Tensor:
        """The sum of the squares of the group's gradients; FP64 scalar on its device."""
        import triton.language as tl

        from hf_lowprec.optim.backends.triton_square_sum import square_sum

        group = self.fused_group
        sums = torch.empty(len(self._chunks), dtype=torch.float64, device=group.device)
        if len(self._chunks) > 0:
            dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
            pointers = self._step_tables().pointers
            with _on(group.device):
                square_sum[(len(self._chunks),)](
                    *(self._chunks, self._segments, pointers, sums),
                    **{"COLUMNS": self._segments.shape[1], "TENSORS": len(group.spec.tensors)},
                    **{"DTYPE": dtype[group.spec.grad_dtype]},
                    **{"CHUNK": CHUNK, "BLOCK": BLOCK, "num_warps": _warps(group.device)},
                    enable_fp_fusion=False,
                )
        return sums.sum()

    def tensor_sums(self) -> Tensor:
        """The sum of the `tensor_mean` formula over each parameter; FP64 of shape (entries) on the group's device."""
        group = self.fused_group
        sums = torch.empty(len(self._chunks), dtype=torch.float64, device=group.device)
        if len(self._chunks) > 0:
            tables = self._step_tables()
            constants = {"CHUNK": CHUNK, "BLOCK": BLOCK, "TAIL": TAIL, "PTX": _ptx(group.device)}
            options = _options(group.device)
            if constants["PTX"]:
                options["maxnreg"] = max_sum_registers(group.spec)
            with _on(group.device):
                self._tensor_sum_kernel[(len(self._chunks),)](
                    *(self._chunks, self._segments, tables.pointers, group.all_scalars(tables.scalars), sums),
                    **constants,
                    **options,
                )
        return sum_by_entry(sums, self._chunks_per_entry)

    @cached_property
    def _chunks_per_entry(self) -> Tensor:
        group = self.fused_group
        return group.segments.chunks_per_entry(self._host_chunks, len(group.entries)).to(group.device)

    @property
    def is_loaded(self) -> bool:
        """True if kernels and chunks for this step's addresses are loaded, or there is nothing to run."""
        return len(self._chunks) == 0 or (self._has_run and self._known_chunks() is not None)

    def release_tables(self) -> None:
        """Release this step's tables: at the end of the step, or because addresses in them have changed."""
        self._tables = None

    def _step_tables(self) -> _StepTables:
        """This step's tables on the device, sent there on the first call of a step."""
        if self._tables is None:
            group = self.fused_group
            if group.scalars_on_device:
                self._tables = _StepTables(self._pointers_on_device(), group.scalars, group.counts)
            else:
                host_tables = (group.pointers(), group.scalars, group.counts)
                self._tables = _StepTables(*_upload(group.device, *host_tables))
        return self._tables

    def _pointers_on_device(self) -> Tensor:
        """The table of pointers, for groups whose scalars and counts are already on the device.

        It is sent when an address has changed, and by every captured graph, from memory that is never modified.
        """
        device, pointers = self.fused_group.device, self.fused_group.pointers()
        if device.type == "cuda" and is_capturing():
            if not self._pinned_reserve:
                raise RuntimeError(
                    f"a graph can hold at most {_RESERVE} steps or norms of the same parameters; take a step outside "
                    "a graph before capturing the next one"
                )
            # Memory cannot be pinned during a capture, and the source of a captured copy must not be modified.
            pinned = self._pinned_reserve.pop().copy_(pointers)
            self._captured_pointers.append(pinned)
            return pinned.to(device, non_blocking=True)
        while device.type == "cuda" and len(self._pinned_reserve) < _RESERVE:
            self._pinned_reserve.append(torch.empty_like(pointers, device="cpu", pin_memory=True))
        if self._sent_pointers is None or not torch.equal(self._sent_pointers.host, pointers):
            pointers = pointers.clone()  # the fused group writes its next ones over these
            self._sent_pointers = _SentPointers(pointers, *_upload(device, pointers))
        return self._sent_pointers.device


class _SentPointers(NamedTuple):
    """A table of pointers on the host, and its copy on the device."""

    host: Tensor
    device: Tensor


_RESERVE = 4
"""The number of pinned tables that a step keeps ready: each capture that needs pointers uses one."""


def _bounds(entry_of_row: Tensor, entries: int) -> list[int]:
    """The first row of each entry in a table that is in the order of the entries, and at last the end of all."""
    return [0, *torch.bincount(entry_of_row, minlength=entries).cumsum(0).tolist()]


def _options(device: torch.device) -> dict[str, Any]:
    """The options with which the rendered kernels are compiled."""
    return {"num_warps": _warps(device), "enable_fp_fusion": False}


def _ptx(device: torch.device) -> int:
    """The constant `PTX` of the rendered kernels."""
    if device.type != "cuda" or torch.version.hip is not None or _interpreted():
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return inlined_ptx(10 * major + minor)


def inlined_ptx(capability: int) -> int:
    """The constant `PTX` of the rendered kernels for NVIDIA GPUs of a compute capability (90 is 9.0)."""
    return max(least for least in (0, *INLINED_PTX) if least <= capability)


def max_registers(spec: StepSpec) -> int | None:
    """Registers of a thread that steps whole chunks on an NVIDIA GPU; None where the compiler is free to choose."""
    dtypes = spec.tensors.values()
    if spec.per_block_tensors or torch.float16 in dtypes:  # without inlined PTX; FP16 is FP32 from the beginning
        return None
    read = sum(dtype.itemsize for dtype in dtypes)
    if ("decoupled", False) in spec.options:  # the weight is also a part of the gradient, in a register of its own
        read += spec.param_dtype.itemsize
    return next((registers for most, registers in MAX_REGISTERS.items() if read <= most), None)


def max_sum_registers(spec: StepSpec) -> int | None:
    """Registers of a thread of `tensor_sum` on an NVIDIA GPU; None where the compiler is free to choose."""
    return None if spec.per_block_tensors or torch.float32 in spec.tensors.values() else SUM_REGISTERS


def waves_per_simd(spec: StepSpec) -> int:
    """Wavefronts that step whole chunks on one SIMD unit of AMD's data-center GPUs, as far as registers limit them; 0
    where the compiler is free to choose.
    """
    read = sum(dtype.itemsize for dtype in spec.tensors.values())
    return WAVES_PER_SIMD if spec.per_block_tensors and read > 8 else 0


def _register_options(spec: StepSpec, ptx: int, device: torch.device) -> dict[str, int | None]:
    """The options that limit the registers of a thread that steps whole chunks, with the constant `PTX`."""
    if ptx:
        return {"maxnreg": max_registers(spec)}
    return {"waves_per_eu": waves_per_simd(spec)} if _warp_size(device) == 64 else {}


def _warps(device: torch.device) -> int:
    return WARPS * 32 // _warp_size(device)


def _warp_size(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def _on(device: torch.device) -> Any:
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def _upload(device: torch.device, *tables: Tensor) -> list[Tensor]:
    """Copy host tensors to `device` in one asynchronous transfer."""
    if device.type == "cpu":
        return [table.contiguous() for table in tables]
    # Each begins on a boundary that Triton specializes for, whatever the sizes of the others.
    ends = [0]
    for table in tables:
        ends.append(ends[-1] + -(-table.nbytes // 256) * 256)
    # Memory from torch's pinned allocator is not used again before the copy is done.
    packed = torch.empty(ends[-1], dtype=torch.uint8, device="cpu", pin_memory=True)
    for table, begin in zip(tables, ends[:-1], strict=True):
        packed[begin : begin + table.nbytes].view(table.dtype).view(table.shape).copy_(table)
    there = packed.to(device, non_blocking=True)
    return [
        there[begin : begin + table.nbytes].view(table.dtype).view(table.shape)
        for table, begin in zip(tables, ends[:-1], strict=True)
    ]


class Kernels(NamedTuple):
    """The Triton functions of a spec.

    Attributes:
        step: steps whole chunks.
        step_ragged: steps ragged chunks.
        tensor_sum: sums the `tensor_mean` formula; None if the spec has none.
    """

    step: Any
    step_ragged: Any
    tensor_sum: Any


@functools.cache
def kernels(spec: StepSpec) -> Kernels:
    """The Triton functions of `spec`, rendered once."""
    source = render(spec)
    description = " ".join([spec.update.__qualname__, spec.rounding, *map(dtype_name, spec.tensors.values())])
    name = f"<hf_lowprec {description} {hash(spec) & 0xFFFFFFFF:08x}>"
    # Triton reads a function's source through `inspect`, which looks here.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": f"{__name__}.{os.path.basename(name)}"}
    exec(compile(source, name, "exec"), namespace)
    return Kernels(namespace["step"], namespace["step_ragged"], namespace.get("tensor_sum"))
