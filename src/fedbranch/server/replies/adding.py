"""Updates of a round that go into the sums of their clusters as they come, and are not kept.

Any number of threads add: each has sums of its own, which are exact, so that neither their number
nor who came first changes a bit.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.exact_sum.block_norms import Extent
from fedbranch.core.exact_sum.raw_updates import Differences
from fedbranch.core.exact_sum.total import Added, can_be_added_plain, can_be_added_whole
from fedbranch.core.geometry import take_rows
from fedbranch.core.projection import Projection
from fedbranch.server.guard import Guard
from fedbranch.server.leaf import Case
from fedbranch.server.replies.reply import LENGTHS_OF
from fedbranch.server.replies.stack import Stack
from fedbranch.server.replies.summed import Part, Sums, Whole
from fedbranch.types import Array, Weighting

__all__ = ["Adding"]


class Adding:
    """The sums of all clusters, while replies come in.

    Parameters
    ----------
    num_params, num_buffers, num_signal
        How long the vectors are; None if it is not signals that are compared.
    projection
        Makes sketches of what is compared.
    cases
        Leaf -> what is known of it from the rounds before.
    guard
        Limits what an update counts for.
    weighting
        By what they count.
    """

    def __init__(
        self,
        *,
        num_params: int,
        num_buffers: int,
        num_signal: int | None,
        projection: Projection,
        cases: Mapping[int, Case],
        guard: Guard | None,
        weighting: Weighting,
    ) -> None:
        self._lengths = (num_params, num_buffers, num_signal)
        self._projection = projection
        self._cases = cases
        self._guard = guard
        self._weighting = weighting
        self._lock = threading.Lock()
        self._sums: dict[int, Sums] = {}  # leaf -> weights, and updates held back
        self._parts: dict[int, list[Part]] = {}  # leaf -> sums, of at most one thread at a time
        self._idle: dict[int, list[Part]] = {}

    def sums(self) -> dict[int, Sums]:
        """Give the sums of every leaf that got updates, and what held clusters had before."""
        together = {}
        for node_id, sums in self._sums.items():
            before = self._before(node_id)
            there = [sums] if before is None else [before, sums]
            together[node_id] = Sums.merged(there, self._parts.get(node_id, []))
        return together

    def too_long(self, node_id: int, stack: Stack, were_aside: Sequence[bool]) -> dict[str, str]:
        """Say who is too long, by what was usual in the round before: client id -> why."""
        usual = self._usual(node_id)
        if self._guard is None or not usual:
            return {}
        found = {}
        for client_id, own, was_aside in zip(
            stack.client_ids, stack.lengths.tolist(), were_aside, strict=True
        ):
            for name, length in zip(LENGTHS_OF, own, strict=True):
                if name == "signal" and stack.compares_update:
                    continue
                if why := self._guard.too_long(
                    name, length, usual.get(name, 0.0), was_aside and name != "buffers"
                ):
                    found[client_id] = why
                    break
        return found

    def add(self, node_id: int, stack: Stack) -> Array:
        """Add replies to the sums of their leaf, or hold them back.

        Returns
        -------
        Array
            The sketches that are made on the way, shape (num_replies, size).
        """
        weights = self._counted([reply.weight for reply in stack.replies])
        before = self._before(node_id)
        shortening = self._shortening(node_id, stack)
        now = []
        with self._lock:
            sums = self._sums_at(node_id)
            for row, (client_id, weight) in enumerate(zip(stack.client_ids, weights, strict=True)):
                if before is not None and client_id in before.weights:
                    continue  # a stranger, or one who left and came back, has been counted
                sums.claim(client_id, weight)
                if sums.is_settled(weight, self._guard):
                    now.append(row)
                else:
                    sums.held_back[client_id] = _whole(stack, row, shortening)
        self._add_settled(node_id)
        with self._part(node_id) as part:
            return _added(part, stack, now, weights, shortening)

    def add_plain(
        self,
        node_id: int,
        client_ids: Sequence[str],
        updates: Differences,
        buffers: NDArray[np.float32],
        lengths_of_buffers: NDArray[np.float64],
        weights: Mapping[int, float],
    ) -> Added:
        """Add updates as they lie, of those replies about which nothing is unusual.

        Parameters
        ----------
        node_id
            Their leaf.
        client_ids, updates, buffers, lengths_of_buffers
            A row for each reply.
        weights
            Row -> what it claims to count for, of those that may be added.

        Returns
        -------
        Added
            It is as if :meth:`add` had added these, to the last bit, and nobody had brought the
            others yet.
        """
        usual, before = self._usual(node_id), self._before(node_id)
        longest = longest_buffers = math.inf
        if self._guard is not None:
            longest = self._guard.longest_untouched(usual.get("update", 0.0))
            longest_buffers = self._guard.longest_untouched(usual.get("buffers", 0.0))
        counted = np.zeros(len(client_ids))
        counted[list(weights)] = self._counted(list(weights.values()))
        counted[~(can_be_added_whole(counted) & (lengths_of_buffers <= longest_buffers))] = 0
        for row in np.flatnonzero(counted).tolist():
            if before is not None and client_ids[row] in before.weights:
                counted[row] = 0
        claimed = self._claimed_together(node_id, client_ids, updates, counted, longest)
        with self._part(node_id) as part:
            found = part.compared.add_plain(updates, counted, longest)
            rows = np.flatnonzero(found.is_added).tolist()
            if rows and buffers.shape[1]:
                part.sums["buffers"].add(take_rows(buffers, rows), counted[rows])
        if rows:
            with self._lock:
                sums = self._sums_at(node_id)
                for row in rows:
                    if row not in claimed:
                        sums.claim(client_ids[row], float(counted[row]))
            self._add_settled(node_id)
        assert claimed <= set(rows), "an update that was to be added was not"
        return found

    def _claimed_together(
        self,
        node_id: int,
        client_ids: Sequence[str],
        updates: Differences,
        counted: NDArray[np.float64],
        longest: float,
    ) -> set[int]:
        """Claim the rows that together count for what they claim, if one alone might not.

        So it is at the beginning of a round. They are measured before, since who claims must be
        added. The others then count for nothing here.
        """
        rows = np.flatnonzero(counted).tolist()
        with self._lock:
            sums = self._sums.get(node_id)
            if not self._caps or (
                sums is not None and sums.are_settled(counted[rows].tolist(), self._guard)
            ):
                return set()
        is_sure = can_be_added_plain(updates, longest)
        with self._lock:
            sums = self._sums.get(node_id) or Sums(self._new_part())
            settled = sums.settle(
                {client_ids[row]: float(counted[row]) for row in rows if is_sure[row]}, self._guard
            )
            if settled:  # a leaf of which nothing can be used has no sums
                self._sums[node_id] = sums
        claimed = {row for row in rows if client_ids[row] in settled}
        counted[sorted(set(rows) - claimed)] = 0
        return claimed

    @property
    def _caps(self) -> bool:
        """Whether an update may count for less than it claims."""
        return self._guard is not None and self._guard.max_share is not None

    def _counted(self, weights: Sequence[float]) -> list[float]:
        return list(weights) if self._weighting == "examples" else [1.0] * len(weights)

    def _sums_at(self, node_id: int) -> Sums:
        """Give the sums of a leaf; to be called with the lock."""
        if node_id not in self._sums:
            self._sums[node_id] = Sums(self._new_part())
        return self._sums[node_id]

    def _add_settled(self, node_id: int) -> None:
        """Add what was held back, as far as it need not be any longer."""
        with self._lock:
            settled = self._sums[node_id].settled(self._guard)
        if settled:
            with self._part(node_id) as part:
                for whole, weight in settled:
                    part.add_whole(whole, weight)

    def _shortening(self, node_id: int, stack: Stack) -> NDArray[np.float64] | None:
        """Say how much each update, signal and buffers are to be shortened, shape (n, 3).

        None if none of them is.
        """
        guard, usual = self._guard, self._usual(node_id)
        if guard is None or guard.clipped_length is None or not usual:
            return None
        factors = np.ones_like(stack.lengths)
        for column, name in enumerate(LENGTHS_OF[:2]):
            for row, length in enumerate(stack.lengths[:, column].tolist()):
                factors[row, column] = guard.shortening(length, usual.get(name, 0.0))
        return factors if (factors < 1).any() else None

    def _usual(self, node_id: int) -> Mapping[str, float]:
        """Give the lengths that were usual at a leaf in the round before, if they are known."""
        case = self._cases.get(node_id)
        return {} if case is None else case.usual

    def _before(self, node_id: int) -> Sums | None:
        """Give what a leaf that stands still has of earlier rounds."""
        case = self._cases.get(node_id)
        return None if case is None else case.sums

    def _new_part(self) -> Part:
        return Part(*self._lengths, self._projection)

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


def _whole(stack: Stack, row: int, shortening: NDArray[np.float64] | None) -> Whole:
    """Give a copy of a reply, no longer than it may count for."""
    of_update, of_signal = (1.0, 1.0) if shortening is None else shortening[row, :2].tolist()
    signal = None if stack.compares_update else stack.compared[row] * np.float32(of_signal)
    return Whole(
        vector=stack.vectors[row] * np.float32(of_update),
        buffers=stack.buffers[row].copy(),
        signal=signal,
    )


def _added(
    part: Part,
    stack: Stack,
    now: Sequence[int],
    weights: Sequence[float],
    shortening: NDArray[np.float64] | None,
) -> Array:
    """Add some rows of a stack to sums, and give the sketches of all of its rows."""
    is_long: set[int] = set()
    if shortening is not None:
        is_long = set(np.flatnonzero((shortening < 1).any(axis=1)).tolist())
    quick = [row for row in now if row not in is_long]
    for row in sorted(is_long.intersection(now)):
        part.add_whole(_whole(stack, row, shortening), weights[row])
    if len(quick) == len(stack.replies):
        return _added_rows(part, stack, quick, weights)
    sketches = np.zeros((len(stack.replies), part.projection.size), dtype=np.float32)
    others = sorted(set(range(len(stack.replies))).difference(quick))
    sketches[others] = part.projection.of(stack.compared[others])
    if quick:
        sketches[quick] = _added_rows(part, stack, quick, weights)
    return sketches


def _added_rows(
    part: Part, stack: Stack, rows: Sequence[int], weights: Sequence[float]
) -> NDArray[np.float32]:
    """Add rows that are neither shortened nor held back, and give their sketches."""
    assert stack.extent is not None
    counted = [weights[row] for row in rows]
    lengths, strongest = stack.extent
    if len(rows) < len(lengths):
        lengths, strongest = lengths[rows], strongest[rows]
    extent = Extent(lengths, strongest)
    of_compared = extent if stack.compares_update else None
    sketches = part.compared.add(take_rows(stack.compared, rows), counted, of_compared)
    assert sketches is not None
    if not stack.compares_update:
        part.sums["vector"].add(take_rows(stack.vectors, rows), counted, extent)
    if stack.buffers.shape[1]:
        part.sums["buffers"].add(take_rows(stack.buffers, rows), counted)
    return sketches
