"""Ctrl-C and other signals during a step: real signals, in a process of their own."""

import asyncio
import faulthandler
import signal
import threading
from pathlib import Path

import pytest

from hf_lowprec.optim.step import interrupts
from hf_lowprec.optim.step.interrupts import deferred
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
