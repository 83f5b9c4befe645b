"""Replies that are folded into the server's sums as they come, while other clients still train.

For servers that keep no updates: some replies at a time are read, checked, added up and let go,
by a few threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Message
from numpy.typing import NDArray

from fedbranch.core.cores import num_cores
from fedbranch.flower.replies import Reported, arrays_in, why_unreadable
from fedbranch.flower.steps import Steps
from fedbranch.intake import Intake
from fedbranch.messages import UpdateBatch
from fedbranch.tree import Vector

if TYPE_CHECKING:
    from fedbranch.flower.federation import Asked, Federation

__all__ = ["Folding"]

# So few that they stay in the processor's cache until they are added up.
REPLIES_AT_ONCE = 32
MOST_THREADS = 4  # more would wait for the interpreter
BATCHES_AHEAD = 2  # of each thread


class Folding:
    """Takes the replies of a round into an intake.

    Parameters
    ----------
    federation
        Whose replies they are.
    num_threads
        By default one for each core, up to four. Their number changes no bit.

    Attributes
    ----------
    intake
        What :meth:`fedbranch.Server.step` makes the round of, when all are in.
    """

    def __init__(self, federation: Federation, num_threads: int | None = None) -> None:
        self.intake: Intake = federation.server.intake()
        self._federation = federation
        if num_threads is None:
            num_threads = min(MOST_THREADS, num_cores())
        self._threads = ThreadPoolExecutor(num_threads, "fedbranch-fold")
        self._has_room = threading.Semaphore(BATCHES_AHEAD * num_threads)
        self._memory = threading.local()
        self._waiting: dict[str, list[tuple[Asked, Message]]] = {}  # base -> replies to it
        self._steps: dict[str, Steps] = {}
        self._at_work: list[Future[None]] = []
        self._reported: dict[str, Reported] = {}
        self._refused: dict[str, str] = {}

    def put(self, one: Asked, reply: Message) -> None:
        """Take a client's reply; returns before it was read, unless many are waiting.

        It is the only one of its client that is put here.
        """
        waiting = self._waiting.setdefault(one.base, [])
        waiting.append((one, reply))
        if len(waiting) == REPLIES_AT_ONCE:
            self._begin(self._waiting.pop(one.base))

    def finish(self) -> tuple[dict[str, Reported], dict[str, str]]:
        """Wait until all replies are in.

        Returns
        -------
        tuple
            Client id -> what its reply said, and client id -> why its reply cannot be read.
        """
        try:
            for batch in self._waiting.values():
                self._begin(batch)
            for work in self._at_work:
                work.result()
        finally:
            self.close()
        return self._reported, self._refused

    def close(self) -> None:
        """Let the threads end; what they have not begun is not done."""
        self._threads.shutdown(cancel_futures=True)

    def _begin(self, batch: Sequence[tuple[Asked, Message]]) -> None:
        first, _ = batch[0]
        steps = self._steps.get(first.base)
        if steps is None:
            steps = self._steps[first.base] = Steps(self._federation.layout, first.sent)
        self._has_room.acquire()
        self._at_work.append(self._threads.submit(self._fold, batch, steps))

    def _fold(self, batch: Sequence[tuple[Asked, Message]], steps: Steps) -> None:
        """Read some replies to one message, and take in those that can be read."""
        federation = self._federation
        read: list[_Read] = []
        try:
            for one, reply in batch:
                try:
                    reported = federation.reported(reply)
                    half = federation.half_difference_in(one, reply)
                    read.append(
                        _Read(one, reported, arrays_in(reply, federation.keys.arrays), half)
                    )
                    self._reported[one.client_id] = reported
                except Exception as error:  # objects from outside may fail in ways of their own
                    self._refused[one.client_id] = why_unreadable(error)
            if read:
                self._take_in(read, steps)
        finally:
            self._has_room.release()

    def _take_in(self, read: Sequence[_Read], steps: Steps) -> None:
        layout = self._federation.layout
        vectors = self._rows()[: len(read)]
        buffers = np.zeros((len(read), layout.num_buffers), np.float32)
        ids = [one.asked.client_id for one in read]
        problems, extent = steps.write([one.arrays for one in read], vectors, buffers)
        refused = {ids[row]: why for row, why in problems.items()}
        halves = None
        if any(one.half_difference is not None for one in read):
            halves = np.zeros_like(vectors)
            for row, one in enumerate(read):
                if one.half_difference is not None:
                    halves[row] = one.half_difference
        self.intake.add_batch(
            UpdateBatch(
                client_ids=ids,
                vectors=vectors,
                buffers=buffers,
                half_differences=halves,
                num_examples=[one.reported.num_examples for one in read],
                bases=[one.asked.base for one in read],
                metrics=[one.reported.scalars for one in read],
                refused=refused,
                extent=extent,
            )
        )
        for client_id, why in refused.items():
            del self._reported[client_id]
            self._refused[client_id] = why

    def _rows(self) -> NDArray[np.float32]:
        """Give this thread's memory for updates."""
        rows: NDArray[np.float32] | None = getattr(self._memory, "rows", None)
        if rows is None:
            shape = (REPLIES_AT_ONCE, self._federation.layout.num_params)
            rows = self._memory.rows = np.zeros(shape, np.float32)
        return rows


class _Read(NamedTuple):
    """A reply of which all is known but whether its numbers can be used."""

    asked: Asked
    reported: Reported
    arrays: ArrayRecord
    half_difference: Vector | None
