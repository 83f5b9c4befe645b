"""Replies for one node on top of each other, and sketches in their place."""

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
from fedbranch.server.replies.reply import Reply, Rows, stacked
from fedbranch.types import Array

__all__ = ["Stack", "lengths_of_rows"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Stack:
    """Replies for one node, one row each, in the order in which they lie in memory.

    What is compared is the very array of the updates if it is these.

    Attributes
    ----------
    client_ids, replies
        Whose they are, and what passed the checks.
    vectors, buffers, compared
        One row for each.
    lengths
        Shape (n, 3): of the update, of what is compared, of the buffers.
    extent
        Of the updates; None if they are kept.
    """

    client_ids: Sequence[str]
    replies: Sequence[Reply]
    vectors: Array
    buffers: Array
    compared: Array
    lengths: NDArray[np.float64]
    extent: Extent | None

    @classmethod
    def of(cls, client_ids: Sequence[str], replies: Mapping[str, Reply], keeps: bool) -> Stack:
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
        of_update = lengths_of_rows(vectors, keeps) if extent is None else extent.lengths
        of_compared = of_update if compared is vectors else lengths_of_rows(compared, keeps)
        return cls(
            client_ids=in_order,
            replies=ordered,
            vectors=vectors,
            buffers=buffers,
            compared=compared,
            lengths=np.stack([of_update, of_compared, lengths_of_rows(buffers, keeps)], axis=1),
            extent=extent,
        )

    @property
    def compares_update(self) -> bool:
        """Whether it is the updates that are compared, not a signal."""
        return self.compared is self.vectors

    def with_sketches(self, sketches: Array, projection: Projection, keeps: bool) -> list[Reply]:
        """Put sketches in the place of what is compared, and leave the rest out if it is not kept."""
        replies = self.replies
        halves = [row for row, reply in enumerate(replies) if reply.has_halves]
        whole_halves = half_sketches = None
        if halves:
            of_halves = stacked([replies[row] for row in halves], "half_difference")
            half_sketches = _spread(projection.of(of_halves), halves, sketches)
            if keeps:
                whole_halves = _spread(of_halves, halves, sketches)
        nothing = np.zeros((len(replies), 0), np.float32)
        rows = Rows(
            vector=self.vectors if keeps else nothing,
            compared=sketches,
            buffers=self.buffers if keeps else nothing,
            half_difference=half_sketches,
            signal=self.compared if keeps and not self.compares_update else None,
            whole_half_difference=whole_halves,
            lengths=self.lengths,
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


def lengths_of_rows(array: Array, keeps: bool) -> NDArray[np.float64]:
    """Measure the length of every row, where it is if it is kept."""
    if not array.shape[1]:
        return np.zeros(array.shape[0])
    if not keeps:
        return extents(to_numpy(array)).lengths
    if is_on_host(array):  # row after row in memory, no bit depends on who else is there
        array = np.ascontiguousarray(to_numpy(array))
    return to_numpy(norms(array))


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


def _spread(some: Array, at_rows: Sequence[int], like: Array) -> Array:
    """Put rows where they belong among all; the others are zero."""
    if len(at_rows) == like.shape[0]:
        return some
    place = {row: number for number, row in enumerate(at_rows)}
    xp = array_namespace(some)
    padded = xp.concat([some, xp.zeros_like(some[:1])])  # zeros for the others, at the end
    return take_rows(padded, [place.get(row, len(at_rows)) for row in range(like.shape[0])])
