"""End a long command cleanly: signals become an exception that no error handler catches."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Stopped", "stoppable"]

# Unwinding takes far less. A second signal after this time means that the exception was lost.
SECONDS_TO_STOP = 5.0


class Stopped(BaseException):  # not an Exception, so that `except Exception` lets it pass
    """A signal asked this process to end."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number

    @property
    def how(self) -> str:
        """What happened to the process: interrupted or terminated."""
        return "interrupted" if self.signal_number == signal.SIGINT else "terminated"


@contextmanager
def stoppable() -> Iterator[Callable[[], None]]:
    """Let SIGINT and SIGTERM raise :class:`Stopped`.

    Yields
    ------
    Callable
        Raises the exception again if it was raised. Call it now and then: an exception is lost
        where Python cannot pass it on, such as in a finaliser.
    """
    raised: list[tuple[int, float]] = []  # signal number and time

    def stop(number: int, _frame: FrameType | None) -> None:
        # A second Ctrl-C soon after the first must not cut the clean-up short.
        if not raised or time.monotonic() - raised[-1][1] > SECONDS_TO_STOP:
            raised.append((number, time.monotonic()))
            raise Stopped(number)

    def stop_if_asked() -> None:
        if raised:
            raise Stopped(raised[0][0])

    # Ignored signals stay ignored: some shells start background jobs that way.
    before = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if (handler := signal.getsignal(number)) not in (None, signal.SIG_IGN)
    }
    try:
        for number in before:
            signal.signal(number, stop)
        yield stop_if_asked
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if raised else handler)  # while unwinding
