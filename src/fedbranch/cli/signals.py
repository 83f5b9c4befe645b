"""The way out of a long command: signals become an exception that nobody takes for an error."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Stopped", "stoppable"]

SECONDS_TO_STOP = 5.0  # far more than the way out takes; later the exception must have got lost


class Stopped(BaseException):  # nobody who handles errors may take it for one
    """Somebody wants this process to end."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number

    @property
    def how(self) -> str:
        """Say what happened to it."""
        return "interrupted" if self.signal_number == signal.SIGINT else "terminated"


@contextmanager
def stoppable() -> Iterator[Callable[[], None]]:
    """Let SIGINT and SIGTERM raise :class:`Stopped`.

    Yields
    ------
    Callable
        Raises it again, if it was raised. To be called now and then: an exception is lost
        where Python cannot pass it on, such as in a finaliser.
    """
    raised: list[tuple[int, float]] = []  # signal number and time

    def stop(number: int, _frame: FrameType | None) -> None:
        # Those who press Ctrl-C twice do not want the way out to be cut short.
        if not raised or time.monotonic() - raised[-1][1] > SECONDS_TO_STOP:
            raised.append((number, time.monotonic()))
            raise Stopped(number)

    def stop_if_asked() -> None:
        if raised:
            raise Stopped(raised[0][0])

    # Ignored ones stay so: in the background of some shells Ctrl-C is not for us.
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
            signal.signal(number, signal.SIG_IGN if raised else handler)  # on the way out
