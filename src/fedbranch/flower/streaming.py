"""Replies that go into the server's sums as they come, while other clients still train.

For servers that keep no updates. A few threads read, check and add some replies at a time, and
let them go.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from flwr.app import Message

from fedbranch.core.parallel import num_cores
from fedbranch.flower.asking import Asked
from fedbranch.flower.federation import Federation
from fedbranch.flower.read_updates import UpdateReader
from fedbranch.flower.reply_content import Answer, OpenedReply, open_reply, why_unreadable
from fedbranch.protocol.tasks import UpdateBatch
from fedbranch.server.replies.intake import Intake

__all__ = ["SummedReplies"]

# Many replies at once need few steps of Python for each of them. But if their updates are written
# down, two for each thread and no more than these bytes are in memory.
MOST_REPLIES_AT_ONCE = 32
MOST_BYTES_AT_ONCE = 2**24
MOST_THREADS = 4  # more would wait for the interpreter
BATCHES_AHEAD = 2  # of each thread
THREAD_NAME = "fedbranch-add"


class SummedReplies:
    """Offers replies to a server that adds updates up, by a few threads.

    Parameters
    ----------
    federation
        The federation.
    intake
        Takes the replies.
    num_threads
        By default one for each core, up to four. Their number changes no bit.

    Attributes
    ----------
    answers
        Client id -> the answer that the intake has taken.
    """

    def __init__(
        self, federation: Federation, intake: Intake, num_threads: int | None = None
    ) -> None:
        self.answers: dict[str, Answer] = {}
        self._federation = federation
        self._intake = intake
        self._num_threads = min(MOST_THREADS, num_cores()) if num_threads is None else num_threads
        bytes_of_update = 4 * federation.layout.num_params
        self._num_at_once = max(2, min(MOST_REPLIES_AT_ONCE, MOST_BYTES_AT_ONCE // bytes_of_update))
        self._readers: dict[str, UpdateReader] = {}  # base -> reads the replies to that model

    def offer(
        self,
        asked: Sequence[Asked],  # noqa: ARG002 -- only replies that are kept need rows
        replies: Iterable[tuple[Asked, Message]],
    ) -> None:
        """Offer replies to the intake as they come; return when all of them are in.

        Parameters
        ----------
        asked
            The messages that they may answer.
        replies
            At most one of each client.
        """
        has_room = threading.Semaphore(BATCHES_AHEAD * self._num_threads)
        under_way: list[Future[None]] = []
        waiting: dict[str, list[tuple[Asked, Message]]] = {}  # base -> replies to that model
        threads = ThreadPoolExecutor(self._num_threads, THREAD_NAME)

        def begin(batch: Sequence[tuple[Asked, Message]]) -> None:
            reader = self._reader(batch[0][0])
            has_room.acquire()
            work = threads.submit(self._take_in, batch, reader)
            work.add_done_callback(lambda _: has_room.release())
            under_way.append(work)

        try:
            for one, reply in replies:
                batch = waiting.setdefault(one.model.base, [])
                batch.append((one, reply))
                if len(batch) == self._num_at_once:
                    begin(waiting.pop(one.model.base))
            for batch in waiting.values():
                begin(batch)
            for work in under_way:
                work.result()
        finally:
            threads.shutdown(cancel_futures=True)  # after an error, what is not begun is not done

    def _reader(self, one: Asked) -> UpdateReader:
        reader = self._readers.get(one.model.base)
        if reader is None:
            reader = UpdateReader(self._federation.layout, one.model.arrays)
            self._readers[one.model.base] = reader
        return reader

    def _take_in(self, batch: Sequence[tuple[Asked, Message]], reader: UpdateReader) -> None:
        """Read some replies to one model; offer those that can be read, refuse the others."""
        opened: list[OpenedReply] = []
        refused: dict[str, str] = {}
        for one, reply in batch:
            try:
                opened.append(open_reply(self._federation, one, reply))
            except Exception as error:  # objects from outside may fail in ways of their own
                refused[one.client_id] = why_unreadable(error)
        read, problems = reader.read([one.arrays for one in opened])
        for place, why in problems.items():
            refused[opened[place].answer.asked.client_id] = why
        self._intake.refuse(refused)
        for places, params, buffers in read:
            some = [opened[place] for place in places]
            answers = {each.answer.asked.client_id: each.answer for each in some}
            halves = None
            if any(each.half_difference is not None for each in some):
                halves = np.zeros(params.shape, np.float32)
                for row, each in enumerate(some):
                    if each.half_difference is not None:
                        halves[row] = each.half_difference
            not_taken = self._intake.add_batch(
                UpdateBatch(
                    client_ids=list(answers),
                    vectors=params,
                    buffers=buffers,
                    half_differences=halves,
                    num_examples=[answer.reported.num_examples for answer in answers.values()],
                    bases=[answer.asked.model.base for answer in answers.values()],
                    metrics=[answer.reported.scalars for answer in answers.values()],
                )
            )
            self.answers.update((i, a) for i, a in answers.items() if i not in not_taken)
