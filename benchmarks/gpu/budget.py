"""Time that may be spent: a command that runs unattended ends by itself, with what it has."""

from __future__ import annotations

import faulthandler
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTime(BaseException):
    """Raised in the middle of what takes too long; no Exception, so that no library takes it for one of its own.

    Attributes:
        expected: whether the budget was spent, rather than one thing's patience.
    """

    def __init__(self, message: str, expected: bool) -> None:
        super().__init__(message)
        self.expected = expected


class Budget:
    """Seconds from now on, of which sections get their parts."""

    def __init__(self, seconds: float) -> None:
        self._begin = time.monotonic()
        self._end = self._begin + seconds

    @property
    def spent(self) -> float:
        return time.monotonic() - self._begin

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def part(self, seconds: float) -> Budget:
        """At most `seconds` of what is left."""
        return Budget(min(seconds, self.left))

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Raise OutOfTime in the block after `seconds`, or when the budget is spent."""

        def ring(number: int, frame: FrameType | None) -> None:
            raise OutOfTime(f"stopped after {allowed:.0f} s", expected)

        allowed, expected = max(0.1, min(seconds, self.left)), self.left < seconds
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, allowed)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def stop_at_the_end(self, grace: float) -> None:
        """End the process `grace` seconds after the budget, if even a call into a library that never returns is why."""
        faulthandler.dump_traceback_later(max(1.0, self.left + grace), exit=True)


def line(error: BaseException) -> str:
    """One line of an exception, which must not be kept itself: its traceback holds on to tensors."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:200]}"
