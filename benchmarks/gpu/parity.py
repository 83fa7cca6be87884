"""Whether our kernel on this machine does what the reference does on the CPU, bit for bit.

A wrong step has no speed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gpu.candidates import BF16, FP32, our_adamw, our_backend
from gpu.device import Device

STEPS = 3
# Around a chunk and a block of the kernel, and ends of every kind.
SIZES = (1, 7, 1023, 1024, 1025, 8191, 8192, 8193, 100_003)
MANY_CHUNKS = 3_000_001
MISALIGNED = 20_001
"""Elements of a weight, and of another one's gradient, that lie two bytes after a 16-byte boundary."""
SPECIAL = [math.nan, -math.nan, math.inf, -math.inf, 3e38, -3e38, 1e30, 1e-30, 1e-38, -1e-40, 0.0, -0.0]


def mismatch(device: Device, mode: str, dtypes: tuple[torch.dtype, ...] = (BF16, FP32), special: bool = False) -> str:
    """Step the kernel on the device and the reference on the CPU with equal gradients; what differs, or ''.

    FP32 parameters are the norms of a cast model; they are a kernel of their own. `special` puts infinities, NaN and
    subnormal numbers among the gradients.
    """
    expected = _reference(mode, dtypes, special, device.rehearsal)
    got = _stepped(mode, dtypes, special, device.rehearsal, device.device, our_backend(device))
    found = []
    for name, reference in expected.items():
        wrong = _different(reference, got[name].cpu())
        if wrong:
            found.append(f"{name}: {wrong} of {reference.numel()}")
    return "; ".join(found[:5]) + (f"; and {len(found) - 5} more tensors" if len(found) > 5 else "")


def _different(first: Tensor, second: Tensor) -> int:
    """Elements with different bits; one NaN is as good as another."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return max(first.numel(), 1)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[first.element_size()]
    same = (first.view(bits) == second.view(bits)) | (first.isnan() & second.isnan())
    return int((~same).sum())


@functools.cache
def _reference(mode: str, dtypes: tuple[torch.dtype, ...], special: bool, small: bool) -> dict[str, Tensor]:
    return _stepped(mode, dtypes, special, small, torch.device("cpu"), "eager")


def _stepped(
    mode: str, dtypes: tuple[torch.dtype, ...], special: bool, small: bool, device: torch.device, backend: str
) -> dict[str, Tensor]:
    """Weights and states after `STEPS` steps, by name; the same numbers whatever the device."""
    generator = torch.Generator().manual_seed(1)
    sizes = [*SIZES, MISALIGNED, MISALIGNED] + ([] if small else [MANY_CHUNKS])
    params: dict[str, torch.nn.Parameter] = {}
    for dtype in dtypes:
        for k, size in enumerate(sizes):
            values = (torch.randn(size, generator=generator) * 0.02).to(dtype)
            params[f"{dtype} {k} of {size}"] = torch.nn.Parameter(_placed(values, device, k == len(SIZES)))
    optimizer = our_adamw(list(params.values()), mode, backend)
    for step in range(STEPS):
        for k, param in enumerate(params.values()):
            # Scales from 1e-2 down to 1e-8, as between the layers of a model.
            grad = torch.randn(param.shape, generator=generator) * 10.0 ** -(2 + (k + step) % 7)
            if special and step == 1 and len(grad) > len(SPECIAL):
                grad[: len(SPECIAL)] = torch.tensor(SPECIAL)
            param.grad = _placed(grad.to(param.dtype), device, k % len(sizes) == len(SIZES) + 1)
        optimizer.step()
    return {f"{name} {what}": value for name, param in params.items() for what, value in _stored(optimizer, param)}


def _placed(values: Tensor, device: torch.device, misaligned: bool) -> Tensor:
    """A copy on the device, two bytes (or four) after a boundary if asked for."""
    if not misaligned:
        return values.to(device, copy=True)
    room = torch.empty(len(values) + 1, dtype=values.dtype, device=device)
    return room[1:].copy_(values)


def _stored(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter) -> Sequence[tuple[str, Tensor]]:
    states = optimizer.state[param]
    return [("weight", param.detach()), *((name, states[name].detach()) for name in states if name != "step")]
