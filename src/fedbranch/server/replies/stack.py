"""The replies for one node on top of each other, and sketches of what they are compared by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from fedbranch.core.exact_sum.block_norms import Extent, extents
from fedbranch.core.geometry import norms, take_rows, to_numpy
from fedbranch.core.products import is_on_host
from fedbranch.core.projection import Projection
from fedbranch.server.replies.reply import Reply, ReplyRows, stacked
from fedbranch.types import Array

__all__ = [
    "Stack",
    "block_lengths",
    "kept_with_sketches",
    "only_sketches",
    "stack_for_sums",
    "stack_to_keep",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Stack:
    """Replies for one node, one row each, in their order in memory.

    Attributes
    ----------
    client_ids, replies
        One for each row.
    updates, buffers, signals
        One row for each; ``signals`` is None if updates are compared.
    lengths
        Shape (n, 3): of the update, of what is compared, of the buffers.
    norms
        Of the updates; None where nothing is added up.
    """

    client_ids: Sequence[str]
    replies: Sequence[Reply]
    updates: Array
    buffers: Array
    signals: Array | None
    lengths: NDArray[np.float64]
    norms: Extent | None = None

    @property
    def compared(self) -> Array:
        """The signals, or else the updates."""
        return self.updates if self.signals is None else self.signals

    @property
    def halved_rows(self) -> list[int]:
        """The rows of replies that have half differences."""
        return [row for row, reply in enumerate(self.replies) if reply.has_half]

    def with_columns(self, rows: ReplyRows) -> dict[str, Reply]:
        """Return the replies with other columns: client id -> reply."""
        return {
            client_id: Reply(
                rows=rows,
                row=row,
                weight=reply.weight,
                metrics=reply.metrics,
                has_half=reply.has_half,
            )
            for row, (client_id, reply) in enumerate(
                zip(self.client_ids, self.replies, strict=True)
            )
        }

    def half_sketches(self, projection: Projection, sketches: Array) -> Array | None:
        """Return sketches of the half differences, a row for each reply; None if there are none."""
        halved = self.halved_rows
        if not halved:
            return None
        return _spread(projection.of(self._halves(halved)), halved, sketches)

    def halves(self, sketches: Array) -> Array | None:
        """Return the half differences in full, a row for each reply; None if there are none."""
        halved = self.halved_rows
        return _spread(self._halves(halved), halved, sketches) if halved else None

    def _halves(self, rows: Sequence[int]) -> Array:
        return stacked([self.replies[row] for row in rows], "half")


def stack_to_keep(client_ids: Sequence[str], replies: Mapping[str, Reply]) -> Stack:
    """Put the replies of some clients on top of each other, on their device."""
    in_order = _in_memory_order(client_ids, replies)
    ordered = [replies[client_id] for client_id in in_order]
    updates, buffers = stacked(ordered, "update"), stacked(ordered, "buffers")
    signals = stacked(ordered, "signal") if ordered[0].rows.signal is not None else None
    of_updates = _lengths(updates)
    of_compared = of_updates if signals is None else _lengths(signals)
    return Stack(
        client_ids=in_order,
        replies=ordered,
        updates=updates,
        buffers=buffers,
        signals=signals,
        lengths=np.stack([of_updates, of_compared, _lengths(buffers)], axis=1),
    )


def stack_for_sums(client_ids: Sequence[str], replies: Mapping[str, Reply]) -> Stack:
    """Put the replies of some clients on top of each other, on the host."""
    in_order = _in_memory_order(client_ids, replies)
    ordered = [replies[client_id] for client_id in in_order]
    updates = to_numpy(stacked(ordered, "update"))
    buffers = to_numpy(stacked(ordered, "buffers"))
    signals = None
    if ordered[0].rows.signal is not None:
        signals = to_numpy(stacked(ordered, "signal"))
    measured = _measured_before(ordered) or extents(updates)
    of_compared = measured.lengths if signals is None else block_lengths(signals)
    return Stack(
        client_ids=in_order,
        replies=ordered,
        updates=updates,
        buffers=buffers,
        signals=signals,
        lengths=np.stack([measured.lengths, of_compared, block_lengths(buffers)], axis=1),
        norms=measured,
    )


def kept_with_sketches(stack: Stack, projection: Projection) -> dict[str, Reply]:
    """Return the replies with sketches beside what is compared: client id -> reply."""
    sketches = projection.of(stack.compared)
    rows = ReplyRows(
        update=stack.updates,
        buffers=stack.buffers,
        signal=stack.signals,
        sketch=sketches,
        half=stack.halves(sketches),
        half_sketch=stack.half_sketches(projection, sketches),
        lengths=stack.lengths,
    )
    return stack.with_columns(rows)


def only_sketches(stack: Stack, projection: Projection) -> dict[str, Reply]:
    """Return the replies with sketches and lengths, and nothing else: client id -> reply."""
    sketches = projection.of(stack.compared)
    rows = ReplyRows(
        sketch=sketches,
        half_sketch=stack.half_sketches(projection, sketches),
        lengths=stack.lengths,
    )
    return stack.with_columns(rows)


def block_lengths(array: NDArray[np.float32]) -> NDArray[np.float64]:
    """Measure the length of every row on the host, block by block."""
    return extents(array).lengths if array.shape[1] else np.zeros(len(array))


def _lengths(array: Array) -> NDArray[np.float64]:
    """Measure the length of every row, on its device."""
    if not array.shape[1]:
        return np.zeros(array.shape[0])
    if is_on_host(array):  # row after row in memory, so that no bit depends on the other rows
        array = np.ascontiguousarray(to_numpy(array))
    return to_numpy(norms(array))


def _in_memory_order(client_ids: Sequence[str], replies: Mapping[str, Reply]) -> list[str]:
    return sorted(client_ids, key=lambda client_id: replies[client_id].row)


def _measured_before(replies: Sequence[Reply]) -> Extent | None:
    """Return what was measured of updates when they were checked, if all of them were."""
    if all(reply.rows is replies[0].rows for reply in replies):
        norms_ = replies[0].rows.norms
        if norms_ is None or len(replies) == len(norms_.lengths):
            return norms_
    lengths, strongest = [], []
    for reply in replies:
        if reply.rows.norms is None:
            return None
        lengths.append(reply.rows.norms.lengths[reply.row])
        strongest.append(reply.rows.norms.strongest[reply.row])
    return Extent(np.array(lengths), np.array(strongest))


def _spread(some: Array, at_rows: Sequence[int], like: Array) -> Array:
    """Put rows into their places among all rows; the others are zero."""
    if len(at_rows) == like.shape[0]:
        return some
    place = {row: number for number, row in enumerate(at_rows)}
    xp = array_namespace(some)
    padded = xp.concat([some, xp.zeros_like(some[:1])])  # zeros for the others, at the end
    return take_rows(padded, [place.get(row, len(at_rows)) for row in range(like.shape[0])])
