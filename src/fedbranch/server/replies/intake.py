"""The replies of a round, taken in one by one or many at once, in any order.

What is wrong with a reply is found when it arrives. If clusters are found by sketches, these
are made then as well, and a server that keeps no updates adds each to exact sums of its cluster
and lets it go. The sums, and so all that follows, do not depend on who came first.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.exact_sum.raw_updates import Differences
from fedbranch.core.projection import Projection
from fedbranch.errors import InvalidUpdate
from fedbranch.protocol.client_ids import shown_id
from fedbranch.protocol.plain_text import one_line, shortened
from fedbranch.protocol.tasks import Update, UpdateBatch
from fedbranch.server.leaf import Leaf
from fedbranch.server.options import ServerOptions
from fedbranch.server.replies.checks import (
    Expected,
    check_batch,
    check_claims,
    check_update,
    is_sane,
)
from fedbranch.server.replies.kept import Kept
from fedbranch.server.replies.reply import Reply, ReplyRows
from fedbranch.server.replies.running_sums import AtLeaf, RunningSums
from fedbranch.server.replies.stack import (
    block_lengths,
    kept_with_sketches,
    only_sketches,
    stack_for_sums,
    stack_to_keep,
)
from fedbranch.server.replies.store import LeafStore
from fedbranch.server.replies.summed import Shape, Summed
from fedbranch.tree import ParameterTree

__all__ = ["Intake", "Situation"]

_UNKNOWN = "unknown client: it never joined or has left"
_TOO_LATE = "came too late: the round is over"


@dataclass(frozen=True, kw_only=True, eq=False)
class Situation:
    """What replies are judged by: the state of the server in a round.

    Attributes
    ----------
    round
        The coming one.
    expected
        What every reply must fit.
    tree
        Where each client stands.
    asked
        Client id -> base of its task.
    leaves
        Leaf -> what it remembers.
    set_aside
        The clients whose last reply the guard set aside.
    options, projection
        As the server has them.
    """

    round: int
    expected: Expected
    tree: ParameterTree
    asked: Mapping[str, str]
    leaves: Mapping[int, Leaf]
    set_aside: Collection[str]
    options: ServerOptions
    projection: Projection | None

    def running_sums(self) -> RunningSums | None:
        """Begin the sums of updates that are not kept; None if they are."""
        if self.options.keep_updates or self.projection is None:
            return None
        expected = self.expected
        shape = Shape(
            expected.num_params,
            expected.num_buffers,
            expected.num_compared if expected.compares_signal else None,
            self.projection,
        )
        at_leaves = {
            leaf_id: AtLeaf(
                usual=leaf.memory.usual,
                held=leaf.store if isinstance(leaf.store, Summed) else None,
            )
            for leaf_id, leaf in self.leaves.items()
        }
        return RunningSums(shape, self.options, at_leaves)


class Intake:
    """Takes the replies of one round, from any number of threads, in any order.

    Made by :meth:`fedbranch.Server.intake`; :meth:`fedbranch.Server.step` then makes the round of
    it, and whatever comes later is refused. While it is filled the server must not be changed.

    Attributes
    ----------
    refused
        Client id -> why its reply, or one of them, cannot be used.

    Notes
    -----
    Of two replies of a client the first counts: it may have been added up already. Another one
    that comes while the first is looked at is refused, also if the first then cannot be used. All
    the rest is the same in any order and with any number of threads, to the last bit.
    """

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._lock = threading.Lock()
        self._replies: dict[str, Reply] = {}
        self._running_sums = situation.running_sums()
        self._aside: set[str] = set()
        self._answered: set[str] = set()  # also those whose replies are being taken in
        self._node_of: dict[str, int] = {}  # client id -> node for which it replied
        self._nodes = _standing(situation.tree)
        self._bases = {node.id: node.base for node in situation.tree}
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
        """Raise ValueError unless this is the server of these replies, and stands as it did."""
        if self.round != this_round:
            raise ValueError(
                f"the intake is of round {self.round}, and this is round {this_round}; begin one "
                "for every round"
            )
        if self._situation.tree is not tree:
            raise ValueError("the intake is of another server; step the one that it was begun by")
        if _standing(tree) != self._nodes:
            raise ValueError(
                "the tree has changed since the intake was begun; begin a new one after undoing or "
                "merging splits"
            )

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
        if self._running_sums is not None:
            return self._running_sums.store(leaf_id, replies)
        if before is None and not replies:
            return None
        kept = before if isinstance(before, Kept) else Kept()
        return kept.plus(replies)

    # Taking in

    def add(self, client_id: str, update: Update) -> str | None:
        """Take a reply.

        Parameters
        ----------
        client_id
            Who replies.
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
        if isinstance(batch.vectors, Differences):
            taken: Collection[int] = ()
            if self._running_sums is not None:
                taken = self._take_raw(batch, batch.vectors, self._running_sums)
            if len(taken) == len(batch) and not batch.refused:  # nearly always
                return {}
            batch = batch.written(sorted(set(range(len(batch))).difference(taken)))
        usable, refused = check_batch(batch, self._situation.expected)
        for client_id in refused.keys() - batch.refused.keys():  # as when it comes alone
            refused[client_id] = self._why_not_asked(batch, client_id) or refused[client_id]
        ids = list(usable)
        nodes = dict(zip(ids, self._situation.tree.positions.of_all(ids), strict=True))
        return self._take(usable, nodes, refused)

    def _why_not_asked(self, batch: UpdateBatch, client_id: str) -> str | None:
        """Say why a client may not send what it sent, whatever that is; None if it may."""
        base = batch.bases[list(batch.client_ids).index(client_id)]
        try:
            self._check_base(client_id, base, self._node_of_sender(client_id))
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
        """Note of clients that there is no reply of use, as whoever collects them has found.

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
                node_id = self._node_of_sender(client_id)
                if count[client_id] > 1:
                    raise InvalidUpdate(
                        f"answered {count[client_id]} times in one round; none of it is used"
                    )
                if not isinstance(update, Update):
                    raise InvalidUpdate(f"the reply is a {type(update).__name__}; send an Update")
                self._check_base(client_id, update.base, node_id)
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
        taken: dict[str, Reply] = {}
        at_node: dict[int, list[str]] = {}
        with self._lock:
            for client_id, (base, reply) in usable.items():
                try:
                    self._check_open()
                    node_id = nodes[client_id]
                    if node_id is None:
                        raise InvalidUpdate(_UNKNOWN)
                    self._check_base(client_id, base, node_id)
                    if client_id in self._answered:
                        raise InvalidUpdate("has already answered in this round")
                    # From here on it has answered, whatever another thread is told meanwhile.
                    self._answered.add(client_id)
                    self._replies[client_id] = taken[client_id] = reply
                    self._node_of[client_id] = node_id
                    at_node.setdefault(node_id, []).append(client_id)
                except InvalidUpdate as error:
                    refused[client_id] = str(error)
        if self._situation.projection is not None:
            found, too_long = self._sketched(taken, at_node, self._situation.projection)
            with self._lock:
                for client_id in too_long:
                    del self._replies[client_id]
                self._answered -= too_long.keys()
                self._replies |= found
                self._aside |= too_long.keys()
            refused |= too_long
        with self._lock:
            self._note(refused)
        return refused

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidUpdate(_TOO_LATE)

    def _node_of_sender(self, client_id: str) -> int:
        """Look up where a client stands; refuse it if the round is over or it is not known."""
        self._check_open()
        if not isinstance(client_id, str):
            raise InvalidUpdate(f"unknown client: its id is a {type(client_id).__name__}")
        node_id = self._situation.tree.positions.of(client_id)
        if node_id is None:
            raise InvalidUpdate(_UNKNOWN)
        return node_id

    def _check_base(self, client_id: str, base: str | None, node_id: int) -> None:
        """Refuse a reply that does not answer what the client's position asks for now."""
        if base is None:
            base = self._situation.asked.get(client_id)
        if base is None:
            raise InvalidUpdate("no task was planned for this client in this round")
        present = self._bases[node_id]
        if not isinstance(base, str) or base != present:
            raise InvalidUpdate(
                f"computed at other parameters ({shortened(base)}) than the client's position has now "
                f"({present!r})"
            )
        leaf = self._situation.leaves.get(node_id)
        if leaf is not None and leaf.has_reply_of(client_id):
            raise InvalidUpdate("has already answered at these parameters")

    # Updates that are added straight from their messages

    def _take_raw(
        self, batch: UpdateBatch, updates: Differences, running_sums: RunningSums
    ) -> Collection[int]:
        """Add updates of replies that have nothing unusual, and return their rows.

        The other replies are as if they had not been there. The checks one by one then find out
        what is wrong with them, if anything is.
        """
        node_id, buffers = self._leaf_of(batch, updates), self._plain_buffers(batch)
        if node_id is None or buffers is None:
            return ()
        lengths = block_lengths(buffers)
        claims = self._plain_claims(batch, node_id, is_sane(lengths))
        with self._lock:
            claims = {
                row: claim
                for row, claim in claims.items()
                if batch.client_ids[row] not in self._answered and not self._is_closed
            }
            ids = {row: batch.client_ids[row] for row in claims}
            self._answered.update(ids.values())
        found = running_sums.add_raw(
            node_id,
            batch.client_ids,
            updates,
            buffers,
            lengths,
            {row: weight for row, (weight, _) in claims.items()},
        )
        taken = np.flatnonzero(found.is_added).tolist()
        rows = ReplyRows(
            sketch=found.sketches,
            lengths=np.stack([found.lengths, found.lengths, lengths], axis=1),
        )
        with self._lock:
            self._answered.difference_update(ids[row] for row in ids.keys() - set(taken))
            for row in taken:
                weight, metrics = claims[row]
                self._replies[ids[row]] = Reply(rows=rows, row=row, weight=weight, metrics=metrics)
                self._node_of[ids[row]] = node_id
        return taken

    def _leaf_of(self, batch: UpdateBatch, updates: Differences) -> int | None:
        """Return the leaf at which the updates of a batch may be added straight away, if any."""
        situation = self._situation
        if (
            situation.expected.compares_signal
            or batch.half_differences is not None
            or updates.shape[1] != situation.expected.num_params
            or not len(batch)
        ):
            return None
        node_id = situation.tree.positions.of(batch.client_ids[0])
        return node_id if node_id is not None and situation.tree[node_id].is_leaf else None

    def _plain_buffers(self, batch: UpdateBatch) -> NDArray[np.float32] | None:
        """Return the buffers of a batch, if they have the right shape and type."""
        buffers = batch.buffers
        shape = (len(batch), self._situation.expected.num_buffers)
        if buffers is None and not shape[1]:
            return np.zeros(shape, np.float32)
        if isinstance(buffers, np.ndarray) and buffers.shape == shape:
            return buffers if buffers.dtype == np.float32 else None
        return None

    def _plain_claims(
        self, batch: UpdateBatch, node_id: int, is_good: NDArray[np.bool_]
    ) -> dict[int, tuple[float, dict[str, float | None]]]:
        """Return weight and metrics of the rows whose clients may send them and are not set aside."""
        situation = self._situation
        claims = {}
        nodes = situation.tree.positions.of_all(batch.client_ids)
        for row, (client_id, at) in enumerate(zip(batch.client_ids, nodes, strict=True)):
            if (
                at == node_id
                and is_good[row]
                and client_id not in batch.refused
                and client_id not in situation.set_aside
            ):
                with suppress(Exception):  # the checks one by one say why
                    self._check_base(client_id, batch.bases[row], node_id)
                    claims[row] = check_claims(
                        batch.num_examples[row], batch.metrics[row], situation.expected.max_examples
                    )
        return claims

    # Sketches

    def _sketched(
        self,
        replies: Mapping[str, Reply],
        at_node: Mapping[int, list[str]],
        projection: Projection,
    ) -> tuple[dict[str, Reply], dict[str, str]]:
        """Return replies with sketches of what is compared, and why others are too long."""
        situation, running_sums = self._situation, self._running_sums
        sketched: dict[str, Reply] = {}
        too_long: dict[str, str] = {}
        for node_id, client_ids in at_node.items():
            if running_sums is None:
                sketched |= kept_with_sketches(stack_to_keep(client_ids, replies), projection)
            elif not situation.tree[node_id].is_leaf:
                sketched |= only_sketches(stack_for_sums(client_ids, replies), projection)
            else:
                stack = stack_for_sums(client_ids, replies)
                were_aside = [i in situation.set_aside for i in stack.client_ids]
                if found := running_sums.too_long(node_id, stack, were_aside):
                    too_long |= found
                    client_ids = [i for i in client_ids if i not in found]
                    if not client_ids:
                        continue
                    stack = stack_for_sums(client_ids, replies)
                sketched |= running_sums.add(node_id, stack)
        return sketched, too_long


def _standing(tree: ParameterTree) -> dict[int, tuple[int, bool]]:
    """Return the version of every node's parameters, and whether it is a leaf."""
    return {node.id: (node.version, node.is_leaf) for node in tree}
