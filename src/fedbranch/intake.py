"""The replies of a round, taken in one by one or many at once, in any order.

What is wrong with a reply is found when it arrives. If clusters are found by sketches, these
are made then as well, and a server that keeps no updates adds each to exact sums of its cluster
and lets it go. The sums, and so all that follows, do not depend on who came first.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from fedbranch.acceptance import Expected, check_batch, check_claims, check_update
from fedbranch.core.differences import Differences
from fedbranch.core.extents import Extent, extents
from fedbranch.core.geometry import Array, norms, take_rows, to_numpy
from fedbranch.core.gram import is_on_host
from fedbranch.core.sketch import Projection
from fedbranch.core.summation import Added, can_be_added_whole
from fedbranch.errors import InvalidUpdate
from fedbranch.examination import Case, Weighting
from fedbranch.guard import Guard
from fedbranch.messages import Reply, Rows, Update, UpdateBatch, one_line, shortened, stacked
from fedbranch.sums import Part, Sums, Whole
from fedbranch.tree import ParameterTree

__all__ = ["Intake", "Situation"]

_UNKNOWN = "unknown client: it never joined or has left"
_NAMES = ("update", "signal", "buffers")  # of a reply's three lengths


@dataclass(frozen=True, kw_only=True, eq=False)
class Situation:
    """What replies are measured by: how the server stands in a round."""

    round: int
    expected: Expected
    tree: ParameterTree
    asked: Mapping[str, str]  # client id -> base of its task
    cases: Mapping[int, Case]
    set_aside: Collection[str]  # clients whose last reply the guard set aside
    guard: Guard | None
    weighting: Weighting
    projection: Projection | None = None
    keeps_updates: bool = True


class Intake:
    """Takes the replies of one round, from any number of threads, in any order.

    Made by :meth:`fedbranch.Server.intake`; :meth:`fedbranch.Server.step` then makes the round of
    it. While it is filled the server must not be changed.

    Attributes
    ----------
    refused
        Client id -> why its reply, or one of them, cannot be used.

    Notes
    -----
    Of two replies of a client the first counts: it may have been added up already. All the rest
    is the same in any order and with any number of threads, to the last bit.
    """

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._lock = threading.Lock()
        self._replies: dict[str, Reply] = {}
        self._sums: dict[int, Sums] = {}  # leaf -> weights, and updates held back
        self._parts: dict[int, list[Part]] = {}  # leaf -> sums, of at most one thread at a time
        self._idle: dict[int, list[Part]] = {}
        self._aside: set[str] = set()
        self._answered: set[str] = set()  # also those whose replies are being taken in
        self._stood: dict[str, int] = {}  # client id -> node for which it replied
        self._nodes = _standing(situation.tree)
        self._bases = {node.id: node.base for node in situation.tree}
        self.refused: dict[str, str] = {}

    @property
    def round(self) -> int:
        """Which round the replies are for."""
        return self._situation.round

    @property
    def replies(self) -> dict[str, Reply]:
        """The replies that can be used, by client id, in its order."""
        return dict(sorted(self._replies.items()))

    @property
    def aside(self) -> set[str]:
        """Clients whose replies are too long, by what was usual in the round before."""
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

    def gone(self) -> dict[str, str]:
        """Give the clients that left, or were sent elsewhere, after they replied, with why."""
        client_ids = list(self._replies)
        found = {}
        nodes = self._situation.tree.positions.of_all(client_ids)
        for client_id, node_id in zip(client_ids, nodes, strict=True):
            if node_id is None:
                found[client_id] = "has left since it replied"
            elif node_id != self._stood[client_id]:
                found[client_id] = "was sent to another node since it replied"
        return found

    def sums(self) -> dict[int, Sums]:
        """Give the sums of every leaf that got updates, and what held clusters had before."""
        together = {}
        for node_id, sums in self._sums.items():
            before = self._before(node_id)
            there = [sums] if before is None else [before, sums]
            together[node_id] = Sums.merged(there, self._parts.get(node_id, []))
        return together

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
        return self._take_checked([(client_id, update)]).get(_shown_id(client_id))

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
            taken = self._take_plain(batch, batch.vectors)
            rest = [row for row in range(len(batch)) if row not in taken]
            if not rest and not batch.refused:  # nearly always
                return {}
            batch = batch.written(rest)
        usable, refused = check_batch(batch, self._situation.expected)
        return self._take(usable, refused)

    def add_all(
        self, updates: Mapping[str, Update] | Iterable[tuple[str, Update]] | UpdateBatch
    ) -> dict[str, str]:
        """Take all replies of a round; none of a client that replies more than once among them."""
        if isinstance(updates, UpdateBatch):
            return self.add_batch(updates)
        return self._take_checked(
            list(updates.items() if isinstance(updates, Mapping) else updates)
        )

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
        refused: dict[str, str] = {}
        count = Counter(client_id for client_id, _ in pairs if isinstance(client_id, str))
        for client_id, update in sorted(pairs, key=lambda pair: _shown_id(pair[0])):
            try:
                self._check_sender(client_id)
                if count[client_id] > 1:
                    raise InvalidUpdate(
                        f"answered {count[client_id]} times in one round; none of it is used"
                    )
                if not isinstance(update, Update):
                    raise InvalidUpdate(f"the reply is a {type(update).__name__}; send an Update")
                self._check_base(client_id, update.base, self._situation.tree.position(client_id))
                reply = check_update(update, self._situation.expected)
                usable[client_id] = (update.base, reply)
            except InvalidUpdate as error:
                refused[_shown_id(client_id)] = one_line(str(error))
            except Exception as error:
                # Objects from outside may fail in ways of their own; that is their client's
                # problem alone.
                refused[_shown_id(client_id)] = f"the reply cannot be read: {shortened(error)}"
        return self._take(usable, refused)

    def _take(
        self, usable: Mapping[str, tuple[str | None, Reply]], refused: dict[str, str]
    ) -> dict[str, str]:
        """Take replies whose contents are right, if their senders may send them."""
        taken: dict[str, Reply] = {}
        nodes = dict(zip(usable, self._situation.tree.positions.of_all(list(usable)), strict=True))
        at_node: dict[int, list[str]] = {}
        with self._lock:
            for client_id, (base, reply) in usable.items():
                try:
                    node_id = nodes[client_id]
                    if node_id is None:
                        raise InvalidUpdate(_UNKNOWN)
                    self._check_base(client_id, base, node_id)
                    if client_id in self._answered:
                        raise InvalidUpdate("has already answered in this round")
                    # From here on it has answered, whatever another thread is told meanwhile.
                    self._answered.add(client_id)
                    self._replies[client_id] = taken[client_id] = reply
                    self._stood[client_id] = node_id
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

    def _check_sender(self, client_id: str) -> None:
        if not isinstance(client_id, str):
            raise InvalidUpdate(f"unknown client: its id is a {type(client_id).__name__}")
        if client_id not in self._situation.tree:
            raise InvalidUpdate(_UNKNOWN)

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
        case = self._situation.cases.get(node_id)
        if case is not None and client_id in case.replies:
            raise InvalidUpdate("has already answered at these parameters")

    # Updates that are added as they lie

    def _take_plain(self, batch: UpdateBatch, updates: Differences) -> set[int]:
        """Add updates as they lie, of replies about which nothing is unusual; give their rows.

        The others are as if they had not been there; who looks at them one by one finds out what
        is wrong, if anything is.
        """
        node_id, buffers = self._leaf_of(batch, updates), self._plain_buffers(batch)
        if node_id is None or buffers is None:
            return set()
        guard, usual = self._situation.guard, self._usual(node_id)
        lengths = _measured(buffers, keeps=False)
        longest = math.inf
        if guard is not None:
            longest = guard.longest_untouched(usual.get("update", 0.0))
            lengths[lengths > guard.longest_untouched(usual.get("buffers", 0.0))] = math.nan
        claims = self._plain_claims(batch, node_id, np.isfinite(lengths))
        weights = np.zeros(len(batch))
        with self._lock:
            sums = self._sums_at(node_id)
            for row, (weight, _) in claims.items():
                counted = weight if self._situation.weighting == "examples" else 1.0
                client_id = batch.client_ids[row]
                if (
                    client_id not in self._answered
                    and can_be_added_whole(counted)
                    and sums.is_settled(counted, guard)
                ):
                    weights[row] = counted
                    self._answered.add(client_id)
                    self._stood[client_id] = node_id
        with self._part(node_id) as part:
            found = part.compared.add_plain(updates, weights, longest)
            taken = np.flatnonzero(found.is_added).tolist()
            if taken and buffers.shape[1]:
                part.sums["buffers"].add(take_rows(buffers, taken), weights[taken])
        rows = added_rows(found, lengths)
        with self._lock:
            self._answered.difference_update(
                batch.client_ids[row]
                for row in np.flatnonzero((weights > 0) & ~found.is_added).tolist()
            )
            for row in taken:
                client_id, (weight, metrics) = batch.client_ids[row], claims[row]
                self._replies[client_id] = Reply(rows=rows, row=row, weight=weight, metrics=metrics)
                sums.claim(client_id, float(weights[row]))
        self._add_settled(node_id)
        return set(taken)

    def _leaf_of(self, batch: UpdateBatch, updates: Differences) -> int | None:
        """Give the leaf at which the updates of a batch may be added as they lie, if there is one."""
        situation = self._situation
        if (
            situation.projection is None
            or situation.keeps_updates
            or situation.expected.compares_signal
            or batch.half_differences is not None
            or updates.shape[1] != situation.expected.num_params
            or not len(batch)
        ):
            return None
        node_id = situation.tree.positions.of(batch.client_ids[0])
        return node_id if node_id is not None and situation.tree[node_id].is_leaf else None

    def _plain_buffers(self, batch: UpdateBatch) -> NDArray[np.float32] | None:
        """Give the buffers of a batch, if they are as they must be."""
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
        """Give weight and metrics of the rows whose senders may send them, and are not watched."""
        situation, before = self._situation, self._before(node_id)
        claims = {}
        nodes = situation.tree.positions.of_all(batch.client_ids)
        for row, (client_id, at) in enumerate(zip(batch.client_ids, nodes, strict=True)):
            if (
                at == node_id
                and is_good[row]
                and client_id not in batch.refused
                and client_id not in situation.set_aside
                and (before is None or client_id not in before.weights)
            ):
                with suppress(Exception):  # who looks at it one by one says why
                    self._check_base(client_id, batch.bases[row], node_id)
                    claims[row] = check_claims(
                        batch.num_examples[row], batch.metrics[row], situation.expected.max_examples
                    )
        return claims

    # Sketches and sums

    def _sketched(
        self,
        replies: Mapping[str, Reply],
        at_node: Mapping[int, list[str]],
        projection: Projection,
    ) -> tuple[dict[str, Reply], dict[str, str]]:
        """Give replies with sketches in place of what is compared, and why some are too long."""
        keeps = self._situation.keeps_updates
        sketched: dict[str, Reply] = {}
        too_long: dict[str, str] = {}
        for node_id, client_ids in at_node.items():
            group = _Group.of(client_ids, replies, keeps)
            if keeps or not self._situation.tree[node_id].is_leaf:
                sketches = projection.of(group.compared)
            else:
                if found := self._too_long(node_id, group):
                    too_long |= found
                    client_ids = [i for i in client_ids if i not in found]
                    if not client_ids:
                        continue
                    group = _Group.of(client_ids, replies, keeps)
                sketches = self._fold(node_id, group)
            sketched |= zip(
                group.client_ids, _with_sketches(group, sketches, projection, keeps), strict=True
            )
        return sketched, too_long

    def _too_long(self, node_id: int, group: _Group) -> dict[str, str]:
        guard = self._situation.guard
        usual = self._usual(node_id)
        if guard is None or not usual:
            return {}
        found = {}
        for client_id, own in zip(group.client_ids, group.lengths.tolist(), strict=True):
            was_aside = client_id in self._situation.set_aside
            for name, length in zip(_NAMES, own, strict=True):
                if name == "signal" and group.compares_update:
                    continue
                if why := guard.too_long(
                    name, length, usual.get(name, 0.0), was_aside and name != "buffers"
                ):
                    found[client_id] = why
                    break
        return found

    def _fold(self, node_id: int, group: _Group) -> Array:
        """Add replies to the sums of their leaf, and give the sketches that are made on the way."""
        by_examples = self._situation.weighting == "examples"
        weights = [reply.weight if by_examples else 1.0 for reply in group.replies]
        guard = self._situation.guard
        before = self._before(node_id)
        shortening = self._shortening(node_id, group)
        now = []
        with self._lock:
            sums = self._sums_at(node_id)
            for row, (client_id, weight) in enumerate(zip(group.client_ids, weights, strict=True)):
                if before is not None and client_id in before.weights:
                    continue  # a stranger, or one who left and came back, has been counted
                sums.claim(client_id, weight)
                if sums.is_settled(weight, guard):
                    now.append(row)
                else:
                    sums.held_back[client_id] = group.whole(row, shortening)
        self._add_settled(node_id)
        with self._part(node_id) as part:
            return _added(part, group, now, weights, shortening)

    def _sums_at(self, node_id: int) -> Sums:
        """Give the sums of a leaf; to be called with the lock."""
        if node_id not in self._sums:
            self._sums[node_id] = Sums(self._new_part())
        return self._sums[node_id]

    def _add_settled(self, node_id: int) -> None:
        """Add what was held back, as far as it need not be any longer."""
        with self._lock:
            settled = self._sums[node_id].settled(self._situation.guard)
        if settled:
            with self._part(node_id) as part:
                for whole, weight in settled:
                    part.add_whole(whole, weight)

    def _shortening(self, node_id: int, group: _Group) -> NDArray[np.float64] | None:
        """Say how much each update, signal and buffers are to be shortened, shape (n, 3).

        None if none of them is.
        """
        guard, usual = self._situation.guard, self._usual(node_id)
        if guard is None or guard.clipped_length is None or not usual:
            return None
        factors = np.ones_like(group.lengths)
        for column, name in enumerate(_NAMES[:2]):
            for row, length in enumerate(group.lengths[:, column].tolist()):
                factors[row, column] = guard.shortening(length, usual.get(name, 0.0))
        return factors if (factors < 1).any() else None

    def _usual(self, node_id: int) -> Mapping[str, float]:
        """Give the lengths that were usual at a leaf in the round before, if they are known."""
        case = self._situation.cases.get(node_id)
        return {} if case is None else case.usual

    def _before(self, node_id: int) -> Sums | None:
        """Give what a leaf that stands still has of earlier rounds."""
        case = self._situation.cases.get(node_id)
        return None if case is None else case.sums

    def _new_part(self) -> Part:
        expected, projection = self._situation.expected, self._situation.projection
        assert projection is not None
        num_signal = expected.num_compared if expected.compares_signal else None
        return Part(expected.num_params, expected.num_buffers, num_signal, projection)

    @contextmanager
    def _part(self, node_id: int) -> Iterator[Part]:
        """Lend sums of a leaf to one thread."""
        with self._lock:
            idle = self._idle.setdefault(node_id, [])
            part = idle.pop() if idle else None
        if part is None:
            part = self._new_part()
            with self._lock:
                self._parts.setdefault(node_id, []).append(part)
        yield part
        with self._lock:
            self._idle[node_id].append(part)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Group:
    """Replies for one node, one row each, in the order in which they lie in memory.

    What is compared is the very array of the updates if it is these.
    """

    client_ids: Sequence[str]
    replies: Sequence[Reply]
    vectors: Array
    buffers: Array
    compared: Array
    lengths: NDArray[np.float64]  # shape (n, 3): of update, of what is compared, of buffers
    extent: Extent | None  # of the updates

    @classmethod
    def of(cls, client_ids: Sequence[str], replies: Mapping[str, Reply], keeps: bool) -> _Group:
        """Put the replies of some clients together, on the host if they are not kept."""
        in_order = sorted(client_ids, key=lambda client_id: replies[client_id].row)
        ordered = [replies[client_id] for client_id in in_order]
        sources = {id(reply.rows): reply.rows for reply in ordered}
        vectors, buffers = stacked(ordered, "vector"), stacked(ordered, "buffers")
        compared = vectors
        if not all(rows.compares_update for rows in sources.values()):
            compared = stacked(ordered, "compared")
        extent = None
        if not keeps:
            vectors, buffers = to_numpy(vectors), to_numpy(buffers)
            compared = vectors if compared is vectors else to_numpy(compared)
            extent = _known_extent(ordered) or extents(vectors)
        of_update = _measured(vectors, keeps) if extent is None else extent.lengths
        of_compared = of_update if compared is vectors else _measured(compared, keeps)
        return cls(
            client_ids=in_order,
            replies=ordered,
            vectors=vectors,
            buffers=buffers,
            compared=compared,
            lengths=np.stack([of_update, of_compared, _measured(buffers, keeps)], axis=1),
            extent=extent,
        )

    @property
    def compares_update(self) -> bool:
        """Whether it is the updates that are compared, not a signal."""
        return self.compared is self.vectors

    def whole(self, row: int, shortening: NDArray[np.float64] | None) -> Whole:
        """Give a copy of a reply, no longer than it may count for."""
        of_update, of_signal = (1.0, 1.0) if shortening is None else shortening[row, :2].tolist()
        signal = None if self.compares_update else self.compared[row] * np.float32(of_signal)
        return Whole(
            vector=self.vectors[row] * np.float32(of_update),
            buffers=self.buffers[row].copy(),
            signal=signal,
        )


def _known_extent(replies: Sequence[Reply]) -> Extent | None:
    """Give what was measured of updates when they were checked, if all of them were."""
    if all(reply.rows is replies[0].rows for reply in replies):
        extent = replies[0].rows.extent
        if extent is None or len(replies) == len(extent.lengths):
            return extent
    lengths, strongest = [], []
    for reply in replies:
        if reply.rows.extent is None:
            return None
        lengths.append(reply.rows.extent.lengths[reply.row])
        strongest.append(reply.rows.extent.strongest[reply.row])
    return Extent(np.array(lengths), np.array(strongest))


def _measured(array: Array, keeps: bool) -> NDArray[np.float64]:
    """Measure the length of every row."""
    if not array.shape[1]:
        return np.zeros(array.shape[0])
    if not keeps:
        return extents(to_numpy(array)).lengths
    if is_on_host(array):  # each by itself: no bit depends on who else is there
        host = to_numpy(array)
        return np.concatenate([norms(host[row : row + 1]) for row in range(len(host))])
    return to_numpy(norms(array))


def _added(
    part: Part,
    group: _Group,
    now: Sequence[int],
    weights: Sequence[float],
    shortening: NDArray[np.float64] | None,
) -> Array:
    """Add some rows of a group to sums, and give the sketches of all of its rows."""
    is_long: set[int] = set()
    if shortening is not None:
        is_long = set(np.flatnonzero((shortening < 1).any(axis=1)).tolist())
    quick = [row for row in now if row not in is_long]
    for row in sorted(is_long.intersection(now)):
        part.add_whole(group.whole(row, shortening), weights[row])
    if len(quick) == len(group.replies):
        return _added_rows(part, group, quick, weights)
    sketches = np.zeros((len(group.replies), part.projection.size), dtype=np.float32)
    others = sorted(set(range(len(group.replies))).difference(quick))
    sketches[others] = part.projection.of(group.compared[others])
    if quick:
        sketches[quick] = _added_rows(part, group, quick, weights)
    return sketches


def _added_rows(
    part: Part, group: _Group, rows: Sequence[int], weights: Sequence[float]
) -> NDArray[np.float32]:
    """Add rows that are neither shortened nor held back, and give their sketches."""
    assert group.extent is not None
    counted = [weights[row] for row in rows]
    lengths, strongest = group.extent
    if len(rows) < len(lengths):
        lengths, strongest = lengths[rows], strongest[rows]
    extent = Extent(lengths, strongest)
    of_compared = extent if group.compares_update else None
    sketches = part.compared.add(take_rows(group.compared, rows), counted, of_compared)
    assert sketches is not None
    if not group.compares_update:
        part.sums["vector"].add(take_rows(group.vectors, rows), counted, extent)
    if group.buffers.shape[1]:
        part.sums["buffers"].add(take_rows(group.buffers, rows), counted)
    return sketches


def _with_sketches(
    group: _Group, sketches: Array, projection: Projection, keeps: bool
) -> list[Reply]:
    """Put sketches in the place of what is compared, and leave the rest out if it is not kept."""
    replies = group.replies
    halves = [row for row, reply in enumerate(replies) if reply.has_halves]
    whole_halves = half_sketches = None
    if halves:
        of_halves = stacked([replies[row] for row in halves], "half_difference")
        half_sketches = _spread(projection.of(of_halves), halves, sketches)
        if keeps:
            whole_halves = _spread(of_halves, halves, sketches)
    nothing = np.zeros((len(replies), 0), np.float32)
    rows = Rows(
        vector=group.vectors if keeps else nothing,
        compared=sketches,
        buffers=group.buffers if keeps else nothing,
        half_difference=half_sketches,
        signal=group.compared if keeps and not group.compares_update else None,
        whole_half_difference=whole_halves,
        lengths=group.lengths,
    )
    return [
        Reply(
            rows=rows,
            row=row,
            weight=reply.weight,
            metrics=reply.metrics,
            has_halves=reply.has_halves,
        )
        for row, reply in enumerate(replies)
    ]


def added_rows(found: Added, lengths_of_buffers: NDArray[np.float64]) -> Rows:
    """Give what is left of updates that were added as they lay."""
    nothing = np.zeros((len(lengths_of_buffers), 0), np.float32)
    lengths = np.stack([found.lengths, found.lengths, lengths_of_buffers], axis=1)
    return Rows(vector=nothing, compared=found.sketches, buffers=nothing, lengths=lengths)


def _spread(some: Array, at_rows: Sequence[int], like: Array) -> Array:
    """Put rows where they belong among all; the others are zero."""
    if len(at_rows) == like.shape[0]:
        return some
    place = {row: number for number, row in enumerate(at_rows)}
    # A row of zeros for the others, at the end.

    xp = array_namespace(some)
    padded = xp.concat([some, xp.zeros_like(some[:1])])
    return take_rows(padded, [place.get(row, len(at_rows)) for row in range(like.shape[0])])


def _standing(tree: ParameterTree) -> dict[int, tuple[int, bool]]:
    """Say of every node which parameters it has, and whether it is a leaf."""
    return {node.id: (node.version, node.is_leaf) for node in tree}


def _shown_id(client_id: object) -> str:
    """Name a client in the record, also if it has not even an id."""
    return client_id if isinstance(client_id, str) else shortened(client_id)
