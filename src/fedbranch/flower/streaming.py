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

from fedbranch.core.parallel import num_cores
from fedbranch.flower.read_updates import Steps
from fedbranch.flower.replies import Reported, arrays_in, why_unreadable
from fedbranch.protocol.tasks import UpdateBatch
from fedbranch.server.replies.intake import Intake
from fedbranch.types import Vector

if TYPE_CHECKING:
    from fedbranch.flower.federation import Asked, Federation

__all__ = ["Folding"]

# Many, so that there are few steps of Python for each; but if updates are to be written down,
# more than two of a thread shall not take more memory than this.
MOST_REPLIES_AT_ONCE = 32
MOST_BYTES_AT_ONCE = 2**24
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
        of_an_update = 4 * federation.layout.num_params
        self._num_at_once = max(2, min(MOST_REPLIES_AT_ONCE, MOST_BYTES_AT_ONCE // of_an_update))
        self._has_room = threading.Semaphore(BATCHES_AHEAD * num_threads)
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
        if len(waiting) == self._num_at_once:
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
        answers: list[_Answer] = []
        try:
            for one, reply in batch:
                try:
                    reported = federation.reported(reply)
                    half = federation.half_difference_in(one, reply)
                    answers.append(
                        _Answer(one, reported, arrays_in(reply, federation.keys.arrays), half)
                    )
                    self._reported[one.client_id] = reported
                except Exception as error:  # objects from outside may fail in ways of their own
                    self._refused[one.client_id] = why_unreadable(error)
            if answers:
                self._take_in(answers, steps)
        finally:
            self._has_room.release()

    def _take_in(self, answers: Sequence[_Answer], steps: Steps) -> None:
        read, problems = steps.read([one.arrays for one in answers])
        refused = {answers[place].asked.client_id: why for place, why in problems.items()}
        self.intake.refuse(refused)
        for places, params, buffers in read:
            some = [answers[place] for place in places]
            halves = None
            if any(one.half_difference is not None for one in some):
                halves = np.zeros(params.shape, np.float32)
                for row, one in enumerate(some):
                    if one.half_difference is not None:
                        halves[row] = one.half_difference
            self.intake.add_batch(
                UpdateBatch(
                    client_ids=[one.asked.client_id for one in some],
                    vectors=params,
                    buffers=buffers,
                    half_differences=halves,
                    num_examples=[one.reported.num_examples for one in some],
                    bases=[one.asked.base for one in some],
                    metrics=[one.reported.scalars for one in some],
                )
            )
        for client_id, why in refused.items():
            del self._reported[client_id]
            self._refused[client_id] = why


class _Answer(NamedTuple):
    """A reply of which all is known but whether its numbers can be used."""

    asked: Asked
    reported: Reported
    arrays: ArrayRecord
    half_difference: Vector | None
