"""The replies of a round, taken in one by one or many at once, in any order.

What is wrong with a reply is found when it arrives. If clusters are found by sketches, these
are made then as well, and a server that keeps no updates adds each to exact sums of its cluster
and lets it go. The sums, and so all that follows, do not depend on who came first.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from fedbranch.acceptance import Expected, check_batch, check_update
from fedbranch.core.geometry import Array, norms, take_rows, to_numpy
from fedbranch.core.gram import is_on_host
from fedbranch.core.sketch import Projection
from fedbranch.core.summation import Extent, extents
from fedbranch.errors import InvalidUpdate
from fedbranch.examination import Case, Weighting
from fedbranch.guard import Guard
from fedbranch.messages import Reply, Rows, Update, UpdateBatch, one_line, shortened, stacked
from fedbranch.sums import Part, Sums, Whole
from fedbranch.tree import ParameterTree

__all__ = ["Intake", "Situation"]

_UNKNOWN = "unknown client: it never joined or has left"


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
        self._stood: dict[str, int] = {}  # client id -> node for which it replied
        self._nodes = _standing(situation.tree)
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
                    if client_id in self._replies:
                        raise InvalidUpdate("has already answered in this round")
                    # From here on it has answered, whatever another thread is told meanwhile.
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
                self._replies |= found
                self._aside |= too_long.keys()
            refused |= too_long
        with self._lock:
            for client_id, reason in refused.items():
                # Of several reasons always the same one, whichever came first.
                self.refused[client_id] = min(reason, self.refused.get(client_id, reason))
        return refused

    def _check_sender(self, client_id: str) -> None:
        if not isinstance(client_id, str):
            raise InvalidUpdate(f"unknown client: its id is a {type(client_id).__name__}")
        if client_id not in self._situation.tree:
            raise InvalidUpdate(_UNKNOWN)

    def _check_base(self, client_id: str, base: str | None, node_id: int) -> None:
        """Refuse a reply that does not answer what the client's position asks for now."""
        tree = self._situation.tree
        if base is None:
            base = self._situation.asked.get(client_id)
        if base is None:
            raise InvalidUpdate("no task was planned for this client in this round")
        node = tree[node_id]
        if not isinstance(base, str) or base != node.base:
            raise InvalidUpdate(
                f"computed at other parameters ({shortened(base)}) than the client's position has now "
                f"({node.base!r})"
            )
        case = self._situation.cases.get(node.id)
        if case is not None and client_id in case.replies:
            raise InvalidUpdate("has already answered at these parameters")

    # Sketches and sums

    def _sketched(
        self,
        replies: Mapping[str, Reply],
        at_node: Mapping[int, list[str]],
        projection: Projection,
    ) -> tuple[dict[str, Reply], dict[str, str]]:
        """Give replies with sketches in place of what is compared, and why some are too long."""
        tree, keeps = self._situation.tree, self._situation.keeps_updates
        sketched: dict[str, Reply] = {}
        too_long: dict[str, str] = {}
        for node_id, at_once in at_node.items():
            # As they lie in memory, so that nothing need be copied.
            client_ids = sorted(at_once, key=lambda client_id: replies[client_id].row)
            ordered = [replies[client_id] for client_id in client_ids]
            lengths = _lengths(ordered, keeps)
            if keeps or not tree[node_id].is_leaf:
                sketches = projection.of(stacked(ordered, "compared"))
            else:
                too_long |= self._too_long(node_id, client_ids, lengths)
                if too_long:
                    rows = [row for row, i in enumerate(client_ids) if i not in too_long]
                    client_ids = [client_ids[row] for row in rows]
                    ordered, lengths = [ordered[row] for row in rows], lengths[rows]
                    if not rows:
                        continue
                sketches = self._fold(node_id, client_ids, ordered, lengths)
            sketched |= zip(
                client_ids,
                _with_sketches(ordered, sketches, lengths, projection, keeps),
                strict=True,
            )
        return sketched, too_long

    def _too_long(
        self, node_id: int, client_ids: Sequence[str], lengths: NDArray[np.float64]
    ) -> dict[str, str]:
        guard = self._situation.guard
        case = self._situation.cases.get(node_id)
        if guard is None or case is None or not case.usual:
            return {}
        found = {}
        for client_id, own in zip(client_ids, lengths.tolist(), strict=True):
            for name, length in zip(("update", "signal", "buffers"), own, strict=True):
                if name == "signal" and not self._situation.expected.compares_signal:
                    continue
                was_aside = client_id in self._situation.set_aside
                usual = case.usual.get(name, 0.0)
                if why := guard.too_long(name, length, usual, was_aside and name != "buffers"):
                    found[client_id] = why
                    break
        return found

    def _fold(
        self,
        node_id: int,
        client_ids: Sequence[str],
        replies: Sequence[Reply],
        lengths: NDArray[np.float64],
    ) -> Array:
        """Add replies to the sums of their leaf, and give the sketches that are made on the way."""
        projection = self._situation.projection
        assert projection is not None
        weights = [
            reply.weight if self._situation.weighting == "examples" else 1.0 for reply in replies
        ]
        vectors, buffers = (to_numpy(stacked(replies, name)) for name in ("vector", "buffers"))
        signals = None
        if self._situation.expected.compares_signal:
            signals = to_numpy(stacked(replies, "compared"))
        guard = self._situation.guard
        before = self._before(node_id)
        now, settled = [], []
        with self._lock:
            sums = self._sums.get(node_id)
            if sums is None:
                sums = self._sums[node_id] = Sums(self._new_part())
            for row, (client_id, weight) in enumerate(zip(client_ids, weights, strict=True)):
                if before is not None and client_id in before.weights:
                    continue  # a stranger, or one who left and came back, has been counted
                sums.claim(client_id, weight)
                if sums.is_settled(weight, guard):
                    now.append(row)
                else:
                    sums.held_back[client_id] = self._whole(
                        row, lengths[row], node_id, vectors, buffers, signals
                    )
            settled = sums.settled(guard)
        with self._part(node_id) as part:
            for whole, weight in settled:
                part.add_whole(whole, weight)
            return self._add_rows(
                part, now, weights, lengths, node_id, replies, vectors, buffers, signals
            )

    def _add_rows(
        self,
        part: Part,
        now: list[int],
        weights: Sequence[float],
        lengths: NDArray[np.float64],
        node_id: int,
        replies: Sequence[Reply],
        vectors: NDArray[np.float32],
        buffers: NDArray[np.float32],
        signals: NDArray[np.float32] | None,
    ) -> Array:
        projection = part.projection
        compared = vectors if signals is None else signals
        is_long = [
            row
            for row in (now if self._knows_usual(node_id) else ())
            if self._shortening(
                "signal" if signals is not None else "update", lengths[row, 1], node_id
            )
            < 1
            or self._shortening("update", lengths[row, 0], node_id) < 1
        ]
        quick = [row for row in now if row not in set(is_long)] if is_long else now
        sketches = np.zeros((len(replies), projection.size), dtype=np.float32)
        others = sorted(set(range(len(replies))) - set(quick))
        if others:
            sketches[others] = projection.of(compared[others])
        for row in is_long:
            whole = self._whole(row, lengths[row], node_id, vectors, buffers, signals)
            part.add_whole(whole, weights[row])
        if quick:
            counted = [weights[row] for row in quick]
            extent = _extent_of(replies, quick)
            made = part.compared.add(
                take_rows(compared, quick), counted, extent if signals is None else None
            )
            assert made is not None
            sketches[quick] = made
            if signals is not None:
                part.sums["vector"].add(take_rows(vectors, quick), counted, extent)
            if buffers.shape[1]:
                part.sums["buffers"].add(take_rows(buffers, quick), counted)
        return sketches

    def _whole(
        self,
        row: int,
        lengths: NDArray[np.float64],
        node_id: int,
        vectors: NDArray[np.float32],
        buffers: NDArray[np.float32],
        signals: NDArray[np.float32] | None,
    ) -> Whole:
        """Give a copy of a reply, no longer than it may count for."""
        signal = None
        if signals is not None:
            signal = signals[row] * np.float32(self._shortening("signal", lengths[1], node_id))
        return Whole(
            vector=vectors[row] * np.float32(self._shortening("update", lengths[0], node_id)),
            buffers=buffers[row].copy(),
            signal=signal,
        )

    def _shortening(self, name: str, length: float, node_id: int) -> float:
        guard, case = self._situation.guard, self._situation.cases.get(node_id)
        if guard is None or case is None:
            return 1.0
        return guard.shortening(length, case.usual.get(name, 0.0))

    def _knows_usual(self, node_id: int) -> bool:
        case = self._situation.cases.get(node_id)
        return case is not None and bool(case.usual)

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


def _lengths(replies: Sequence[Reply], keeps: bool) -> NDArray[np.float64]:
    """Measure updates, what is compared of them, and buffers: shape (n, 3)."""

    def measured(array: Array) -> NDArray[np.float64]:
        if not array.shape[1]:
            return np.zeros(len(replies))
        if keeps and is_on_host(array):  # each by itself: no bit depends on who else is there
            host = to_numpy(array)
            return np.concatenate([norms(host[row : row + 1]) for row in range(len(host))])
        if keeps:
            return to_numpy(norms(array))
        return extents(to_numpy(array)).lengths

    whole = stacked(replies, "vector")
    extent = None if keeps else _extent_of(replies, range(len(replies)))
    of_update = measured(whole) if extent is None else extent.lengths
    of_compared = of_update
    if not all(reply.rows.compares_update for reply in replies):
        of_compared = measured(stacked(replies, "compared"))
    return np.stack([of_update, of_compared, measured(stacked(replies, "buffers"))], axis=1)


def _extent_of(replies: Sequence[Reply], rows: Iterable[int]) -> Extent | None:
    """Give what was measured of updates when they were checked, if all of them were."""
    chosen = [replies[row] for row in rows]
    if chosen and all(reply.rows is chosen[0].rows for reply in chosen):
        extent = chosen[0].rows.extent
        if extent is None:
            return None
        places = [reply.row for reply in chosen]
        return Extent(extent.lengths[places], extent.strongest[places])
    found = [(reply.rows.extent, reply.row) for reply in chosen]
    if any(extent is None for extent, _ in found):
        return None
    return Extent(
        np.array([extent.lengths[row] for extent, row in found if extent is not None]),
        np.array([extent.strongest[row] for extent, row in found if extent is not None]),
    )


def _with_sketches(
    replies: Sequence[Reply],
    sketches: Array,
    lengths: NDArray[np.float64],
    projection: Projection,
    keeps: bool,
) -> list[Reply]:
    """Put sketches in the place of what is compared, and leave the rest out if it is not kept."""
    halves = [row for row, reply in enumerate(replies) if reply.has_halves]
    whole_halves = half_sketches = None
    if halves:
        of_halves = projection.of(stacked([replies[row] for row in halves], "half_difference"))
        half_sketches = _spread(of_halves, halves, sketches)
        if keeps:
            whole_halves = _spread(
                stacked([replies[row] for row in halves], "half_difference"), halves, sketches
            )
    buffers = stacked(replies, "buffers")
    vectors = stacked(replies, "vector")
    signal = None
    if keeps and not all(reply.rows.compares_update for reply in replies):
        signal = stacked(replies, "compared")
    rows = Rows(
        vector=vectors if keeps else np.zeros((len(replies), 0), np.float32),
        compared=sketches,
        buffers=buffers if keeps else np.zeros((len(replies), 0), np.float32),
        half_difference=half_sketches,
        signal=signal,
        whole_half_difference=whole_halves,
        lengths=lengths,
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
