"""A process that sends itself signals wherever Python handles them in a step, in turn.

Steps are taken as a whole or not at all, and autograd stays on.

python interrupted_steps.py eager|native adamw|muon
"""

import copy
import signal
import sys
import threading
from types import FrameType
from typing import Any

import torch
from torch import nn

from hf_lowprec.optim import AdamW, LowPrecisionOptimizer, Muon
from hf_lowprec.optim.step import orthogonalization
from tests.support.chosen_cases import EVERY_CASE


class Terminated(Exception):
    """Raised by this process's own handler of SIGTERM."""


def terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def built(backend: str, algorithm: str) -> LowPrecisionOptimizer:
    """Three kernels a step, one of them on a contiguous copy; with Muon, its matrices one after the other."""
    torch.manual_seed(0)
    params = [
        nn.Parameter(torch.randn(6, 5).bfloat16()),
        nn.Parameter(torch.randn(7)),
        nn.Parameter(torch.randn(4).half()),
    ]
    params.append(nn.Parameter(torch.randn(5, 6).bfloat16().t()))
    options = {"lr": 0.1, "rounding": "kahan", "backend": backend, "max_grad_norm": 1.0}
    if algorithm == "muon":
        return Muon(params, matrices=[param for param in params if param.ndim == 2], **options)
    return AdamW(params, **options)


def parameters(optimizer: LowPrecisionOptimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def give_gradients(optimizer: LowPrecisionOptimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in parameters(optimizer):
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def tensors(optimizer: LowPrecisionOptimizer) -> list[torch.Tensor]:
    return [value.detach() for param in parameters(optimizer) for value in (param, *optimizer.state[param].values())]


def contents(optimizer: LowPrecisionOptimizer) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors(optimizer)]


def interrupt_at(point: int, number: int, step: Any) -> tuple[type[BaseException] | None, int]:
    """Send a signal at one of the points of `step`, counted from 1, at which Python handles signals: where a Python
    function begins, and where a C function has returned. Return what was raised, and how many points there are.
    """
    points = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal points
        if event in ("call", "c_return"):
            points += 1
            if points == point:
                sys.setprofile(None)
                signal.raise_signal(number)

    sys.setprofile(profile)
    try:
        step()
    except (KeyboardInterrupt, Terminated) as interruption:
        return type(interruption), points
    finally:
        sys.setprofile(None)
    return None, points


def main(backend: str, algorithm: str) -> None:
    signal.signal(signal.SIGTERM, terminate)
    orthogonalization.CHUNK = 20  # one matrix at a time
    optimizer = built(backend, algorithm)
    for step in range(2):
        give_gradients(optimizer, step)
        optimizer.step()
    reference = copy.deepcopy(optimizer)
    before = contents(optimizer)
    for each in (optimizer, reference):
        give_gradients(each, 2)
    _, total = interrupt_at(0, 0, optimizer.step)
    reference.step()
    after = contents(reference)
    assert all(map(torch.equal, contents(optimizer), after))

    sent, taken = 0, 0
    stride = 1 if EVERY_CASE and backend == "native" else 3
    strides = {signal.SIGINT: (stride, KeyboardInterrupt), signal.SIGTERM: (17, Terminated)}
    for number, (stride, expected) in strides.items():
        handler = signal.getsignal(number)
        for point in range(1, total + 1, stride):
            for tensor, value in zip(tensors(optimizer), before, strict=True):
                tensor.copy_(value)
            raised, _ = interrupt_at(point, number, optimizer.step)
            assert raised is expected, (number, point, raised)
            assert signal.getsignal(number) is handler, (number, point)
            assert torch.is_grad_enabled(), (number, point)
            found = contents(optimizer)
            whole = [all(map(torch.equal, found, state)) for state in (before, after)]
            assert any(whole), f"half a step after {number!r} at point {point} of {total}"
            sent, taken = sent + 1, taken + whole[1]
            if not whole[1]:
                optimizer.step()  # and it goes on
                assert all(map(torch.equal, contents(optimizer), after)), (number, point)
    assert 20 < taken < sent - 20, (taken, sent)

    # A thread of its own has no handlers, and leaves those of the main one alone.
    thread = threading.Thread(target=reference.step)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is terminate
    # What ends a process at once still does: a handler that is not Python's is not put off.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    optimizer.step()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    print(f"{sent} interruptions, {taken} of them after the step")


if __name__ == "__main__":
    main(*sys.argv[1:])
