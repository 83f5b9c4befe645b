"""Replies that passed all checks, as the server has them: columns, with a row for each reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from fedbranch.core.exact_sum.block_norms import Extent
from fedbranch.core.geometry import take_rows, to_numpy
from fedbranch.types import Array

__all__ = ["LENGTHS_OF", "Column", "Reply", "ReplyRows", "stacked"]

LENGTHS_OF = ("update", "signal", "buffers")  # the columns of ``lengths``


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplyRows:
    """What one client sent, or many at once, column by column: one row for each.

    Attributes
    ----------
    update, buffers
        Shape (num_replies, length). None where updates were summed and not kept.
    signal
        What is compared instead of the updates; None if those are compared, or if signals were
        summed and not kept.
    sketch
        Of what is compared; None where that is compared in full.
    half
        Half differences of what is compared, in full; zeros for a client that sent none.
    half_sketch
        Sketches of the half differences, where sketches are compared.
    lengths
        Shape (num_replies, 3), where sketches are compared: the length of each update, of what is
        compared of it in full, and of its buffers.
    norms
        What was measured of the updates when they were checked.
    """

    update: Array | None = None
    buffers: Array | None = None
    signal: Array | None = None
    sketch: Array | None = None
    half: Array | None = None
    half_sketch: Array | None = None
    lengths: NDArray[np.float64] | None = None
    norms: Extent | None = None

    @property
    def compared_in_full(self) -> Array | None:
        """The signals, or else the updates; None where neither was kept."""
        return self.update if self.signal is None else self.signal

    @property
    def compared(self) -> Array | None:
        """What clusters are found by."""
        return self.compared_in_full if self.sketch is None else self.sketch

    @property
    def half_compared(self) -> Array | None:
        """The half differences as they are compared."""
        return self.half if self.sketch is None else self.half_sketch


@dataclass(frozen=True, kw_only=True, eq=False)
class Reply:
    """One client's reply: a row among others, and the numbers beside it."""

    rows: ReplyRows
    row: int
    weight: float
    metrics: Mapping[str, float | None]
    has_half: bool = False  # whether its row of half differences is one


Column = Literal[
    "update",
    "buffers",
    "signal",
    "sketch",
    "half",
    "half_sketch",
    "lengths",
    "compared",
    "compared_in_full",
    "half_compared",
]


def stacked(replies: Sequence[Reply], column: Column) -> Array:
    """Put a column of replies on top of each other: shape (num_replies, length).

    They stay on their device. Replies of several rounds may be on several; all of them then go to
    that of the last one.
    """
    rows = replies[-1].rows
    if all(reply.rows is rows for reply in replies):
        return take_rows(_column(replies[-1], column), [reply.row for reply in replies])
    target = _column(replies[-1], column)
    if all(isinstance(_column(reply, column), np.ndarray) for reply in replies):
        return _stacked_on_host(replies, column, target)
    xp = array_namespace(target)
    parts = [_column(reply, column)[reply.row][None, :] for reply in replies]
    together: Array = xp.concat(
        [
            xp.asarray(
                part if isinstance(part, type(target)) else to_numpy(part),
                dtype=target.dtype,
                device=device(target),
            )
            for part in parts
        ]
    )
    return together


def _column(reply: Reply, column: Column) -> Array:
    array: Array | None = getattr(reply.rows, column)
    assert array is not None, f"these replies have no {column}"
    return array


def _stacked_on_host(replies: Sequence[Reply], column: Column, like: NDArray[Any]) -> NDArray[Any]:
    """Take the rows of each source at once: there may be thousands of replies of few sources."""
    places: dict[int, list[int]] = {}
    for place, reply in enumerate(replies):
        places.setdefault(id(reply.rows), []).append(place)
    together = np.empty((len(replies), *like.shape[1:]), like.dtype)
    for own in places.values():
        source = _column(replies[own[0]], column)
        if source.shape[1:] != like.shape[1:]:
            raise ValueError(f"rows of shapes {source.shape[1:]} and {like.shape[1:]} do not stack")
        together[own] = source[[replies[place].row for place in own]]
    return together
