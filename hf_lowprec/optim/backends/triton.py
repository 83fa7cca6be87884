"""The `triton` backend: one kernel launch for all parameters of a spec, whatever their number.

A model has hundreds of tensors; a launch for each costs the host more than the device needs for a billion parameters.
So a table of pointers and a table of chunks go to the device, and a program per chunk looks up what it entries on.
"""

from __future__ import annotations

import functools
import linecache
import os
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hf_lowprec.optim.codegen.triton import render
from hf_lowprec.optim.step.fused import StepSpec
from hf_lowprec.optim.step.fused_group import FusedGroup
from hf_lowprec.rounding import dtype_name

BLOCK = 1024
"""Elements per program and iteration: eight per thread, 128 bits of BF16."""
CHUNK = 8 * BLOCK
"""Elements per program: enough to pay for the look-up in the tables."""
TAIL = BLOCK // 4
"""Elements per iteration where accesses are masked and narrow; few, so that this path does not cost registers."""
WARPS = 4
"""Warps of 32 threads per program; where they are of 64, as on AMD's data-center GPUs, half as many."""


class TritonError(RuntimeError):
    """Triton cannot run here; the message says why and what to do."""


def require(device: torch.device | None = None) -> None:
    """Raise TritonError unless Triton is installed and can run on `device`, or somewhere if that is None."""
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
            f"backend='triton' runs on a GPU and {where}; use 'auto', 'native' (CPU) or 'eager' (any device), or set "
            "TRITON_INTERPRET=1 before anything imports triton, to run its kernels in Triton's interpreter"
        )


def supports_bfloat16(device: torch.device) -> bool:
    """Whether `device` is a GPU (NVIDIA, AMD, Intel) that computes in BF16, which is where this backend is chosen."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "xpu"


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def prepare(fused_group: FusedGroup) -> None:
    """Build the kernel and the static tables of `fused_group`.

    Raises:
        TritonError: Triton is not installed, or does not run on the fused_group's device.
    """
    if "kernel" not in fused_group.kept:
        require(fused_group.device)
        fused_group.kept["step"], fused_group.kept["tensor_sum"] = kernels(fused_group.spec)
        always = torch.ones((), dtype=torch.int32, device="cpu")
        fused_group.kept["chunks"] = fused_group.segments.chunks(CHUNK)
        fused_group.kept["static"] = _upload(
            fused_group.device, fused_group.kept["chunks"], fused_group.segments.table, always
        )


def run(fused_group: FusedGroup) -> None:
    """Step every parameter of `fused_group`, which was prepared, in place: one launch, without waiting for the device."""
    chunks, segments, always = fused_group.kept["static"]
    if len(chunks) == 0:
        return
    pointers, scalars, counts = _dynamic(fused_group)
    enabled = always if fused_group.enabled is None else fused_group.enabled.to(torch.int32)
    with _on(fused_group.device):
        fused_group.kept["step"][(len(chunks),)](
            *(chunks, segments, pointers, fused_group.all_scalars(scalars), counts, enabled),
            **_sizes(fused_group.device),
        )
    fused_group.kept["has run"] = True
    # By the version of a weight autograd finds out about a write that it did not see; states are in no graph.
    increment_version(fused_group.params)


def has_run(fused_group: FusedGroup) -> bool:
    """Whether the kernel of `fused_group` is loaded, or there is nothing to run."""
    return "has run" in fused_group.kept or len(fused_group.kept["static"][0]) == 0


def tensor_sums(fused_group: FusedGroup) -> Tensor:
    """The sums of the `tensor_mean` formula over each parameter of `fused_group`; FP64 of shape (entries) on its device."""
    chunks, segments, _ = fused_group.kept["static"]
    sums = torch.empty(len(chunks), dtype=torch.float64, device=fused_group.device)
    if len(chunks) > 0:
        pointers, scalars, _ = _dynamic(fused_group)
        with _on(fused_group.device):
            fused_group.kept["tensor_sum"][(len(chunks),)](
                *(chunks, segments, pointers, fused_group.all_scalars(scalars), sums), **_sizes(fused_group.device)
            )
    return fused_group.sums_by_work(fused_group.kept["chunks"], sums)


def square_sum(fused_group: FusedGroup) -> Tensor:
    """The sum of the squares of a fused_group's gradients; FP64 scalar on its device."""
    import triton.language as tl

    from hf_lowprec.optim.backends.triton_kernels import square_sum

    chunks, segments, _ = fused_group.kept["static"]
    sums = torch.empty(len(chunks), dtype=torch.float64, device=fused_group.device)
    if len(chunks) > 0:
        pointers, *_ = _dynamic(fused_group)
        dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
        with _on(fused_group.device):
            square_sum[(len(chunks),)](
                *(chunks, segments, pointers, sums),
                **{"COLUMNS": segments.shape[1], "TENSORS": len(fused_group.spec.tensors)},
                **{"DTYPE": dtype[fused_group.spec.grad_dtype]},
                **{"CHUNK": CHUNK, "BLOCK": BLOCK, "num_warps": _warps(fused_group.device)},
            )
    return sums.sum()


def _sizes(device: torch.device) -> dict[str, Any]:
    """What the printed kernels are compiled for."""
    return {"CHUNK": CHUNK, "BLOCK": BLOCK, "TAIL": TAIL, "num_warps": _warps(device), "enable_fp_fusion": False}


def _warps(device: torch.device) -> int:
    if device.type != "cuda":
        return WARPS
    return WARPS * 32 // torch.cuda.get_device_properties(device).warp_size


def _on(device: torch.device) -> Any:
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def _dynamic(fused_group: FusedGroup) -> list[Tensor]:
    """This step's pointers, scalars and counts on the device."""
    if "dynamic" not in fused_group.passing:
        if fused_group.device_scalars:
            fused_group.passing["dynamic"] = [_deferred_pointers(fused_group), fused_group.scalars, fused_group.counts]
        else:
            fused_group.passing["dynamic"] = _upload(
                fused_group.device, fused_group.pointers(), fused_group.scalars, fused_group.counts
            )
    return fused_group.passing["dynamic"]


_captured: list[Any] = []
"""What captured graphs read, as long as they may be replayed: fused_groups with their tables, and host memory."""
_RESERVE = 4
"""Pieces of pinned memory that a fused_group keeps ready, one for each time that a capture asks for pointers."""


def _deferred_pointers(fused_group: FusedGroup) -> Tensor:
    """The table of pointers: sent when an address has changed, and by every captured graph from memory of its own."""
    pointers = fused_group.pointers()
    reserve: list[Tensor] = fused_group.kept.setdefault("pinned", [])
    if fused_group.device.type == "cuda" and capturing():
        if not reserve:
            raise RuntimeError(
                f"a graph can hold {_RESERVE} steps or norms of the same parameters; take a step outside of a graph "
                "before the next is captured"
            )
        # Memory cannot be pinned during a capture, and what a graph copies from must stay as it is.
        pinned = reserve.pop().copy_(pointers)
        _captured.append((fused_group, pinned))
        return pinned.to(fused_group.device, non_blocking=True)
    while fused_group.device.type == "cuda" and len(reserve) < _RESERVE:
        reserve.append(torch.empty_like(pointers, device="cpu", pin_memory=True))
    known = fused_group.kept.get("pointers")
    if known is None or not torch.equal(known[0], pointers):
        pointers = pointers.clone()  # the fused_group writes its next ones over these
        known = fused_group.kept["pointers"] = (pointers, *_upload(fused_group.device, pointers))
    return known[1]


def _upload(device: torch.device, *tables: Tensor) -> list[Tensor]:
    """Copies of host tensors on `device`, in one transfer that the host does not wait for."""
    if device.type == "cpu":
        return [table.contiguous() for table in tables]
    # Each on a boundary that Triton specializes for, whatever the others' sizes.
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


@functools.cache
def kernels(spec: StepSpec) -> tuple[Any, Any]:
    """The Triton functions that step `spec` and sum its `tensor_mean` formula, if it has one."""
    source = render(spec)
    words = (
        spec.update.__qualname__,
        spec.rounding,
        *(dtype_name(d) for d in spec.tensors.values()),
    )
    name = f"<hf_lowprec {' '.join(words)} {hash(spec) & 0xFFFFFFFF:08x}>"
    # Triton reads a function's source through `inspect`, which looks here.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": f"{__name__}.{os.path.basename(name)}"}
    exec(compile(source, name, "exec"), namespace)
    return namespace["step"], namespace.get("tensor_sum")
