"""Steps that end early: by signals, real ones in a process of their own, or without memory; all is done or nothing."""

import asyncio
import faulthandler
import math
import signal
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_lowprec
from hf_lowprec.optim.state import fp32_weights
from hf_lowprec.optim.step import interrupts
from hf_lowprec.optim.step.interrupts import deferred
from hf_lowprec.tools.estimate.activations import LiveMemory
from tests.support.chosen_cases import EVERY_CASE
from tests.support.optim.every_optimizer import BF16, FP32, build, every_mode, give_gradients
from tests.support.optim.optimizer_contents import assert_equal, everything
from tests.support.processes import forkserver

SCRIPT = Path(__file__).parents[1] / "scripts" / "interrupted_steps.py"


@pytest.mark.parametrize(("backend", "algorithm"), [("eager", "adamw"), ("native", "adamw"), ("native", "muon")])
def test_a_step_that_is_interrupted_anywhere_is_taken_as_a_whole_or_not_at_all(backend, algorithm):
    done = forkserver.run(SCRIPT, [backend, algorithm], timeout=300)
    assert done.returncode == 0 and "interruptions" in done.stdout, done.stderr


@pytest.fixture
def handled():
    """Signals that were handled, by a handler that raises."""
    seen: list[int] = []

    def handler(number, frame):
        seen.append(number)
        raise RuntimeError(f"handled {number}")

    numbers = (signal.SIGHUP, signal.SIGALRM)
    before = [signal.signal(number, handler) for number in numbers]
    yield seen
    for number, old in zip(numbers, before, strict=True):
        signal.signal(number, old)


def test_every_signal_is_handled_once_though_handlers_raise(handled):
    before = [signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGALRM)]
    with pytest.raises(RuntimeError, match="handled"), deferred():
        for number in (signal.SIGHUP, signal.SIGALRM, signal.SIGHUP):
            signal.raise_signal(number)
        assert handled == []
    assert handled == [signal.SIGHUP, signal.SIGALRM]
    assert [signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGALRM)] == before


def test_a_callback_of_an_event_loop_runs_once():
    """Python has written the signal to `set_wakeup_fd` when it came, whatever handler it had then."""
    called = []

    async def step():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, called.append, "called")
        with deferred():
            signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.01)

    asyncio.run(step())
    assert called == ["called"]


def test_an_error_in_the_block_does_not_swallow_a_signal(handled):
    with pytest.raises(RuntimeError, match="handled") as error, deferred():
        signal.raise_signal(signal.SIGHUP)
        raise ValueError("of the block")
    assert isinstance(error.value.__context__, ValueError)


def test_nothing_is_changed_in_another_thread(handled):
    before, inside = signal.getsignal(signal.SIGHUP), []

    def run():
        with deferred():
            inside.append(signal.getsignal(signal.SIGHUP))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside == [before]


def test_a_noted_signal_is_handled_though_another_comes_while_handlers_are_put_back(handled, monkeypatch):
    before = [signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGALRM)]

    class Signals:
        """The module `_signal`, where a signal arrives as soon as its handler is back."""

        getsignal = staticmethod(signal.getsignal)

        @staticmethod
        def signal(number, handler):
            signal.signal(number, handler)
            if handler in before and number == signal.SIGALRM and signal.SIGALRM not in handled:
                signal.raise_signal(number)

    monkeypatch.setattr(interrupts, "_signal", Signals)
    with pytest.raises(RuntimeError, match="handled"), deferred():
        signal.raise_signal(signal.SIGHUP)
    assert handled == [signal.SIGALRM, signal.SIGHUP]
    assert [signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGALRM)] == before


def test_faulthandler_keeps_its_signal(tmp_path):
    """`signal.signal` would take away what it registered outside of Python, and what it calls after it."""
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    with open(tmp_path / "stacks", "w") as file:
        try:
            faulthandler.register(signal.SIGUSR1, file, chain=True)
            with deferred():
                pass
            signal.raise_signal(signal.SIGUSR1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, before)
    assert "most recent call first" in (tmp_path / "stacks").read_text()
    assert seen == [signal.SIGUSR1]


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
