"""A column of whole numbers, one for each client; a save writes only the numbers that changed.

A column is a base, which holds the numbers of all rows at some time, and the changes since then.
A new base is made when there are many changes. That depends on what was changed, never on when
it was saved: so the files of two servers that did the same are the same.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedbranch.storage.checkpoint import LastingTensors, Tensors

__all__ = ["IntColumn", "RowNumbers", "checked_vector", "distinct_rows"]

# Rows of clients in the registry.
RowNumbers: TypeAlias = NDArray[np.int32]

# A new base is made when more rows than this have changed, or than this share of all rows.
MOST_CHANGES = 4096
ROWS_PER_CHANGE = 32


class IntColumn:
    """A whole number for every row.

    Parameters
    ----------
    empty
        The number in rows that were never written.

    Notes
    -----
    For every row that changed since the base, the column also knows its number in the base. So
    the base can still be computed when it is written, and is never held twice.

    Examples
    --------
    >>> column = IntColumn(empty=-1)
    >>> column.grow(3)
    >>> column.set(1, 7)
    >>> column.numbers
    array([-1,  7, -1], dtype=int32)
    """

    def __init__(self, empty: int) -> None:
        self.empty = empty
        self._numbers = np.full(0, empty, dtype=np.int32)  # with room for more rows
        self._num_rows = 0
        self._num_in_base = 0
        self._in_base: dict[int, int] = {}  # changed row -> its number in the base
        self._base: LastingTensors | None = None

    def __len__(self) -> int:
        return self._num_rows

    @property
    def numbers(self) -> NDArray[np.int32]:
        """The numbers of all rows, to read; valid until rows are added."""
        return self._numbers[: self._num_rows]

    def grow(self, num_rows: int) -> None:
        """Add empty rows."""
        if not num_rows:
            return
        # First, as the rows that are added now are written next.
        if self._has_many_changes():
            self._make_base()
        needed = self._num_rows + num_rows
        if needed > len(self._numbers):
            room = np.full(needed + needed // 8, self.empty, dtype=np.int32)
            room[: self._num_rows] = self.numbers
            self._numbers = room
        self._num_rows = needed

    def set(self, row: int, number: int) -> None:
        """Write one row."""
        if row < self._num_in_base:
            self._in_base.setdefault(row, int(self._numbers[row]))
        self._numbers[row] = number
        if self._has_many_changes():
            self._make_base()

    def set_many(self, rows: RowNumbers, numbers: NDArray[np.int32] | int) -> None:
        """Write rows, each named once."""
        in_base = rows[rows < self._num_in_base]
        becomes_base = self._has_many_changes(len(in_base))
        if not becomes_base:
            before = self._numbers[in_base].tolist()
            for row, number in zip(in_base.tolist(), before, strict=True):
                self._in_base.setdefault(row, number)
        self._numbers[rows] = numbers
        if becomes_base:
            self._make_base()

    def keep(self, rows: RowNumbers) -> None:
        """Forget all other rows; these, ascending, become rows 0, 1, ..."""
        self._numbers = self._numbers[rows]
        self._num_rows = len(rows)
        self._make_base()

    def _has_many_changes(self, num_more: int = 0) -> bool:
        num_changes = len(self._in_base) + num_more + self._num_rows - self._num_in_base
        return num_changes > max(MOST_CHANGES, self._num_rows // ROWS_PER_CHANGE)

    def _make_base(self, read: Tensors | None = None) -> None:
        """Take the numbers of all rows as the base."""
        self._num_in_base = num_rows = self._num_rows
        self._in_base = {}
        in_base = self._in_base

        def base() -> Tensors:
            # After the next base, this one can no longer be computed.
            assert self._in_base is in_base, "the state was changed before it was written"
            numbers = self._numbers[:num_rows].copy()
            numbers[_array_of(in_base)] = _array_of(in_base.values())
            return {"numbers": numbers}

        self._base = LastingTensors(base, read) if num_rows else None

    # Files

    def to_state(self) -> tuple[LastingTensors | None, Tensors]:
        """Describe the column: the base, if there is one, and the changes since."""
        rows = np.sort(_array_of(self._in_base))
        changes = {"rows": rows, "numbers": self._numbers[rows], "more": self._more()}
        return self._base, {name: array for name, array in changes.items() if len(array)}

    def _more(self) -> NDArray[np.int32]:
        return self.numbers[self._num_in_base :].copy()

    @classmethod
    def from_state(cls, empty: int, base: Tensors | None, changes: Tensors) -> IntColumn:
        """Rebuild a column from what :meth:`to_state` returned.

        Raises
        ------
        ValueError, KeyError
            If the arrays contradict each other.
        """
        none = np.zeros(0, dtype=np.int32)
        if base is not None and set(base) != {"numbers"}:
            raise ValueError(f"the base of a column has {sorted(base)}")
        in_base = none if base is None else checked_vector(base["numbers"], np.int32)
        rows, numbers, more = (
            checked_vector(changes.get(name, none), np.int32)
            for name in ("rows", "numbers", "more")
        )
        if len(rows) != len(numbers) or (rows[1:] <= rows[:-1]).any():
            raise ValueError(f"{len(rows)} rows have {len(numbers)} numbers, or are not in order")
        if len(rows) and not 0 <= rows[0] <= rows[-1] < len(in_base):
            raise ValueError(f"rows up to {rows[-1]} changed, of {len(in_base)}")
        column = cls(empty)
        column._numbers = np.concatenate([in_base, none])
        column._num_rows = len(in_base)
        column._make_base(read=base)
        column._in_base.update(zip(rows.tolist(), in_base[rows].tolist(), strict=True))
        column._numbers[rows] = numbers
        column._numbers = np.concatenate([column._numbers, more])
        column._num_rows = len(column._numbers)
        return column


def distinct_rows(rows: RowNumbers) -> RowNumbers:
    """Sort rows, and keep each once."""
    rows = np.sort(rows)  # np.unique takes a hundred times as long for a million rows
    is_first = np.ones(len(rows), dtype=bool)
    is_first[1:] = rows[1:] != rows[:-1]
    return rows[is_first]


def _array_of(numbers: Collection[int]) -> NDArray[np.int32]:
    return np.fromiter(numbers, dtype=np.int32, count=len(numbers))


def checked_vector(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """Return an array of a file, after checking that it is a vector of this dtype.

    Raises
    ------
    ValueError
        If it is not.
    """
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(
            f"an array has dtype {array.dtype} and shape {array.shape}; it must be "
            f"{np.dtype(dtype)}, of one dimension"
        )
    return array
