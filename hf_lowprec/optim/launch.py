"""The `triton` backend: one kernel launch for all parameters of a layout, whatever their number.

A model has hundreds of tensors; a launch for each costs the host more than the device needs for a billion parameters.
So a table of pointers and a table of chunks go to the device, and a program per chunk looks up what it works on.
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

from hf_lowprec.optim.step import Layout
from hf_lowprec.optim.triton_source import render
from hf_lowprec.optim.work import Batch

BLOCK = 1024
"""Elements per program and iteration: eight per thread, 128 bits of BF16."""
CHUNK = 8 * BLOCK
"""Elements per program: enough to pay for the look-up in the tables."""
TAIL = BLOCK // 4
"""Elements per iteration where accesses are masked and narrow; few, so that this path does not cost registers."""
WARPS = 4


class TritonError(RuntimeError):
    """Triton cannot run here; the message says why and what to do."""


def require(device: torch.device | None = None) -> None:
    """Raise TritonError unless Triton is installed and can run on `device`, or somewhere if that is None."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise TritonError(
            f"backend='triton' needs the package triton ({error}); install it (pip install triton), or use 'auto', "
            "'native' (CPU) or 'eager' (any device)"
        ) from None
    on_gpu = torch.cuda.is_available() or torch.xpu.is_available() if device is None else device.type != "cpu"
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


def prepare(batch: Batch) -> None:
    """Build the kernel and the static tables of `batch`.

    Raises:
        TritonError: Triton is not installed, or does not run on the batch's device.
    """
    if "kernel" not in batch.kept:
        require(batch.device)
        batch.kept["kernel"] = kernel(batch.layout)
        rows = batch.rows
        batch.kept["static"] = _upload(batch.device, rows.chunks(CHUNK), rows.lengths, rows.first_index)


def run(batch: Batch) -> None:
    """Step every parameter of `batch`, which was prepared, in place: one launch, without waiting for the device."""
    static = batch.kept["static"]
    if len(static[0]) == 0:
        return
    dynamic = _upload(batch.device, batch.pointers(), batch.scalars(), batch.keys())
    with nullcontext() if batch.device.type == "cpu" else torch.get_device_module(batch.device).device(batch.device):
        batch.kept["kernel"][(len(static[0]),)](
            *static, *dynamic, CHUNK=CHUNK, BLOCK=BLOCK, TAIL=TAIL, num_warps=WARPS, enable_fp_fusion=False
        )
    # Autograd finds out about writes that it did not see by the version of a tensor.
    increment_version(batch.written)


def _upload(device: torch.device, *tables: Tensor) -> list[Tensor]:
    """Copies of host tensors on `device`, in one transfer that the host does not wait for."""
    if device.type == "cpu":
        return [table.contiguous() for table in tables]
    # Each on a boundary that Triton specializes for, whatever the others' sizes.
    ends = [0]
    for table in tables:
        ends.append(ends[-1] + -(-table.nbytes // 256) * 256)
    # Memory from torch's pinned allocator is not used again before the copy is done.
    packed = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
    for table, begin in zip(tables, ends[:-1], strict=True):
        packed[begin : begin + table.nbytes].view(table.dtype).view(table.shape).copy_(table)
    there = packed.to(device, non_blocking=True)
    return [
        there[begin : begin + table.nbytes].view(table.dtype).view(table.shape)
        for table, begin in zip(tables, ends[:-1], strict=True)
    ]


@functools.cache
def kernel(layout: Layout) -> Any:
    """The Triton function that steps `layout`."""
    source = render(layout)
    words = (layout.update.__qualname__, layout.rounding, *(str(d).removeprefix("torch.") for d in layout.dtypes))
    name = f"<hf_lowprec {' '.join(words)} {hash(layout) & 0xFFFFFFFF:08x}>"
    # Triton reads a function's source through `inspect`, which looks here.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": f"{__name__}.{os.path.basename(name)}"}
    exec(compile(source, name, "exec"), namespace)
    return namespace["step"]
