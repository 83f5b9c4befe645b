"""Replies that passed all checks, as the server keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from fedbranch.core.exact_sum.block_norms import Extent
from fedbranch.core.geometry import take_rows, to_numpy
from fedbranch.storage.checkpoint import Tensors
from fedbranch.types import JSON, Array, Vector

__all__ = [
    "LENGTHS_OF",
    "Reply",
    "Rows",
    "replies_from_state",
    "replies_to_state",
    "replies_to_tensors",
    "stacked",
]

LENGTHS_OF = ("update", "signal", "buffers")  # what is measured of a reply


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Numbers that passed all checks, of one client or of many: one row each.

    Attributes
    ----------
    vector, buffers
        The updates; of length 0 where they were added up and not kept.
    compared
        The updates or the signals, or sketches of them.
    half_difference
        Of what is compared; sketches where that are sketches.
    signal, whole_half_difference
        Where sketches are compared and updates kept: the signals, if it is these, and the half
        differences in full.
    lengths
        Where sketches are compared, shape (num_clients, 3): how long each update, what is
        compared of it in full, and its buffers are.
    extent
        What was measured of the updates when they were checked.
    """

    vector: Array
    compared: Array
    buffers: Array
    half_difference: Array | None = None
    signal: Array | None = None
    whole_half_difference: Array | None = None
    lengths: NDArray[np.float64] | None = None
    extent: Extent | None = None

    @property
    def whole(self) -> Array:
        """What is compared, in full."""
        if self.lengths is None:
            return self.compared
        return self.vector if self.signal is None else self.signal

    @property
    def compares_update(self) -> bool:
        """Whether it is the updates that are compared, not a signal."""
        return self.whole is self.vector

    @property
    def whole_half(self) -> Array | None:
        """The half differences, in full."""
        return self.half_difference if self.lengths is None else self.whole_half_difference


@dataclass(frozen=True, kw_only=True, eq=False)
class Reply:
    """An update that passed all checks, as the server keeps it: a row among others."""

    rows: Rows
    row: int
    weight: float
    metrics: Mapping[str, float | None]
    has_halves: bool = False  # whether its row of half differences is one

    @property
    def compared(self) -> Vector:
        """What is compared, for keeping: on the host, in memory of its own."""
        return np.array(to_numpy(self.rows.compared[self.row]), dtype=np.float32)


Column = Literal[
    "vector",
    "compared",
    "buffers",
    "half_difference",
    "lengths",
    "signal",
    "whole",
    "whole_half",
    "whole_half_difference",
]


def stacked(replies: Sequence[Reply], column: Column) -> Array:
    """Put replies on top of each other: shape (num_replies, length).

    They stay where they are. Replies of several rounds may be in several places; they go to
    where the last one is.
    """
    rows = replies[-1].rows
    if all(reply.rows is rows for reply in replies):
        return take_rows(getattr(rows, column), [reply.row for reply in replies])
    target = getattr(rows, column)
    if all(isinstance(getattr(reply.rows, column), np.ndarray) for reply in replies):
        return _stacked_on_host(replies, column, target)
    xp = array_namespace(target)
    parts = [getattr(reply.rows, column)[reply.row][None, :] for reply in replies]
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


def _stacked_on_host(replies: Sequence[Reply], column: Column, like: NDArray[Any]) -> NDArray[Any]:
    """Take the rows of each source at once: there may be thousands of replies of few sources."""
    places: dict[int, list[int]] = {}
    for place, reply in enumerate(replies):
        places.setdefault(id(reply.rows), []).append(place)
    together = np.empty((len(replies), *like.shape[1:]), like.dtype)
    for own in places.values():
        source = getattr(replies[own[0]].rows, column)
        if source.shape[1:] != like.shape[1:]:
            raise ValueError(f"rows of shapes {source.shape[1:]} and {like.shape[1:]} do not stack")
        together[own] = source[[replies[place].row for place in own]]
    return together


def replies_to_state(replies: Mapping[str, Reply]) -> JSON:
    """Describe replies, by client id, but for their numbers."""
    return {
        i: {"weight": r.weight, "metrics": r.metrics, "has_halves": r.has_halves}
        for i, r in sorted(replies.items())
    }


def replies_to_tensors(replies: Mapping[str, Reply]) -> Tensors:
    """Give the numbers of replies, at least one, with a row each in the order of client ids."""
    replied = [reply for _, reply in sorted(replies.items())]
    columns: tuple[Column, ...] = ("vector", "compared", "buffers")
    if all(reply.rows.compared is reply.rows.vector for reply in replied):
        columns = ("vector", "buffers")
    tensors: dict[str, NDArray[Any]] = {name: to_numpy(stacked(replied, name)) for name in columns}
    if any(reply.has_halves for reply in replied):
        rows = [row for row, reply in enumerate(replied) if reply.has_halves]
        tensors["half_difference"] = np.zeros_like(tensors.get("compared", tensors["vector"]))
        tensors["half_difference"][rows] = to_numpy(
            stacked([replied[row] for row in rows], "half_difference")
        )
        if all(replied[row].rows.whole_half_difference is not None for row in rows):
            halves = to_numpy(stacked([replied[row] for row in rows], "whole_half_difference"))
            tensors["whole_half_difference"] = np.zeros((len(replied), halves.shape[1]), np.float32)
            tensors["whole_half_difference"][rows] = halves
    if replied[0].rows.lengths is not None:  # a server compares sketches, or it does not
        tensors["lengths"] = to_numpy(stacked(replied, "lengths"))
        if all(reply.rows.signal is not None for reply in replied):
            tensors["signal"] = to_numpy(stacked(replied, "signal"))
    return tensors


def replies_from_state(state: JSON, tensors: Tensors) -> dict[str, Reply]:
    """Rebuild replies from what :func:`replies_to_state` and :func:`replies_to_tensors` gave.

    Raises
    ------
    ValueError, KeyError, TypeError, AttributeError
        If that cannot be.
    """
    if {len(tensor) for tensor in tensors.values()} != {len(state)}:
        raise ValueError(f"the tensors of {len(state)} replies have other numbers of rows")
    vector = tensors["vector"]
    are_updates = not {"compared", "lengths"} & set(tensors)
    rows = Rows(
        vector=vector,
        compared=vector if are_updates else tensors["compared"],
        buffers=tensors["buffers"],
        half_difference=tensors.get("half_difference"),
        signal=tensors.get("signal"),
        whole_half_difference=tensors.get("whole_half_difference"),
        lengths=tensors.get("lengths"),
    )
    return {
        client_id: Reply(
            rows=rows,
            row=row,
            weight=entry["weight"],
            metrics=entry["metrics"],
            has_halves=entry["has_halves"] and rows.half_difference is not None,
        )
        for row, (client_id, entry) in enumerate(sorted(state.items()))
    }
