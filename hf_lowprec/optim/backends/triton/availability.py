"""Checks whether the `triton` backend can run here."""

from __future__ import annotations

import torch


class TritonError(RuntimeError):
    """Triton cannot run here; the message says why and what to do."""


def check_available(device: torch.device | None = None) -> None:
    """Raise TritonError unless Triton is installed and can run on `device`, or on any device if `device` is None."""
    try:
        import triton
    except ImportError as error:
        raise TritonError(
            f"backend='triton' needs the package triton ({error}); install it (pip install triton), or use 'auto', "
            "'native' (CPU) or 'eager'"
        ) from None
    on_gpu = torch.cuda.is_available() or torch.xpu.is_available() if device is None else device.type != "cpu"
    if device is not None and on_gpu:
        try:
            triton.runtime.driver.active.get_current_target()  # builds Triton's own launcher with a C compiler
        except Exception as error:
            raise TritonError(f"backend='triton' cannot start on {device} ({error}); use 'auto' or 'eager'") from error
    if not on_gpu and not is_interpreted():
        where = "there is none" if device is None else "a parameter is on the CPU"
        raise TritonError(
            f"backend='triton' runs on a GPU, but {where}; use 'auto', 'native' (CPU) or 'eager', or set "
            "TRITON_INTERPRET=1 before anything imports triton, to run its kernels in Triton's interpreter"
        )


def supports_bfloat16(device: torch.device) -> bool:
    """Return whether `device` is a GPU (NVIDIA, AMD, Intel) with BF16 arithmetic, where `"auto"` is this backend."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "xpu"


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, which needs no GPU."""
    import triton

    return bool(triton.knobs.runtime.interpret)
