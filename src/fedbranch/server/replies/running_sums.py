"""The sums of all leaves while the replies of a round come in, by any number of threads.

Each thread adds to sums of its own. These are exact, so neither their number nor the order of the
replies changes a bit.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.exact_sum.block_norms import Extent
from fedbranch.core.exact_sum.raw_updates import Differences
from fedbranch.core.exact_sum.total import Added, can_be_added_whole
from fedbranch.core.geometry import take_rows
from fedbranch.server.options import ServerOptions
from fedbranch.server.replies.held import HeldReplies
from fedbranch.server.replies.reply import LENGTHS_OF, Reply, ReplyRows
from fedbranch.server.replies.stack import Stack
from fedbranch.server.replies.summed import Heaviest, Held, Shape, Summed, Sums, WholeUpdate
from fedbranch.types import Array

__all__ = ["AtLeaf", "RunningSums"]


@dataclass(frozen=True, kw_only=True)
class AtLeaf:
    """What is known of a leaf when a round begins.

    Attributes
    ----------
    usual
        Median lengths of the replies when the leaf last trained, by :data:`LENGTHS_OF`; empty if
        they are not known.
    held
        What it has of earlier rounds at its present parameters.
    """

    usual: Mapping[str, float] = field(default_factory=dict)
    held: Summed | None = None


@dataclass
class _Tally:
    """What came in for one leaf."""

    weights: dict[str, float]
    heaviest: Heaviest
    parts: list[Sums] = field(default_factory=list)  # each of at most one thread at a time
    idle: list[Sums] = field(default_factory=list)


class RunningSums:
    """The sums of all leaves, while replies come in.

    Parameters
    ----------
    shape
        Of the vectors that are added up.
    options
        Say what an update counts for.
    leaves
        Leaf -> what is known of it; leaves of which nothing is known may be left out.
    """

    def __init__(self, shape: Shape, options: ServerOptions, leaves: Mapping[int, AtLeaf]) -> None:
        self._shape = shape
        self._options = options
        self._leaves = leaves
        self._lock = threading.Lock()
        self._tallies: dict[int, _Tally] = {}

    def store(
        self, leaf_id: int, before: Summed | None, replies: Mapping[str, Reply]
    ) -> Summed | None:
        """Return what a leaf has now; None if it has nothing.

        Parameters
        ----------
        leaf_id
            The leaf.
        before
            What it has of earlier rounds, without the replies of clients that are gone since.
        replies
            Client id -> reply, of this round.
        """
        tally = self._tallies.get(leaf_id)
        if before is None and (tally is None or not tally.weights):
            return None
        if before is None:
            before = Summed(replies=HeldReplies(), sums=Sums(self._shape), weights={}, heaviest=[])
        sums, heaviest, weights = before.sums, list(before.heaviest), dict(before.weights)
        if tally is not None:
            sums = Sums.of_all(self._shape, [before.sums, *tally.parts])
            weights |= tally.weights
            together = self._no_heaviest()
            for held in (*before.heaviest, *tally.heaviest):
                light = together.hold(held)
                if light is not None:
                    sums.add(light.whole, light.weight)
            heaviest = list(together)
        return Summed(
            replies=before.replies.plus(replies), sums=sums, weights=weights, heaviest=heaviest
        )

    def too_long(self, leaf_id: int, stack: Stack, were_aside: Sequence[bool]) -> dict[str, str]:
        """Find the replies that are too long, by the lengths of the round before: client -> why."""
        usual, guard = self._at(leaf_id).usual, self._options.guard
        if guard is None or not usual:
            return {}
        found = {}
        for client_id, own, was_aside in zip(
            stack.client_ids, stack.lengths.tolist(), were_aside, strict=True
        ):
            for name, length in zip(LENGTHS_OF, own, strict=True):
                if name == "signal" and stack.signals is None:
                    continue
                if why := guard.too_long(
                    name, length, usual.get(name, 0.0), was_aside and name != "buffers"
                ):
                    found[client_id] = why
                    break
        return found

    def add(self, leaf_id: int, stack: Stack) -> dict[str, Reply]:
        """Add replies to the sums of their leaf, but hold the heaviest back.

        Returns
        -------
        dict
            Client id -> reply, with a sketch and lengths only.
        """
        weights = self._counted([reply.weight for reply in stack.replies])
        before = self._at(leaf_id).held
        shortening = self._shortening(leaf_id, stack)
        now: list[int] = []
        light: list[Held] = []
        with self._lock:
            tally = self._tally(leaf_id)
            for row, (client_id, weight) in enumerate(zip(stack.client_ids, weights, strict=True)):
                if before is not None and client_id in before.weights:
                    continue  # it was counted, and set aside or gone since
                tally.weights[client_id] = weight
                if not tally.heaviest.takes(client_id, weight):
                    now.append(row)
                    continue
                whole = _whole(stack, row, shortening)
                lighter = tally.heaviest.hold(Held(client_id=client_id, weight=weight, whole=whole))
                if lighter is not None:
                    light.append(lighter)
        with self._sums(leaf_id) as sums:
            for held in light:
                sums.add(held.whole, held.weight)
            sketches = _added(sums, stack, now, weights, shortening)
        rows = ReplyRows(
            sketch=sketches,
            half_sketch=stack.half_sketches(self._shape.projection, sketches),
            lengths=stack.lengths,
        )
        return stack.with_columns(rows)

    def add_raw(
        self,
        leaf_id: int,
        client_ids: Sequence[str],
        updates: Differences,
        buffers: NDArray[np.float32],
        lengths_of_buffers: NDArray[np.float64],
        weights: Mapping[int, float],
    ) -> Added:
        """Add updates straight from their messages, of those replies that have nothing unusual.

        Parameters
        ----------
        leaf_id
            Their leaf.
        client_ids, updates, buffers, lengths_of_buffers
            A row for each reply.
        weights
            Row -> what it claims to count for, of those that may be added.

        Returns
        -------
        Added
            Which rows were added; not those that would be held back. The result is, to the last
            bit, as if :meth:`add` had added these, and the others had not come yet.
        """
        at_leaf = self._at(leaf_id)
        longest = longest_buffers = math.inf
        if self._options.guard is not None:
            longest = self._options.guard.longest_untouched(at_leaf.usual.get("update", 0.0))
            longest_buffers = self._options.guard.longest_untouched(
                at_leaf.usual.get("buffers", 0.0)
            )
        counted = np.zeros(len(client_ids))
        counted[list(weights)] = self._counted(list(weights.values()))
        counted[~(can_be_added_whole(counted) & (lengths_of_buffers <= longest_buffers))] = 0
        for row in np.flatnonzero(counted).tolist():
            if at_leaf.held is not None and client_ids[row] in at_leaf.held.weights:
                counted[row] = 0
        with self._lock:
            heaviest = self._tally(leaf_id).heaviest
            for row in np.flatnonzero(counted).tolist():
                # What the heaviest ones do not take now they will never take: they only get heavier.
                if heaviest.takes(client_ids[row], float(counted[row])):
                    counted[row] = 0
        with self._sums(leaf_id) as sums:
            found = sums.compared.add_plain(updates, counted, longest)
            rows = np.flatnonzero(found.is_added).tolist()
            if rows and buffers.shape[1]:
                sums.by_name["buffers"].add(take_rows(buffers, rows), counted[rows])
        if rows:
            with self._lock:
                tally = self._tally(leaf_id)
                tally.weights |= {client_ids[row]: float(counted[row]) for row in rows}
        return found

    def likely_held(
        self, leaf_id: int, client_ids: Sequence[str], weights: Mapping[int, float]
    ) -> list[int]:
        """Return the rows that would be held back if all of them could be used.

        Parameters
        ----------
        leaf_id
            Their leaf.
        client_ids
            A row for each reply.
        weights
            Row -> what it claims to count for.
        """
        counted = dict(zip(weights, self._counted(list(weights.values())), strict=True))
        with self._lock:
            heaviest = self._tally(leaf_id).heaviest
            held = list(heaviest)
            if not any(heaviest.takes(client_ids[row], own) for row, own in counted.items()):
                return []  # nearly always
        nothing = np.zeros(0, np.float32)
        whole = WholeUpdate(update=nothing, buffers=nothing)
        together = self._no_heaviest()
        for one in held:
            together.hold(one)
        row_of = {client_ids[row]: row for row in counted}
        for client_id, row in row_of.items():
            together.hold(Held(client_id=client_id, weight=counted[row], whole=whole))
        return sorted(row_of[one.client_id] for one in together if one.client_id in row_of)

    def _no_heaviest(self) -> Heaviest:
        guard = self._options.guard
        return Heaviest(0 if guard is None else guard.most_capped)

    def _counted(self, weights: Sequence[float]) -> list[float]:
        if self._options.weighting == "examples":
            return list(weights)
        return [1.0] * len(weights)

    def _at(self, leaf_id: int) -> AtLeaf:
        return self._leaves.get(leaf_id, AtLeaf())

    def _tally(self, leaf_id: int) -> _Tally:
        """Return what came in for a leaf; to be called with the lock."""
        tally = self._tallies.get(leaf_id)
        if tally is None:
            tally = self._tallies[leaf_id] = _Tally({}, self._no_heaviest())
        return tally

    def _shortening(self, leaf_id: int, stack: Stack) -> NDArray[np.float64] | None:
        """Return what each update, signal and buffers are multiplied by, shape (n, 3).

        None if none of them is shortened.
        """
        guard, usual = self._options.guard, self._at(leaf_id).usual
        if guard is None or guard.clipped_length is None or not usual:
            return None
        factors = np.ones_like(stack.lengths)
        for column, name in enumerate(LENGTHS_OF[:2]):
            for row, length in enumerate(stack.lengths[:, column].tolist()):
                factors[row, column] = guard.shortening(length, usual.get(name, 0.0))
        return factors if (factors < 1).any() else None

    @contextmanager
    def _sums(self, leaf_id: int) -> Iterator[Sums]:
        """Lend sums of a leaf to one thread."""
        with self._lock:
            tally = self._tally(leaf_id)
            sums = tally.idle.pop() if tally.idle else None
        if sums is None:
            sums = Sums(self._shape)
            with self._lock:
                tally.parts.append(sums)
        yield sums
        with self._lock:
            tally.idle.append(sums)


def _whole(stack: Stack, row: int, shortening: NDArray[np.float64] | None) -> WholeUpdate:
    """Copy a reply, no longer than it may count for."""
    of_update, of_signal = (1.0, 1.0) if shortening is None else shortening[row, :2].tolist()
    signal = None if stack.signals is None else stack.signals[row] * np.float32(of_signal)
    return WholeUpdate(
        update=stack.updates[row] * np.float32(of_update),
        buffers=stack.buffers[row].copy(),
        signal=signal,
    )


def _added(
    sums: Sums,
    stack: Stack,
    now: Sequence[int],
    weights: Sequence[float],
    shortening: NDArray[np.float64] | None,
) -> Array:
    """Add some rows of a stack to sums, and return the sketches of all of its rows."""
    is_long: set[int] = set()
    if shortening is not None:
        is_long = set(np.flatnonzero((shortening < 1).any(axis=1)).tolist())
    quick = [row for row in now if row not in is_long]
    for row in sorted(is_long.intersection(now)):
        sums.add(_whole(stack, row, shortening), weights[row])
    if len(quick) == len(stack.replies):
        return _added_rows(sums, stack, quick, weights)
    projection = sums.shape.projection
    sketches = np.zeros((len(stack.replies), projection.size), dtype=np.float32)
    others = sorted(set(range(len(stack.replies))).difference(quick))
    sketches[others] = projection.of(stack.compared[others])
    if quick:
        sketches[quick] = _added_rows(sums, stack, quick, weights)
    return sketches


def _added_rows(
    sums: Sums, stack: Stack, rows: Sequence[int], weights: Sequence[float]
) -> NDArray[np.float32]:
    """Add rows that are neither shortened nor held back, and return their sketches."""
    assert stack.norms is not None
    counted = [weights[row] for row in rows]
    lengths, strongest = stack.norms
    if len(rows) < len(lengths):
        lengths, strongest = lengths[rows], strongest[rows]
    measured = Extent(lengths, strongest)
    of_compared = measured if stack.signals is None else None
    sketches = sums.compared.add(take_rows(stack.compared, rows), counted, of_compared)
    assert sketches is not None
    if stack.signals is not None:
        sums.by_name["vector"].add(take_rows(stack.updates, rows), counted, measured)
    if stack.buffers.shape[1]:
        sums.by_name["buffers"].add(take_rows(stack.buffers, rows), counted)
    return sketches
