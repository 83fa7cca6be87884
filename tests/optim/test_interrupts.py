"""Ctrl-C and other signals during a step: real signals, in a process of their own."""

import signal
import threading
from pathlib import Path

import pytest

from hf_lowprec.optim.interrupts import deferred
from tests import nursery

SCRIPT = Path(__file__).parents[1] / "scripts" / "interrupted_steps.py"


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_step_that_is_interrupted_anywhere_is_taken_as_a_whole_or_not_at_all(backend):
    done = nursery.run(SCRIPT, [backend], timeout=300)
    assert done.returncode == 0 and "interruptions" in done.stdout, done.stderr


@pytest.fixture
def handled():
    """Signals that were handled, by a handler that raises."""
    seen: list[int] = []

    def handler(number, frame):
        seen.append(number)
        raise RuntimeError(f"handled {number}")

    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, handler) for number in numbers]
    yield seen
    for number, old in zip(numbers, before, strict=True):
        signal.signal(number, old)


def test_every_signal_is_handled_once_though_handlers_raise(handled):
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    with pytest.raises(RuntimeError, match="handled"), deferred():
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
            signal.raise_signal(number)
        assert handled == []
    assert handled == [signal.SIGUSR1, signal.SIGUSR2]
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)] == before


def test_an_error_in_the_block_does_not_swallow_a_signal(handled):
    with pytest.raises(RuntimeError, match="handled") as error, deferred():
        signal.raise_signal(signal.SIGUSR1)
        raise ValueError("of the block")
    assert isinstance(error.value.__context__, ValueError)


def test_nothing_is_changed_in_another_thread(handled):
    before, inside = signal.getsignal(signal.SIGUSR1), []

    def run():
        with deferred():
            inside.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside == [before]
