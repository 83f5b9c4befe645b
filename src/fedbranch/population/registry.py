"""The registry: a row for every client id, in tens of bytes per client.

Ids are found by a 64-bit digest in sorted arrays. So a million ids are no million Python objects,
and loading them is reading those arrays.

The newest ids are kept apart. When there are enough of them they become a run: consecutive rows
whose ids never change. Runs of similar size are joined to larger ones. So a save writes the
newest ids and now and then a run, and all ids only once in a long while. When runs are made
depends on what was changed, never on when it was saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbranch.population.int_column import IntColumn, RowNumbers, checked_vector
from fedbranch.population.packed_ids import (
    MOST_BYTES,
    checked_keys,
    ids_between,
    keys_of,
    pack_keys,
    unpack_ids,
)
from fedbranch.storage.checkpoint import LastingTensors, Tensors
from fedbranch.types import JSON

__all__ = ["Registry"]

MOST_NEWEST = 4096  # ids that are not in a run yet
MOST_REMEMBERED = 32_768  # ids whose rows are remembered because they were asked for
IDS_AT_ONCE = 65_536  # bounds the memory that a list of ids takes while it is searched or added
# A new run is joined with the one before it, unless that is more than this many times as long.
LONGEST_JOINED_RATIO = 4


class Registry:
    """Client ids, each with a row: 0, 1, ... in the order in which they came.

    A row is never given to another id, but :meth:`drop_all_but` numbers the rows anew. Columns
    of numbers belong to the registry, one number for each row.

    Examples
    --------
    >>> registry = Registry()
    >>> registry.add(["b", "a"])
    array([0, 1], dtype=int32)
    >>> registry.rows(["a", "x", "b"]), registry.ids(np.array([1]))
    (array([ 1, -1,  0], dtype=int32), ['a'])
    """

    def __init__(self) -> None:
        self._runs: list[_Run] = []  # the oldest first
        self._num_in_runs = 0
        self._newest: dict[str, int] = {}  # id -> row, after the rows of the runs
        self._remembered: dict[str, int] = {}  # id -> row, of ids in runs that were asked for
        self._columns: list[IntColumn] = []
        self.num_renumberings = 0  # since the registry was made or read

    def __len__(self) -> int:
        return self._num_in_runs + len(self._newest)

    def add_column(self, column: IntColumn) -> IntColumn:
        """Let a column grow and shrink with the rows, and return it."""
        column.grow(len(self) - len(column))
        self._columns.append(column)
        return column

    # Ids and rows

    def row(self, client_id: str) -> int:
        """Return the row of a client; -1 if it has none."""
        row = self._newest.get(client_id)
        if row is None:
            row = self._remembered.get(client_id)
        return int(self.rows([client_id])[0]) if row is None else row

    def rows(self, client_ids: Sequence[str]) -> RowNumbers:
        """Return the rows of clients; -1 for those that have none."""
        newest, remembered = self._newest, self._remembered
        found = [newest.get(i, -1) for i in client_ids]
        missing = []
        for place, client_id in enumerate(client_ids):
            if found[place] < 0:
                row = found[place] = remembered.get(client_id, -1)
                if row < 0:
                    missing.append(place)
        rows = np.array(found, dtype=np.int32)
        for start in range(0, len(missing), IDS_AT_ONCE):
            places = missing[start : start + IDS_AT_ONCE]
            looked_for = [client_ids[place] for place in places]
            rows[places] = own = self._rows_in_runs(looked_for)
            if len(missing) <= IDS_AT_ONCE:
                self._remember(looked_for, own.tolist())
        return rows

    def _rows_in_runs(self, client_ids: Sequence[str]) -> RowNumbers:
        rows = np.full(len(client_ids), -1, dtype=np.int32)
        if not self._runs:
            return rows
        keys = keys_of(client_ids)
        digests = _digests(keys)
        for run in self._runs:
            run.find(keys, digests, rows)
        return rows

    def _remember(self, client_ids: Sequence[str], rows: Sequence[int]) -> None:
        if len(self._remembered) + len(rows) > max(MOST_REMEMBERED, 2 * len(rows)):
            self._remembered = {}
        self._remembered.update(
            (i, row) for i, row in zip(client_ids, rows, strict=True) if row >= 0
        )

    def ids(self, rows: NDArray[np.integer[Any]]) -> list[str]:
        """Return the ids of rows."""
        ids = np.empty(len(rows), dtype=object)
        newest = list(self._newest)
        for run in self._runs:
            places = np.flatnonzero((rows >= run.first) & (rows < run.first + len(run)))
            ids[places] = run.ids(rows[places] - run.first)
        for place in np.flatnonzero(rows >= self._num_in_runs).tolist():
            ids[place] = newest[int(rows[place]) - self._num_in_runs]
        return list(ids)

    def add(self, client_ids: Sequence[str]) -> RowNumbers:
        """Add clients that have no row, each named once, and return their rows."""
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
        """Make a run of the newest rows, and join it with the runs before it that are not longer."""
        keys = keys_of(self._newest)
        own = _Run.of(self._num_in_runs, keys)
        if len(self._newest) <= MOST_REMEMBERED:
            self._remember(list(self._newest), list(self._newest.values()))
        self._num_in_runs += len(keys)
        self._newest = {}
        while (
            self._runs
            and len(self._runs[-1]) <= LONGEST_JOINED_RATIO * len(own)
            and self._runs[-1].num_bytes + own.num_bytes <= MOST_BYTES
        ):
            own = self._runs.pop().joined(own)
        self._runs.append(own)

    def clear_numbers(self, rows: RowNumbers) -> None:
        """Forget the numbers of clients in all columns; the ids keep their rows."""
        for column in self._columns:
            column.set_many(rows, column.empty)

    def drop_all_but(self, rows: RowNumbers) -> None:
        """Forget all other ids and their numbers. The rows, ascending, become 0, 1, ..."""
        parts = [
            run.only(rows[(rows >= run.first) & (rows < run.first + len(run))] - run.first)
            for run in self._runs
        ]
        newest = self.ids(rows[rows >= self._num_in_runs])
        self._runs, self._num_in_runs, self._newest, self._remembered = [], 0, {}, {}
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
        self.num_renumberings += 1

    # Files

    def to_state(self) -> tuple[JSON, dict[str, Tensors], Tensors]:
        """Describe the ids.

        Returns
        -------
        tuple
            JSON, the runs as tensors by file, and the newest ids as tensors. Files of runs
            never change; the newest ids change soon.
        """
        files: dict[str, Tensors] = {f"clients-{run.first}": run.lasting for run in self._runs}
        state: JSON = {"runs": [run.first for run in self._runs], "num_newest": len(self._newest)}
        return state, files, pack_keys(keys_of(self._newest)) if self._newest else {}

    @classmethod
    def from_state(cls, state: JSON, files: Mapping[str, Tensors], newest: Tensors) -> Registry:
        """Rebuild a registry from what :meth:`to_state` returned.

        Raises
        ------
        ValueError, KeyError, TypeError, AttributeError
            If the parts contradict each other.
        """
        registry = cls()
        for first in state["runs"]:
            run = _Run.checked(registry._num_in_runs, files[f"clients-{first}"])
            if type(first) is not int or first != run.first:
                raise ValueError(
                    f"a run of ids begins at row {run.first} and is saved as that of row {first}"
                )
            registry._runs.append(run)
            registry._num_in_runs += len(run)
        num_newest = state["num_newest"]
        if num_newest:
            registry._newest = {
                i: registry._num_in_runs + row for row, i in enumerate(unpack_ids(newest))
            }
        if type(num_newest) is not int or len(registry._newest) != num_newest:
            raise ValueError(
                f"{len(registry._newest)} newest ids are there instead of {num_newest}"
            )
        registry._check_that_ids_differ()
        return registry

    def _check_that_ids_differ(self) -> None:
        for number, run in enumerate(self._runs):
            for other in self._runs[:number]:
                shared = run.shared_with(other)
                if shared:
                    raise ValueError(f"client {shared[0]!r} is there twice")
        found = self._rows_in_runs(list(self._newest))
        if (found >= 0).any():
            raise ValueError(f"client {list(self._newest)[int(np.argmax(found >= 0))]!r} is twice")


@dataclass(eq=False)
class _Run:
    """The ids of consecutive rows; they never change."""

    first: int
    packed: NDArray[np.uint8]  # the keys of all ids, one after the other
    ends: NDArray[np.uint32]  # the place where each key ends
    digests: NDArray[np.uint64]  # of the keys, ascending
    order: NDArray[np.int32]  # the row of each digest, counted from the first row
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
        return cls(first, **pack_keys(keys), digests=digests[order], order=order)

    @classmethod
    def checked(cls, first: int, tensors: Tensors) -> _Run:
        """Check a run of a file, which may hold anything."""
        if set(tensors) != {"packed", "ends", "digests", "order"}:
            raise ValueError(f"a run of ids has {sorted(tensors)}")
        content, ends = checked_keys(tensors)
        digests = checked_vector(tensors["digests"], np.uint64)
        order = checked_vector(tensors["order"], np.int32)
        if not len(ends) == len(digests) == len(order) > 0:
            raise ValueError(f"{len(ends)} ids with {len(digests)} digests of {len(order)} rows")
        if (digests[1:] < digests[:-1]).any():
            raise ValueError("the digests of the ids are not in order")
        is_there = np.zeros(len(order), dtype=bool)
        if order.min() < 0 or order.max() >= len(order):
            raise ValueError("a digest belongs to no row")
        is_there[order] = True
        if not is_there.all():
            raise ValueError("an id has no digest")
        run = cls(first, content, ends, digests, order)
        run.lasting = LastingTensors(lambda: tensors, read=tensors)
        repeated = np.flatnonzero(digests[1:] == digests[:-1])
        if len(repeated):  # one in 2**64 pairs, unless they are made on purpose
            _check_distinct(run.ids(order[np.union1d(repeated, repeated + 1)]))
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
        return ids_between(self.packed, self._starts(rows), self.ends[rows])

    def find(self, keys: Sequence[bytes], digests: NDArray[np.uint64], found: RowNumbers) -> None:
        """Write into ``found`` the rows of the keys that are in this run."""
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
        self, place: int, key: bytes, digest: np.uint64, hit: int, found: RowNumbers
    ) -> None:
        """Look among further ids with this digest, as the first is another one."""
        while place < len(self) and self.digests[place] == digest:
            rows = self.order[place : place + 1]
            if self.packed[self._starts(rows)[0] : self.ends[rows[0]]].tobytes() == key:
                found[hit] = self.first + int(rows[0])
                return
            place += 1

    def shared_with(self, other: _Run) -> list[str]:
        """List the ids that both runs have."""
        places = np.searchsorted(other.digests, self.digests)
        places[places == len(other)] = 0
        own = self.ids(self.order[other.digests[places] == self.digests])
        found = np.full(len(own), -1, dtype=np.int32)
        keys = keys_of(own)
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
        """Make a run of some of its rows, which are ascending."""
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


def _check_distinct(client_ids: Sequence[str]) -> None:
    if len(set(client_ids)) < len(client_ids):
        raise ValueError("a client is there twice")
