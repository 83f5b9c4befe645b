"""Known clients by number: their ids, in tens of bytes per client.

Every client has a row. Ids are found by a 64-bit digest in sorted arrays, so that a million of
them is no million Python objects, and loading them is reading those arrays. What came last is
kept apart and joins larger and larger runs of rows now and then. So a save writes what happened
since, and all of it once in a long while. When that is depends on what was changed, never on when
it was saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbranch.population.int_column import Column, Rows, checked_array
from fedbranch.population.packed_ids import (
    MOST_BYTES,
    checked_packed,
    decoded,
    encoded,
    packed,
    unpacked,
)
from fedbranch.storage.checkpoint import LastingTensors, Tensors
from fedbranch.types import JSON

__all__ = ["KnownClients"]

MOST_NEWEST = 4096  # ids that are not in a run yet
MOST_RECENT = 32_768  # ids whose rows are remembered because somebody asked for them
IDS_AT_ONCE = 65_536  # bounds what a list of ids takes beside what it becomes
LONGER_RUN = 4  # a run is joined with the one before it that is not so many times as long


class KnownClients:
    """Client ids, each with a row: 0, 1, ... in the order in which they came.

    A row is never given to another id, but :meth:`drop_all_but` counts the rows anew.

    Examples
    --------
    >>> known = KnownClients()
    >>> known.add(["b", "a"])
    array([0, 1], dtype=int32)
    >>> known.rows(["a", "x", "b"]), known.ids(np.array([1]))
    (array([ 1, -1,  0], dtype=int32), ['a'])
    """

    def __init__(self) -> None:
        self._runs: list[_Run] = []  # of rows in a row, the oldest first
        self._num_in_runs = 0
        self._newest: dict[str, int] = {}  # the rows after those
        self._recent: dict[str, int] = {}
        self._columns: list[Column] = []
        self.num_renumbered = 0  # how often the rows were counted anew

    def __len__(self) -> int:
        return self._num_in_runs + len(self._newest)

    def column(self, empty: int, column: Column | None = None) -> Column:
        """Add a column; in rows that nobody has written it says ``empty``."""
        column = Column(empty) if column is None else column
        column.grow(len(self) - len(column))
        self._columns.append(column)
        return column

    # Ids and rows

    def row(self, client_id: str) -> int:
        """Give the row of a client; -1 if it has none."""
        row = self._newest.get(client_id)
        if row is None:
            row = self._recent.get(client_id)
        return int(self.rows([client_id])[0]) if row is None else row

    def rows(self, client_ids: Sequence[str]) -> Rows:
        """Give the rows of clients; -1 for those that have none."""
        newest, recent = self._newest, self._recent
        found = [newest.get(i, -1) for i in client_ids]
        missing = []
        for place, client_id in enumerate(client_ids):
            if found[place] < 0:
                row = found[place] = recent.get(client_id, -1)
                if row < 0:
                    missing.append(place)
        rows = np.array(found, dtype=np.int32)
        for start in range(0, len(missing), IDS_AT_ONCE):
            places = missing[start : start + IDS_AT_ONCE]
            looked_for = [client_ids[place] for place in places]
            rows[places] = own = self._searched(looked_for)
            if len(missing) <= IDS_AT_ONCE:
                self._remember(looked_for, own.tolist())
        return rows

    def _searched(self, client_ids: Sequence[str]) -> Rows:
        rows = np.full(len(client_ids), -1, dtype=np.int32)
        if not self._runs:
            return rows
        keys = encoded(client_ids)
        digests = _digests(keys)
        for run in self._runs:
            run.find(keys, digests, rows)
        return rows

    def _remember(self, client_ids: Sequence[str], rows: Sequence[int]) -> None:
        if len(self._recent) + len(rows) > max(MOST_RECENT, 2 * len(rows)):
            self._recent = {}
        self._recent.update((i, row) for i, row in zip(client_ids, rows, strict=True) if row >= 0)

    def ids(self, rows: NDArray[np.integer[Any]]) -> list[str]:
        """Give the ids of clients by their rows."""
        ids = np.empty(len(rows), dtype=object)
        newest = list(self._newest)
        for run in self._runs:
            places = np.flatnonzero((rows >= run.first) & (rows < run.first + len(run)))
            ids[places] = run.ids(rows[places] - run.first)
        for place in np.flatnonzero(rows >= self._num_in_runs).tolist():
            ids[place] = newest[int(rows[place]) - self._num_in_runs]
        return list(ids)

    def add(self, client_ids: Sequence[str]) -> Rows:
        """Give rows to clients that have none; each is named once."""
        first = len(self)
        for start in range(0, len(client_ids), IDS_AT_ONCE):
            some = client_ids[start : start + IDS_AT_ONCE]
            self._newest.update(zip(some, range(len(self), len(self) + len(some)), strict=True))
            if len(self._newest) >= MOST_NEWEST:
                self._close_run()
        for column in self._columns:
            column.grow(len(client_ids))
        return np.arange(first, len(self), dtype=np.int32)

    def _close_run(self) -> None:
        """Make a run of the newest rows, and one of it and those before it that are no longer."""
        keys = encoded(self._newest)
        own = _Run.of(self._num_in_runs, keys)
        if len(self._newest) <= MOST_RECENT:
            self._remember(list(self._newest), list(self._newest.values()))
        self._num_in_runs += len(keys)
        self._newest = {}
        while (
            self._runs
            and len(self._runs[-1]) <= LONGER_RUN * len(own)
            and self._runs[-1].num_bytes + own.num_bytes <= MOST_BYTES
        ):
            own = self._runs.pop().joined(own)
        self._runs.append(own)

    def empty(self, rows: Rows) -> None:
        """Forget all numbers of clients; the ids keep their rows."""
        for column in self._columns:
            column.set_many(rows, column.empty)

    def drop_all_but(self, rows: Rows) -> None:
        """Forget all other ids and their numbers. The rows, ascending, are from now on 0, 1, ..."""
        parts = [
            run.only(rows[(rows >= run.first) & (rows < run.first + len(run))] - run.first)
            for run in self._runs
        ]
        newest = self.ids(rows[rows >= self._num_in_runs])
        self._runs, self._num_in_runs, self._newest, self._recent = [], 0, {}, {}
        for part in parts:
            if len(part):
                part = part.moved_to(self._num_in_runs)
                joined = bool(self._runs) and (
                    self._runs[-1].num_bytes + part.num_bytes <= MOST_BYTES
                )
                self._runs.append(self._runs.pop().joined(part) if joined else part)
                self._num_in_runs += len(part)
        self._newest = {client_id: self._num_in_runs + i for i, client_id in enumerate(newest)}
        for column in self._columns:
            column.keep(rows)
        self.num_renumbered += 1

    # Files

    def to_state(self) -> tuple[JSON, dict[str, Tensors], Tensors]:
        """Describe the ids: as JSON, as files that last, and as tensors that change soon."""
        files: dict[str, Tensors] = {f"clients-{run.first}": run.lasting for run in self._runs}
        state: JSON = {"runs": [run.first for run in self._runs], "num_newest": len(self._newest)}
        return state, files, packed(encoded(self._newest)) if self._newest else {}

    @classmethod
    def from_state(cls, state: JSON, files: Mapping[str, Tensors], newest: Tensors) -> KnownClients:
        """Rebuild them from what :meth:`to_state` gave.

        Raises
        ------
        ValueError, KeyError, TypeError, AttributeError
            If that cannot be.
        """
        known = cls()
        for first in state["runs"]:
            run = _Run.checked(known._num_in_runs, files[f"clients-{first}"])
            if type(first) is not int or first != run.first:
                raise ValueError(f"the ids from row {first} on are those from row {run.first} on")
            known._runs.append(run)
            known._num_in_runs += len(run)
        num_newest = state["num_newest"]
        if num_newest:
            known._newest = {i: known._num_in_runs + row for row, i in enumerate(unpacked(newest))}
        if type(num_newest) is not int or len(known._newest) != num_newest:
            raise ValueError(f"{len(known._newest)} newest ids are there instead of {num_newest}")
        known._insist_on_one_row_each()
        return known

    def _insist_on_one_row_each(self) -> None:
        for number, run in enumerate(self._runs):
            for other in self._runs[:number]:
                shared = run.shared_with(other)
                if shared:
                    raise ValueError(f"client {shared[0]!r} is there twice")
        found = self._searched(list(self._newest))
        if (found >= 0).any():
            raise ValueError(f"client {list(self._newest)[int(np.argmax(found >= 0))]!r} is twice")


@dataclass(eq=False)
class _Run:
    """The ids of some rows in a row: they never change."""

    first: int
    packed: NDArray[np.uint8]  # all ids in UTF-8, one after the other
    ends: NDArray[np.uint32]  # where each ends
    digests: NDArray[np.uint64]  # of the ids, ascending
    order: NDArray[np.int32]  # whose digest that is, counted from the first row
    lasting: LastingTensors = field(init=False)

    def __post_init__(self) -> None:
        tensors: Tensors = {
            "packed": self.packed,
            "ends": self.ends,
            "digests": self.digests,
            "order": self.order,
        }
        self.lasting = LastingTensors(lambda: tensors)

    @classmethod
    def of(cls, first: int, keys: Sequence[bytes]) -> _Run:
        digests = _digests(keys)
        order = np.argsort(digests, kind="stable").astype(np.int32)
        return cls(first, **packed(keys), digests=digests[order], order=order)

    @classmethod
    def checked(cls, first: int, tensors: Tensors) -> _Run:
        """Read a run of a file, which may hold anything."""
        if set(tensors) != {"packed", "ends", "digests", "order"}:
            raise ValueError(f"a run of ids has {sorted(tensors)}")
        content, ends = checked_packed(tensors)
        digests = checked_array(tensors["digests"], np.uint64)
        order = checked_array(tensors["order"], np.int32)
        if not len(ends) == len(digests) == len(order) > 0:
            raise ValueError(f"{len(ends)} ids with {len(digests)} digests of {len(order)} rows")
        if (digests[1:] < digests[:-1]).any():
            raise ValueError("the digests of the ids are not in order")
        is_there = np.zeros(len(order), dtype=bool)
        if order.min() < 0 or order.max() >= len(order):
            raise ValueError("a digest is of no row")
        is_there[order] = True
        if not is_there.all():
            raise ValueError("an id has no digest")
        run = cls(first, content, ends, digests, order)
        run.lasting = LastingTensors(lambda: tensors, read=tensors)
        repeated = np.flatnonzero(digests[1:] == digests[:-1])
        if len(repeated):  # one in 2**64 pairs, unless somebody made them
            _insist_on_different(run.ids(order[np.union1d(repeated, repeated + 1)]))
        return run

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def num_bytes(self) -> int:
        return len(self.packed)

    def _starts(self, rows: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        starts: NDArray[np.int64] = self.ends[rows - 1].astype(
            np.int64
        )  # of the first row: the last end
        starts[rows == 0] = 0
        return starts

    def ids(self, rows: NDArray[np.integer[Any]]) -> list[str]:
        return decoded(self.packed, self._starts(rows), self.ends[rows])

    def find(self, keys: Sequence[bytes], digests: NDArray[np.uint64], found: Rows) -> None:
        """Write the rows of those keys that are here."""
        places = np.searchsorted(self.digests, digests)
        places[places == len(self)] = 0
        (hits,) = np.nonzero(self.digests[places] == digests)
        rows = self.order[places[hits]]
        starts, ends = self._starts(rows).tolist(), self.ends[rows].tolist()
        packed = self.packed.data
        for hit, row, start, end in zip(hits.tolist(), rows.tolist(), starts, ends, strict=True):
            if packed[start:end] == keys[hit]:
                found[hit] = self.first + row
            else:
                self._find_among_equal(int(places[hit]) + 1, keys[hit], digests[hit], hit, found)

    def _find_among_equal(
        self, place: int, key: bytes, digest: np.uint64, hit: int, found: Rows
    ) -> None:
        """Go on where the first id with this digest is another one."""
        while place < len(self) and self.digests[place] == digest:
            rows = self.order[place : place + 1]
            if self.packed[self._starts(rows)[0] : self.ends[rows[0]]].tobytes() == key:
                found[hit] = self.first + int(rows[0])
                return
            place += 1

    def shared_with(self, other: _Run) -> list[str]:
        """Give ids that both have."""
        places = np.searchsorted(other.digests, self.digests)
        places[places == len(other)] = 0
        own = self.ids(self.order[other.digests[places] == self.digests])
        found = np.full(len(own), -1, dtype=np.int32)
        keys = encoded(own)
        other.find(keys, _digests(keys), found)
        return [client_id for client_id, row in zip(own, found.tolist(), strict=True) if row >= 0]

    def joined(self, after: _Run) -> _Run:
        """Make one run of this and the one after it."""
        digests = np.concatenate([self.digests, after.digests])
        order = np.concatenate([self.order, after.order + np.int32(len(self))])
        places = np.argsort(digests, kind="stable")
        return _Run(
            self.first,
            packed=np.concatenate([self.packed, after.packed]),
            ends=np.concatenate([self.ends, after.ends + np.uint32(self.num_bytes)]),
            digests=digests[places],
            order=order[places],
        )

    def moved_to(self, first: int) -> _Run:
        return _Run(first, self.packed, self.ends, self.digests, self.order)

    def only(self, rows: NDArray[np.integer[Any]]) -> _Run:
        """Make a run of some of the rows, ascending."""
        is_kept = np.zeros(len(self), dtype=bool)
        is_kept[rows] = True
        lengths = np.diff(self.ends, prepend=np.uint32(0))
        new_row = np.cumsum(is_kept, dtype=np.int32) - np.int32(1)
        is_kept_in_order = is_kept[self.order]
        return _Run(
            self.first,
            packed=self.packed[np.repeat(is_kept, lengths)],
            ends=np.cumsum(lengths[is_kept], dtype=np.uint32),
            digests=self.digests[is_kept_in_order],
            order=new_row[self.order[is_kept_in_order]],
        )


def _digests(keys: Sequence[bytes]) -> NDArray[np.uint64]:
    content = b"".join(hashlib.blake2b(key, digest_size=8).digest() for key in keys)
    return np.frombuffer(content, dtype="<u8").astype(np.uint64)


def _insist_on_different(client_ids: Sequence[str]) -> None:
    if len(set(client_ids)) < len(client_ids):
        raise ValueError("a client is there twice")
