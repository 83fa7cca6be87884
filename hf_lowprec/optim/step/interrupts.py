"""Delay signals until the end of a step, since an exception between two kernels would leave a step half done.

Python may run a signal's handler between any two operations of the main thread, and Ctrl-C's handler raises there.
"""

from __future__ import annotations

# The module that `signal` wraps. `signal` converts handlers to enums, which costs ten times as much.
import _signal  # type: ignore[import-not-found]
import inspect
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGBREAK")
_DEFERRED = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))
"""Signals whose handlers usually raise: interruption, the end of a job, a time limit. Handlers of SIGUSR1 and SIGUSR2
set a flag, or belong to faulthandler and would be removed by `signal.signal`."""


@contextmanager
def deferred() -> Iterator[None]:
    """Delay the Python functions that handle signals until the end of the block.

    Each is called once. A signal is not sent again, since Python informed an event loop when it came
    (`signal.set_wakeup_fd`). This does nothing outside the main thread, since handlers do not run there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        if number not in received:
            received.append(number)

    handlers = {number: handler for number in _DEFERRED if callable(handler := _signal.getsignal(number))}
    try:
        for number in handlers:
            _signal.signal(number, note)
        yield
    finally:
        try:
            _restore(handlers)
        finally:
            _call(handlers, received)


def _restore(handlers: Mapping[int, Callable[..., Any]]) -> None:
    """Reinstall all handlers, even if one that is already reinstalled raises meanwhile."""
    try:
        for number, handler in handlers.items():
            _signal.signal(number, handler)
    except BaseException:  # raised by a handler that is already reinstalled
        _restore(handlers)
        raise


def _call(handlers: Mapping[int, Callable[..., Any]], numbers: Sequence[int]) -> None:
    """Call the handlers of signals. Each is called even if an earlier one raises."""
    if numbers:
        try:
            handlers[numbers[0]](numbers[0], inspect.currentframe())
        finally:
            _call(handlers, numbers[1:])
