"""A server's clients as Flower nodes: who is there, what each was sent, what came back."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedbranch.errors import FederationStalled
from fedbranch.flower.arrays import Layout, NamedArrays
from fedbranch.flower.half_updates import HALF_DIFFERENCE, HALVES_KEY
from fedbranch.flower.logs import log
from fedbranch.flower.node_ids import Roster, identify
from fedbranch.flower.replies import Reported, arrays_in, reported_in, why_unreadable
from fedbranch.flower.streaming import Folding
from fedbranch.protocol.tasks import UpdateBatch
from fedbranch.server.replies.intake import Intake
from fedbranch.server.server import Server
from fedbranch.types import Vector

__all__ = ["Answer", "Asked", "Federation", "Keys", "Received"]

SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_LOGS = 0.5, 10.0


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Under which names a message carries what."""

    weight: str
    arrays: str
    config: str


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A message to a client.

    Attributes
    ----------
    client_id, node_id, position, round
        To whom, on which of Flower's nodes, where in the tree it was, and when.
    is_at_leaf
        Whether that position was a leaf.
    sent
        The model in the message.
    base
        Names those parameters.
    halves
        Which half updates were asked for, if any.
    """

    client_id: str
    node_id: int
    position: int
    round: int
    is_at_leaf: bool
    sent: NamedArrays
    base: str
    message: Message
    halves: int | None = None

    @property
    def id(self) -> str:
        """What the reply will name; known once the message was sent."""
        return self.message.metadata.message_id

    @property
    def has_expired(self) -> bool:
        """Whether Flower would no longer pass a reply on."""
        metadata = self.message.metadata
        return metadata.created_at + metadata.ttl < time.time()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a client says in reply to a message."""

    asked: Asked
    reported: Reported


@dataclass(frozen=True)
class Received:
    """What came back from an exchange.

    Attributes
    ----------
    answers
        Client id -> what it answered.
    refused
        Client id -> why its reply is of no use.
    unanswered
        Messages that may still be answered.
    """

    answers: dict[str, Answer]
    refused: dict[str, str]
    unanswered: list[Asked]


@dataclass
class Federation:
    """The nodes of a running federation.

    Attributes
    ----------
    server
        Knows them as clients.
    layout
        Of the model's arrays.
    keys
        Of the messages.
    timeout_s
        How long an exchange may take.
    roster
        Who was there at the last look.
    """

    server: Server
    layout: Layout
    keys: Keys
    timeout_s: float
    roster: Roster = field(default_factory=Roster)
    _memory: NDArray[np.float32] | None = None

    def gather(self, grid: Grid, num_needed: int) -> list[str]:
        """Wait for enough nodes, and give the ids of the clients that are there, sorted.

        Raises
        ------
        FederationStalled
            If they do not come in time.
        """
        began = last_log = time.monotonic()
        while True:
            self.roster = identify(grid.get_nodes(), self.roster)
            num_there = len(self.roster.node_ids)
            if num_there >= num_needed:
                break
            now = time.monotonic()
            if now - began > self.timeout_s:
                raise FederationStalled(
                    f"{num_there} nodes are connected and {num_needed} are needed; nobody else "
                    f"came for {self.timeout_s:g} s. Start more nodes, or ask for fewer with "
                    "min_available_nodes, min_train_nodes and min_evaluate_nodes"
                )
            if now - last_log > SECONDS_BETWEEN_LOGS:
                log.info("\twaiting for nodes: %d of %d are connected", num_there, num_needed)
                last_log = now
            time.sleep(min(SECONDS_BETWEEN_LOOKS, self.timeout_s))
        for client_id, reason in self.roster.refused.items():
            log.warning("\t%s is not asked: %s", client_id, reason)
        return sorted(self.roster.node_ids)

    def wait_for_any(self, grid: Grid, client_ids: Collection[str], limit_s: float) -> list[str]:
        """Wait for one of these clients to come, for a while; give those that are there."""
        until = time.monotonic() + limit_s
        while True:
            self.roster = identify(grid.get_nodes(), self.roster)
            present = sorted(set(client_ids) & self.roster.node_ids.keys())
            if present or time.monotonic() >= until:
                return present
            time.sleep(min(SECONDS_BETWEEN_LOOKS, limit_s))

    def still_there(self, grid: Grid) -> set[int]:
        """Give the ids of nodes that have been connected without a break since the last look.

        A node that was started again does not remember what it was asked before.
        """
        now = identify(grid.get_nodes()).sessions
        return {
            node_id for node_id, since in self.roster.sessions.items() if now.get(node_id) == since
        }

    def ask(
        self,
        client_ids: Iterable[str],
        this_round: int,
        config: ConfigRecord | None,
        *,
        message_type: str,
        ttl_s: float,
        halves: Mapping[int, int] | None = None,
    ) -> list[Asked]:
        """Write a message to each of these clients, with the model of its position.

        All clients at a position get the same record, which Flower then stores once. At some
        positions they may be asked for half updates: position -> which halves.
        """
        halves = halves or {}
        tree = self.server.tree
        sent: dict[int, NamedArrays] = {}
        records: dict[int, RecordDict] = {}
        asked = []
        for client_id in client_ids:
            at = tree[tree.position(client_id)]
            if at.id not in records:
                sent[at.id] = self.layout.arrays_at(at.params, at.buffers)
                settings = ConfigRecord({**(config or {}), "server-round": this_round})
                if at.id in halves:
                    settings[HALVES_KEY] = halves[at.id]
                records[at.id] = RecordDict(
                    {
                        self.keys.arrays: self.layout.record(sent[at.id]),
                        self.keys.config: settings,
                    }
                )
            node_id = self.roster.node_ids[client_id]
            message = Message(
                content=records[at.id],
                message_type=message_type,
                dst_node_id=node_id,
                ttl=ttl_s,
                group_id=str(this_round),
            )
            asked.append(
                Asked(
                    client_id=client_id,
                    node_id=node_id,
                    position=at.id,
                    round=this_round,
                    is_at_leaf=at.is_leaf,
                    sent=sent[at.id],
                    base=at.base,
                    message=message,
                    halves=halves.get(at.id),
                )
            )
        return asked

    def half_difference_in(self, one: Asked, reply: Message) -> Vector | None:
        """Read the half difference of a reply, if it was asked for and there is one."""
        if one.halves is None:
            return None
        half = reply.content.array_records.get(HALF_DIFFERENCE.format(self.keys.arrays))
        return None if half is None else self.layout.params_in(half)

    def receive_metrics(self, asked: Sequence[Asked], replies: Iterable[Message]) -> Received:
        """Read the replies of clients that were to evaluate."""
        return self._receive(asked, replies, lambda _, reply: self.reported(reply))

    def receive_updates(
        self, asked: Sequence[Asked], replies: Iterable[Message]
    ) -> tuple[Received, UpdateBatch]:
        """Read the replies of clients that were to train, each into a row of one matrix."""
        # Those at one position lie together, so that a cluster's updates need not be copied.
        clients = dict.fromkeys(
            one.client_id for one in sorted(asked, key=lambda one: (one.position, one.client_id))
        )
        rows = {client_id: row for row, client_id in enumerate(clients)}
        vectors = self._matrix(len(rows))
        buffers = np.zeros((len(rows), self.layout.num_buffers), dtype=np.float32)
        half_differences = None
        if any(one.halves is not None for one in asked):
            half_differences = np.zeros_like(vectors)

        def read(one: Asked, reply: Message) -> Reported:
            reported = self.reported(reply)
            row = rows[one.client_id]
            arrays = arrays_in(reply, self.keys.arrays)
            half_difference = self.half_difference_in(one, reply)
            # Nothing is written before all is read: the row may hold an earlier reply.
            self.layout.write_update(one.sent, arrays, vectors[row], buffers[row])
            if half_differences is not None:
                half_differences[row] = 0 if half_difference is None else half_difference
            return reported

        received = self._receive(asked, replies, read)
        answers = [received.answers.get(client_id) for client_id in rows]
        batch = UpdateBatch(
            client_ids=list(rows),
            vectors=vectors,
            buffers=buffers,
            half_differences=half_differences,
            num_examples=[0.0 if one is None else one.reported.num_examples for one in answers],
            bases=["" if one is None else one.asked.base for one in answers],
            metrics=[{} if one is None else one.reported.scalars for one in answers],
            refused=self._refused(asked, received),
        )
        return received, batch

    def fold_updates(
        self, asked: Sequence[Asked], replies: Iterable[Message]
    ) -> tuple[Received, Intake]:
        """Do the same for a server that keeps no updates: each goes into sums when it comes.

        Of several replies of a client that could be used the first counts.
        """
        waiting = _Waiting.of(asked)
        folding = Folding(self)
        taken: dict[str, Asked] = {}
        too_late: dict[str, str] = {}
        try:
            for one, reply in waiting.matched(replies):
                if one.round <= self.server.round and one.base != self._base(one.client_id):
                    too_late[one.client_id] = (
                        f"computed at other parameters ({one.base!r}) than the client's position "
                        f"has now ({self._base(one.client_id)!r})"
                    )
                elif one.client_id not in taken:
                    taken[one.client_id] = one
                    folding.put(one, reply)
            reported, refused = folding.finish()
        except BaseException:
            folding.close()
            raise
        received = waiting.received(
            {i: Answer(asked=taken[i], reported=found) for i, found in reported.items()},
            {i: why for i, why in (too_late | refused).items() if i not in reported},
        )
        folding.intake.refuse(self._refused(asked, received))
        return received, folding.intake

    def _base(self, client_id: str) -> str:
        """Name the parameters that a client's position has now."""
        tree = self.server.tree
        return tree[tree.position(client_id)].base

    def _refused(self, asked: Iterable[Asked], received: Received) -> dict[str, str]:
        """Say of everybody who was asked, or is not asked, why there is no reply of use."""
        silent = f"no answer: it was stopped, or took longer than {self.timeout_s:g} s"
        refused = {one.client_id: silent for one in asked if one.client_id not in received.answers}
        return {**self.roster.refused, **refused, **received.refused}

    def _matrix(self, num_rows: int) -> NDArray[np.float32]:
        """Give memory for updates: that of the last round, unless somebody holds on to it.

        New memory of that size costs more than what is written into it. Every view of an array
        is a reference to it; two are ours, the attribute and the one that is counted with.
        """
        if (
            self._memory is None
            or len(self._memory) < num_rows
            or sys.getrefcount(self._memory) > 2
        ):
            self._memory = np.zeros((num_rows, self.layout.num_params), dtype=np.float32)
        return self._memory[:num_rows]

    def _receive(
        self,
        asked: Iterable[Asked],
        replies: Iterable[Message],
        read: Callable[[Asked, Message], Reported],
    ) -> Received:
        """Read replies as they come; of several from one client, the one to its latest message."""
        waiting = _Waiting.of(asked)
        answers: dict[str, Answer] = {}
        refused: dict[str, str] = {}
        for one, reply in waiting.matched(replies):
            earlier = answers.get(one.client_id)
            if earlier is not None and earlier.asked.round > one.round:
                continue
            try:
                answers[one.client_id] = Answer(asked=one, reported=read(one, reply))
                refused.pop(one.client_id, None)
            except Exception as error:  # objects from outside may fail in ways of their own
                if earlier is None:
                    refused[one.client_id] = why_unreadable(error)
        return waiting.received(answers, refused)

    def reported(self, reply: Message) -> Reported:
        """Read the numbers of a reply.

        Raises
        ------
        InvalidUpdate
            If its node failed, or gave none that make sense.
        """
        return reported_in(
            reply, self.keys.weight, self.server.options.max_examples, self.layout.most_reply_bytes
        )


@dataclass
class _Waiting:
    """Messages that may still be answered.

    Attributes
    ----------
    by_id
        What a reply names -> the message.
    forged
        Client id -> who else said something in its name.
    """

    by_id: dict[str, Asked]
    forged: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, asked: Iterable[Asked]) -> _Waiting:
        return cls({one.id: one for one in asked})

    def matched(self, replies: Iterable[Message]) -> Iterator[tuple[Asked, Message]]:
        """Give, for each reply that somebody waits for, the message that it answers."""
        for reply in replies:
            metadata = reply.metadata
            one = self.by_id.get(metadata.reply_to_message_id)
            if one is None:
                log.warning("\tignored a reply to a message that nobody waits for")
                continue
            sender = metadata.src_node_id
            if sender != one.node_id:  # whoever was asked may still answer
                log.warning("\tignored what node %s says for %s", sender, one.client_id)
                self.forged[one.client_id] = f"answered by another node ({sender})"
                continue
            del self.by_id[metadata.reply_to_message_id]
            yield one, reply

    def received(self, answers: dict[str, Answer], refused: dict[str, str]) -> Received:
        """Put together what came of the messages."""
        forged = {i: reason for i, reason in self.forged.items() if i not in answers}
        unanswered = [
            one
            for one in self.by_id.values()
            if one.client_id not in answers or one.round > answers[one.client_id].asked.round
        ]
        return Received(
            answers, forged | refused, [one for one in unanswered if not one.has_expired]
        )
