"""What the initial compensation costs: memory until the first step has ended, and time of later steps."""

from __future__ import annotations

import gc
import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from statistics import median

import torch
from torch import nn

from first_steps.optimizers import OURS
from hf_lowprec import AdamW, cast_model

WIDTH = 1024
"""Inputs and outputs of a layer: a million parameters."""


def memory(layers: int, initial_compensation: str) -> dict[str, float]:
    """Cast a model of `layers` million parameters and take two steps, in this process.

    Returns:
        Bytes: the process's `peak` until the first step has ended, and all tensors `left` after the second.
    """
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    cast_model(model, keep_low_bits=initial_compensation == "low_bits")
    optimizer = AdamW(model.parameters(), rounding="kahan", initial_compensation=initial_compensation)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    optimizer.step()
    return {"peak": peak, "left": tensor_bytes()}


def tensor_bytes() -> int:
    """Bytes of all tensors that are alive in this process; memory that several share is counted once."""
    gc.collect()
    found = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in found]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def memory_per_parameter(sizes: tuple[int, int]) -> dict[str, dict[str, float]]:
    """Bytes per parameter of `memory`, from the difference between two sizes in millions of parameters.

    The difference leaves out what does not grow with the model: libraries, and temporaries of bounded size. Every
    number is from a fresh process.
    """
    found = {}
    for name in ("zero", "dither", "low_bits"):
        small, large = (_in_fresh_process(size, name) for size in sizes)
        count = (sizes[1] - sizes[0]) * WIDTH**2
        found[name] = {key: (large[key] - small[key]) / count for key in small}
    return found


def _in_fresh_process(layers: int, initial_compensation: str) -> dict[str, float]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(memory, layers, initial_compensation).result()


def step_time_ratios(rounds: int, elements: int) -> dict[str, float]:
    """The median time of a step, after the first two, divided by that with a compensation of zero.

    Rounds are interleaved and ratios are taken within a round, so that changes in the machine's speed cancel.
    """
    optimizers = {}
    for name in ("zero", "low_bits", "dither"):
        model = nn.Linear(elements, 1, bias=False)
        cast_model(model, keep_low_bits=name == "low_bits")
        optimizers[name] = AdamW(model.parameters(), **OURS[name])
        model.weight.grad = torch.randn(1, elements).mul_(0.01).to(torch.bfloat16)
    ratios: dict[str, list[float]] = {"low_bits": [], "dither": []}
    for number in range(rounds + 2):
        seconds = {}
        for name, optimizer in optimizers.items():
            begun = time.perf_counter()
            optimizer.step()
            seconds[name] = time.perf_counter() - begun
        if number >= 2:
            for name, values in ratios.items():
                values.append(seconds[name] / seconds["zero"])
    return {name: median(values) for name, values in ratios.items()}
