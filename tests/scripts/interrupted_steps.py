"""A process that sends itself real signals at every line of a step, in turn: steps are taken as a whole or not at all.

python interrupted_steps.py eager|native adamw|muon
"""

import copy
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import torch
from torch import nn

from hf_lowprec.optim import AdamW, LowPrecisionOptimizer, Muon
from hf_lowprec.optim import optimizer as base
from hf_lowprec.optim.step import whole_tensor_quantities

PACKAGE = os.path.dirname(os.path.dirname(base.__file__))


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
    options = {"lr": 0.1, "backend": backend, "max_grad_norm": 1.0}
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


def interrupt_at(line: int, number: int, step: Any) -> tuple[type[BaseException] | None, int]:
    """Send a signal when `step` comes to a line of the package, counted from 1; what was raised, and how many lines."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            lines += 1
            if lines == line:
                sys.settrace(None)
                os.kill(os.getpid(), number)
        return trace

    sys.settrace(trace)
    try:
        step()
    except (KeyboardInterrupt, Terminated) as interruption:
        return type(interruption), lines
    finally:
        sys.settrace(None)
    return None, lines


def main(backend: str, algorithm: str) -> None:
    signal.signal(signal.SIGTERM, terminate)
    whole_tensor_quantities.CHUNK = 20  # one matrix at a time
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
    strides = {signal.SIGINT: (3, KeyboardInterrupt), signal.SIGTERM: (17, Terminated)}
    for number, (stride, expected) in strides.items():
        handler = signal.getsignal(number)
        for line in range(1, total + 1, stride):
            for tensor, value in zip(tensors(optimizer), before, strict=True):
                tensor.copy_(value)
            raised, _ = interrupt_at(line, number, optimizer.step)
            assert raised is expected, (number, line, raised)
            assert signal.getsignal(number) is handler, (number, line)
            found = contents(optimizer)
            whole = [all(map(torch.equal, found, state)) for state in (before, after)]
            assert any(whole), f"half a step after {number!r} at line {line} of {total}"
            sent, taken = sent + 1, taken + whole[1]
            if not whole[1]:
                optimizer.step()  # and it goes on
                assert all(map(torch.equal, contents(optimizer), after)), (number, line)
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
