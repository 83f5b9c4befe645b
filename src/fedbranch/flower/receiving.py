"""Replies of clients: matched with their messages, read, and offered to the server's intake.

Which replies count is decided by the intake alone. Replies are only put in order here: first
the first reply of every client, as it comes, and after all of these the second ones, and so on.
A reply counts if it is the first of its client that the server can use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Message

from fedbranch.flower.asking import Asked
from fedbranch.flower.federation import Federation
from fedbranch.flower.logs import log
from fedbranch.flower.reply_content import Answer, open_reply, read_reported, why_unreadable
from fedbranch.flower.streaming import SummedReplies
from fedbranch.protocol.tasks import UpdateBatch
from fedbranch.server.replies.intake import Intake

__all__ = ["Evaluated", "KeptReplies", "Received", "Waiting", "receive_metrics", "receive_updates"]

Replies = Iterable[tuple[Asked, Message]]


@dataclass(frozen=True)
class Evaluated:
    """The replies of clients that were asked to evaluate.

    Attributes
    ----------
    answers
        Client id -> its answer, sorted by id.
    refused
        Client id -> why its reply cannot be used.
    """

    answers: dict[str, Answer]
    refused: dict[str, str]


@dataclass(frozen=True)
class Received:
    """The replies of clients that were asked to train.

    Attributes
    ----------
    intake
        Holds all replies and refusals of the round; :meth:`fedbranch.Server.step` takes it.
    answers
        Client id -> the answer that the intake has taken.
    unanswered
        Messages that may still be answered.
    """

    intake: Intake
    answers: dict[str, Answer]
    unanswered: list[Asked]


def receive_metrics(
    federation: Federation, asked: Sequence[Asked], replies: Iterable[Message]
) -> Evaluated:
    """Read the replies of clients that were asked to evaluate."""
    waiting = Waiting(asked, federation.timeout_s)
    answers: dict[str, Answer] = {}
    refused: dict[str, str] = {}
    for one, reply in waiting.matched(replies):
        try:
            answers[one.client_id] = Answer(asked=one, reported=read_reported(federation, reply))
        except Exception as error:  # objects from outside may fail in ways of their own
            refused[one.client_id] = why_unreadable(error)
    return Evaluated(dict(sorted(answers.items())), waiting.forged | refused)


def receive_updates(
    federation: Federation, asked: Sequence[Asked], replies: Iterable[Message]
) -> Received:
    """Read the replies of clients that were asked to train, and offer each to the intake.

    Parameters
    ----------
    federation
        The federation; its server has planned this round.
    asked
        The messages of this round, and earlier ones that may still be answered.
    replies
        What comes, in any order.

    Returns
    -------
    Received
        The intake to make the round of. In it every reply that is not used has its reason:
        unreadable, computed at other parameters, or a second one of its client. So has every
        client without any reply.
    """
    intake = federation.server.intake()
    waiting = Waiting(asked, federation.timeout_s)
    store: KeptReplies | SummedReplies
    if federation.server.options.keep_updates:
        store = KeptReplies(federation, intake, waiting)
    else:
        store = SummedReplies(federation, intake)
    again: list[tuple[Asked, Message]] = []
    store.offer(asked, _first_of_each(waiting.matched(replies), again))
    while again:
        turn, again = again, []
        store.offer([one for one, _ in turn], _first_of_each(turn, again))
    intake.refuse(federation.roster.refused)
    intake.refuse(waiting.without_reply())
    return Received(intake, store.answers, waiting.unanswered(store.answers))


def _first_of_each(replies: Replies, again: list[tuple[Asked, Message]]) -> Replies:
    """Pass on the first reply of every client; add the others to ``again``."""
    seen = set()
    for one, reply in replies:
        if one.client_id in seen:
            again.append((one, reply))
        else:
            seen.add(one.client_id)
            yield one, reply


class Waiting:
    """Messages that may be answered, and the clients that have answered any of them.

    Parameters
    ----------
    asked
        The messages.
    timeout_s
        The time that replies have, for the reason of clients without any.

    Attributes
    ----------
    forged
        Client id -> why another node's reply in its place is ignored; of clients that have not
        replied themselves.
    """

    def __init__(self, asked: Sequence[Asked], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._by_id = {one.id: one for one in asked}
        self._silent = dict.fromkeys(one.client_id for one in asked)
        self.forged: dict[str, str] = {}

    def matched(self, replies: Iterable[Message]) -> Iterator[tuple[Asked, Message]]:
        """Pair every reply with the message that it answers; leave out those that answer none."""
        for reply in replies:
            metadata = reply.metadata
            one = self._by_id.get(metadata.reply_to_message_id)
            if one is None:
                log.warning("\tignored a reply to a message that was answered, or was never sent")
                continue
            sender = metadata.src_node_id
            if sender != one.node_id:  # the node that was asked may still reply
                log.warning("\tignored a reply of node %s in place of %s", sender, one.client_id)
                if one.client_id in self._silent:
                    self.forged[one.client_id] = f"answered by another node ({sender})"
                continue
            del self._by_id[metadata.reply_to_message_id]
            self._silent.pop(one.client_id, None)
            self.forged.pop(one.client_id, None)
            yield one, reply

    def without_reply(self) -> dict[str, str]:
        """Return the clients that have not replied to any message, each with the reason."""
        reason = f"no answer: it was stopped, or took longer than {self._timeout_s:g} s"
        return dict.fromkeys(self._silent, reason) | self.forged

    def unanswered(self, answers: dict[str, Answer]) -> list[Asked]:
        """Return the messages that may still be answered.

        After its answer to a later message was taken, a client need not answer earlier ones.
        """
        return [
            one
            for one in self._by_id.values()
            if not one.has_expired
            and (one.client_id not in answers or one.round > answers[one.client_id].asked.round)
        ]


class KeptReplies:
    """Offers replies to a server that keeps updates: as rows of one matrix.

    Parameters
    ----------
    federation
        The federation.
    intake
        Takes the replies.
    waiting
        Knows the clients without a reply.

    Attributes
    ----------
    answers
        Client id -> the answer that the intake has taken.
    """

    def __init__(self, federation: Federation, intake: Intake, waiting: Waiting) -> None:
        self.answers: dict[str, Answer] = {}
        self._federation = federation
        self._intake = intake
        self._waiting = waiting

    def offer(self, asked: Sequence[Asked], replies: Replies) -> None:
        """Read replies as they come, and offer all of them to the intake as one batch.

        Parameters
        ----------
        asked
            The messages that they may answer.
        replies
            At most one of each client.
        """
        federation, layout = self._federation, self._federation.layout
        rows = _rows_by_position(asked)
        vectors = federation.memory.rows(len(rows), layout.num_params)
        buffers = np.zeros((len(rows), layout.num_buffers), dtype=np.float32)
        half_differences = None
        if any(one.model.halves is not None for one in asked):
            half_differences = np.zeros_like(vectors)
        read: dict[str, Answer] = {}
        refused: dict[str, str] = {}
        for one, reply in replies:
            row = rows[one.client_id]
            try:
                opened = open_reply(federation, one, reply)
                layout.write_update(one.model.arrays, opened.arrays, vectors[row], buffers[row])
            except Exception as error:  # objects from outside may fail in ways of their own
                refused[one.client_id] = why_unreadable(error)
                continue
            if half_differences is not None and opened.half_difference is not None:
                half_differences[row] = opened.half_difference
            read[one.client_id] = opened.answer
        answers = [read.get(client_id) for client_id in rows]
        not_taken = self._intake.add_batch(
            UpdateBatch(
                client_ids=list(rows),
                vectors=vectors,
                buffers=buffers,
                half_differences=half_differences,
                num_examples=[0.0 if one is None else one.reported.num_examples for one in answers],
                bases=["" if one is None else one.asked.model.base for one in answers],
                metrics=[{} if one is None else one.reported.scalars for one in answers],
                # A row that holds nothing needs a reason, too.
                refused=self._waiting.without_reply() | refused,
            )
        )
        self.answers.update((i, a) for i, a in read.items() if i not in not_taken)


def _rows_by_position(asked: Iterable[Asked]) -> dict[str, int]:
    """Return the row of every client; those at one position lie together.

    So the updates of a cluster need not be copied. The last message to a client counts: it was
    sent to the client's present position.
    """
    positions = {one.client_id: one.model.position for one in asked}
    in_order = sorted(positions, key=lambda client_id: (positions[client_id], client_id))
    return {client_id: row for row, client_id in enumerate(in_order)}
