"""The replies of a round, taken in one by one or many at once, in any order.

A reply is checked when it arrives. If clusters are found by sketches, these are made then as well,
and a server that keeps no updates adds each to exact sums of its cluster and drops it. The sums,
and so all that follows, do not depend on the order of the replies.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from fedbranch.core.exact_sum.raw_updates import Differences
from fedbranch.errors import InvalidUpdate
from fedbranch.protocol.client_ids import shown_id
from fedbranch.protocol.plain_text import one_line, shortened
from fedbranch.protocol.tasks import Update, UpdateBatch
from fedbranch.server.replies.checks import check_batch, check_update
from fedbranch.server.replies.receivers import RawClaims, SummingReceiver, receiver_for
from fedbranch.server.replies.reply import Reply
from fedbranch.server.replies.situation import Situation
from fedbranch.server.replies.store import LeafStore
from fedbranch.tree import ParameterTree

__all__ = ["Intake"]

_TOO_LATE = "came too late: the round is over"


class Intake:
    """Takes the replies of one round, from any number of threads, in any order.

    Made by :meth:`fedbranch.Server.intake`; :meth:`fedbranch.Server.step` then makes the round of
    it, and a reply that comes later is refused. While it is filled the server must not be changed.

    Attributes
    ----------
    refused
        Client id -> why its reply, or one of them, cannot be used.

    Notes
    -----
    Of several replies of a client the first that can be used counts, since it may have been added
    up already. One that comes while another is being checked is refused, even if that one then
    cannot be used. All the rest is the same in any order and with any number of threads, to the
    last bit.
    """

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._lock = threading.Lock()
        self._all_are_in = threading.Condition(self._lock)
        self._num_taking_in = 0  # calls that are taking replies in at this moment
        self._replies: dict[str, Reply] = {}
        self._receiver = receiver_for(situation)
        self._aside: set[str] = set()
        self._answered: set[str] = set()  # also those whose replies are being taken in
        self._node_of: dict[str, int] = {}  # client id -> node for which it replied
        self._is_closed = False
        self.refused: dict[str, str] = {}

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return (
            f"<Intake of round {self.round}, {state}: {len(self._replies)} taken, "
            f"{len(self.refused)} refused>"
        )

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Take no more, since the round is made of what is here; if that fails, go on taking."""
        with self._lock:
            self._is_closed = True
        try:
            with self._lock:  # an interrupt while it waits opens the intake again, too
                self._all_are_in.wait_for(lambda: not self._num_taking_in)
            yield
        except BaseException:
            self._is_closed = False
            raise

    @property
    def round(self) -> int:
        """Which round the replies are for."""
        return self._situation.round

    @property
    def replies(self) -> Mapping[str, Reply]:
        """Client id -> reply, of those that can be used."""
        return self._replies

    @property
    def aside(self) -> set[str]:
        """Clients whose replies are too long, compared with the round before."""
        return set(self._aside)

    def check_still_fits(self, tree: ParameterTree, this_round: int) -> None:
        """Raise ValueError unless this is the server of these replies, in the same situation."""
        self._situation.check_is_present(tree, this_round)

    def by_node(self, changed: Collection[str]) -> tuple[dict[int, list[str]], dict[str, str]]:
        """Sort the clients that replied by the node for which they did.

        Parameters
        ----------
        changed
            The clients that may have left, or may have been sent elsewhere, since the intake
            was begun.

        Returns
        -------
        tuple
            Node -> its clients, in the order of their ids; and client id -> why its reply is of
            no use any more.
        """
        gone = {}
        for client_id in self._replies.keys() & set(changed):
            node_id = self._situation.tree.positions.of(client_id)
            if node_id is None:
                gone[client_id] = "has left since it replied"
            elif node_id != self._node_of[client_id]:
                gone[client_id] = "was sent to another node since it replied"
        found: dict[int, list[str]] = {}
        for client_id in sorted(self._replies):
            if client_id not in gone:
                found.setdefault(self._node_of[client_id], []).append(client_id)
        return found, gone

    def store(
        self, leaf_id: int, before: LeafStore | None, replies: Mapping[str, Reply]
    ) -> LeafStore | None:
        """Return what a leaf has now: what it had before, and these replies of this round."""
        return self._receiver.store(leaf_id, before, replies)

    # Taking in

    def add(self, client_id: str, update: Update) -> str | None:
        """Take a reply.

        Parameters
        ----------
        client_id
            The client that replies.
        update
            What it sent. Nothing of it is referred to afterwards.

        Returns
        -------
        str or None
            Why it cannot be used; None if it can.
        """
        return self._take_checked([(client_id, update)]).get(shown_id(client_id))

    def add_batch(self, batch: UpdateBatch) -> dict[str, str]:
        """Take many replies at once, which is faster.

        Parameters
        ----------
        batch
            If updates are kept, its arrays must not be changed afterwards.

        Returns
        -------
        dict
            Client id -> why its reply cannot be used, for those that cannot.
        """
        found = self._situation.tree.positions.of_all(batch.client_ids)
        if not isinstance(batch.vectors, Differences):
            return self._take_batch(batch, found)
        refused: dict[str, str] = {}
        taken: set[int] = set()
        if isinstance(self._receiver, SummingReceiver):
            claims = self._receiver.raw_claims(batch, batch.vectors, found)
            if claims is not None:
                # The heaviest first: what is lighter than those held back can be added raw.
                held = self._receiver.likely_held(batch, claims)
                if held:
                    some = replace(batch.written(held), refused={})
                    refused |= self._take_batch(some, [found[row] for row in held])
                    taken.update(held)
                taken |= self._take_raw(self._receiver, batch, batch.vectors, claims, taken)
        rest = sorted(set(range(len(batch))).difference(taken))
        if rest or batch.refused:  # hardly ever
            refused |= self._take_batch(batch.written(rest), [found[row] for row in rest])
        return refused

    def _take_batch(self, batch: UpdateBatch, found: Sequence[int | None]) -> dict[str, str]:
        """Check the replies of a batch, and take those that can be used.

        Parameters
        ----------
        batch
            Its updates are in arrays.
        found
            The node of each client, if it is known.
        """
        usable, refused = check_batch(batch, self._situation.expected)
        for client_id in refused.keys() - batch.refused.keys():  # as when it comes alone
            refused[client_id] = self._why_not_asked(batch, client_id) or refused[client_id]
        return self._take(usable, dict(zip(batch.client_ids, found, strict=True)), refused)

    def _why_not_asked(self, batch: UpdateBatch, client_id: str) -> str | None:
        """Return why a client may not reply to this task at all; None if it may."""
        base = batch.bases[list(batch.client_ids).index(client_id)]
        try:
            self._check_open()
            self._situation.check_base(client_id, base, self._situation.node_of(client_id))
        except InvalidUpdate as error:
            return str(error)
        return None

    def add_all(
        self, updates: Mapping[str, Update] | Iterable[tuple[str, Update]] | UpdateBatch
    ) -> dict[str, str]:
        """Take all replies of a round; none of a client that replies more than once among them."""
        if isinstance(updates, UpdateBatch):
            return self.add_batch(updates)
        pairs = list(updates.items() if isinstance(updates, Mapping) else updates)
        for pair in pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(
                    f"updates contain {shortened(pair)}; pass a mapping from client ids to Updates, "
                    "pairs of them, an UpdateBatch, or what Server.intake gave"
                )
        return self._take_checked(pairs)

    def refuse(self, refused: Mapping[str, str]) -> None:
        """Note that there is no usable reply of some clients, as the caller has found.

        Parameters
        ----------
        refused
            Client id -> why.
        """
        with self._lock:
            self._note(refused)

    def _note(self, refused: Mapping[str, str]) -> None:
        for client_id, reason in refused.items():
            # Of several reasons always the same one, whichever came first.
            self.refused[client_id] = min(reason, self.refused.get(client_id, reason))

    def _take_checked(self, pairs: Sequence[tuple[str, Update]]) -> dict[str, str]:
        """Check each reply, and take those that can be used."""
        usable: dict[str, tuple[str | None, Reply]] = {}
        nodes: dict[str, int] = {}
        refused: dict[str, str] = {}
        count = Counter(client_id for client_id, _ in pairs if isinstance(client_id, str))
        for client_id, update in sorted(pairs, key=lambda pair: shown_id(pair[0])):
            try:
                self._check_open()
                node_id = self._situation.node_of(client_id)
                if count[client_id] > 1:
                    raise InvalidUpdate(
                        f"answered {count[client_id]} times in one round; none of it is used"
                    )
                if not isinstance(update, Update):
                    raise InvalidUpdate(f"the reply is a {type(update).__name__}; send an Update")
                self._situation.check_base(client_id, update.base, node_id)
                reply = check_update(update, self._situation.expected)
                usable[client_id], nodes[client_id] = (update.base, reply), node_id
            except InvalidUpdate as error:
                refused[shown_id(client_id)] = one_line(str(error))
            except Exception as error:
                # Objects from outside may fail in ways of their own; that is their client's
                # problem alone.
                refused[shown_id(client_id)] = f"the reply cannot be read: {shortened(error)}"
        return self._take(usable, nodes, refused)

    def _take(
        self,
        usable: Mapping[str, tuple[str | None, Reply]],
        nodes: Mapping[str, int | None],
        refused: dict[str, str],
    ) -> dict[str, str]:
        """Take replies whose contents are right, if their clients may send them from there."""
        coming: dict[str, Reply] = {}
        at_node: dict[int, list[str]] = {}
        with self._taking_in():
            with self._lock:
                for client_id, (base, reply) in usable.items():
                    try:
                        self._check_open()
                        node_id = self._situation.checked_node(nodes[client_id])
                        self._situation.check_base(client_id, base, node_id)
                        if client_id in self._answered:
                            raise InvalidUpdate("has already answered in this round")
                        # From here on it has answered, whatever another thread is told meanwhile.
                        self._answered.add(client_id)
                        coming[client_id] = reply
                        at_node.setdefault(node_id, []).append(client_id)
                    except InvalidUpdate as error:
                        refused[client_id] = str(error)
            for node_id, client_ids in at_node.items():
                received, too_long = self._receiver.receive(node_id, client_ids, coming)
                with self._lock:
                    self._replies |= received
                    self._node_of |= dict.fromkeys(received, node_id)
                    self._answered -= too_long.keys()
                    self._aside |= too_long.keys()
                refused |= too_long
            with self._lock:
                self._note(refused)
        return refused

    @contextmanager
    def _taking_in(self) -> Iterator[None]:
        """Let the round wait for replies that are being taken in."""
        with self._lock:
            self._num_taking_in += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_taking_in -= 1
                self._all_are_in.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidUpdate(_TOO_LATE)

    def _take_raw(
        self,
        receiver: SummingReceiver,
        batch: UpdateBatch,
        updates: Differences,
        claims: RawClaims,
        but: Collection[int],
    ) -> set[int]:
        """Take replies that have nothing unusual straight from their messages; return their rows.

        The other replies, and some rows, are as if they had not been there.
        """
        with self._taking_in():
            with self._lock:
                ids = {
                    row: batch.client_ids[row]
                    for row in claims.of_rows.keys() - set(but)
                    if batch.client_ids[row] not in self._answered and not self._is_closed
                }
                self._answered.update(ids.values())
            taken = receiver.receive_raw(batch, updates, claims, sorted(ids))
            with self._lock:
                self._answered.difference_update(ids[row] for row in ids.keys() - taken.keys())
                for row, reply in taken.items():
                    self._replies[ids[row]] = reply
                    self._node_of[ids[row]] = claims.leaf_id
        return set(taken)
