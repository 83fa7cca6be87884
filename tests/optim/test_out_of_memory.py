"""A first step that runs out of memory, and is repeated: the same bits as without, wherever it stopped."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_lowprec
from hf_lowprec.optim.state import fp32_weights
from hf_lowprec.tools.estimate.activations import LiveMemory
from tests.support.chosen_cases import EVERY_CASE
from tests.support.optim.every_optimizer import BF16, FP32, build, every_mode, give_gradients
from tests.support.optim.optimizer_contents import assert_equal, everything

SHAPES = [(3,), (4, 32), (4, 32)]
"""The largest last, more than one of them, and with whole blocks for states in 8 bits."""


class FailingAllocation(TorchDispatchMode):
    """The operation with this number, among those that allocate their results, raises; the others are counted."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(result.alias_info is None for result in function._schema.returns if str(result.type) == "Tensor"):
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError
        return function(*args, **(kwargs or {}))


class LimitedMemory(LiveMemory):
    """Operations raise whose results do not fit into `limit` bytes together with what was allocated before."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit, self.peaks = limit, [0]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = super().__torch_dispatch__(function, types, args, kwargs)
        if self.live > self.limit:
            raise torch.OutOfMemoryError
        if self.live > self.peaks[-1]:
            self.peaks.append(self.live)
        return results


def first_step(name, dtype, options, backend, failing=None, shapes=SHAPES, then=None):
    """All bits after a first step, or after the first one in the rounding mode `then`; and whether memory ran out.

    If it did, the step was repeated.
    """
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)
    if dtype != FP32:
        hf_lowprec.cast_model(model, dtype)
    params = list(model.parameters())
    optimizer = build(name, params, lr=1e-3, backend=backend, **options)
    give_gradients(params, 1)
    if then is not None:
        optimizer.step()
        give_gradients(params, 2)
        optimizer.param_groups[0]["rounding"] = then
    try:
        with failing or nullcontext():
            optimizer.step()
    except torch.OutOfMemoryError:
        optimizer.step()
        return everything(optimizer), True
    return everything(optimizer), False


@pytest.mark.filterwarnings("ignore:the low bits that cast_model:RuntimeWarning")
@pytest.mark.combinations(1)
@every_mode
def test_whichever_allocation_fails(name, dtype, options):
    """All but `Muon`, which needs memory after its first matrix, but no more than for this one."""
    run = partial(first_step, name, dtype, {**options, "max_grad_norm": 1.0}, "native")
    if name == "Muon":
        however_little_memory_there_is(run)
    else:
        whichever_allocation_fails(partial(run, shapes=SHAPES[:2]))


@pytest.mark.parametrize(
    ("rounding", "then"),
    [
        ("kahan", "split"),
        *(pytest.param("split", then, marks=pytest.mark.every_case) for then in ("kahan", "stochastic")),
    ],
)
def test_whichever_allocation_of_a_change_of_the_mode_fails(rounding, then, monkeypatch):
    monkeypatch.setattr(fp32_weights, "chunk_size", lambda device: 50)  # three chunks
    options = {"rounding": rounding}
    whichever_allocation_fails(partial(first_step, "AdamW", BF16, options, "native", shapes=SHAPES[:2], then=then))


def whichever_allocation_fails(run):
    expected, _ = run()
    number, failed = 0, True
    while failed:
        number += 1 if EVERY_CASE else 3
        found, failed = run(FailingAllocation(number))
        assert_equal(found, expected, f"allocation {number}")
    assert number > 10


@pytest.mark.parametrize("name", ["AdamW", "Muon", "Adafactor"])
def test_however_little_memory_the_eager_backend_has(name):
    """It needs memory for each chunk, but for no other one more than for the first."""
    however_little_memory_there_is(partial(first_step, name, BF16, {"rounding": "split"}, "eager"))


def however_little_memory_there_is(run):
    expected, _ = run()  # which also allocates what the process keeps
    memory = LimitedMemory(math.inf)
    run(memory)
    for peak in memory.peaks:
        found, failed = run(LimitedMemory(peak - 1))
        assert_equal(found, expected, f"{peak - 1} bytes")
        assert failed
    assert len(memory.peaks) > len(SHAPES)
