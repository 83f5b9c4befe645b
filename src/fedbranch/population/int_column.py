"""Columns of whole numbers, one for every known client, of which a save writes what changed.

What changed lately is apart from a base that says what all rows said before. When the base is made
anew depends on what was changed, never on when it was saved.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbranch.storage.checkpoint import LastingTensors, Tensors

__all__ = ["Column", "Rows", "checked_array", "distinct"]

Rows = NDArray[np.int32]

MOST_CHANGED = 4096  # rows that are not as in the base; more, of many rows:
ROWS_PER_CHANGE = 32


class Column:
    """A whole number for every row; what changed lately is known, and so is what it was.

    Parameters
    ----------
    empty
        What rows say that nobody has written.
    """

    def __init__(self, empty: int) -> None:
        self.empty = empty
        self._numbers = np.full(0, empty, dtype=np.int32)  # with room for more rows
        self._num_rows = 0
        self._num_in_base = 0
        self._in_base: dict[int, int] = {}  # row -> what it says there, if it was written since
        self._base: LastingTensors | None = None

    def __len__(self) -> int:
        return self._num_rows

    @property
    def numbers(self) -> NDArray[np.int32]:
        """All of them, to read; until rows are added."""
        return self._numbers[: self._num_rows]

    def grow(self, num_rows: int) -> None:
        """Add empty rows."""
        if not num_rows:
            return
        # Before that: those that are added now are written next.
        if self._is_much_changed(0):
            self._settle()
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
        if self._is_much_changed(0):
            self._settle()

    def set_many(self, rows: Rows, numbers: NDArray[np.int32] | int) -> None:
        """Write rows, each named once."""
        in_base = rows[rows < self._num_in_base]
        is_much = self._is_much_changed(len(in_base))
        if not is_much:
            before = self._numbers[in_base].tolist()
            for row, number in zip(in_base.tolist(), before, strict=True):
                self._in_base.setdefault(row, number)
        self._numbers[rows] = numbers
        if is_much:
            self._settle()

    def keep(self, rows: Rows) -> None:
        """Forget all other rows; these, ascending, are from now on 0, 1, ..."""
        self._numbers = self._numbers[rows]
        self._num_rows = len(rows)
        self._settle()

    def _is_much_changed(self, num_more: int) -> bool:
        num_changed = len(self._in_base) + num_more + self._num_rows - self._num_in_base
        return num_changed > max(MOST_CHANGED, self._num_rows // ROWS_PER_CHANGE)

    def _settle(self, read: Tensors | None = None) -> None:
        """Let the base say what all rows say now."""
        self._num_in_base = num_rows = self._num_rows
        self._in_base = {}
        in_base = self._in_base

        def base() -> Tensors:
            # A description of the past that was not written in time.
            assert self._in_base is in_base, "the state was changed before it was written"
            numbers = self._numbers[:num_rows].copy()
            numbers[_array_of(in_base)] = _array_of(in_base.values())
            return {"numbers": numbers}

        self._base = LastingTensors(base, read) if num_rows else None

    # Files

    def to_state(self) -> tuple[LastingTensors | None, Tensors]:
        """Give the base, if there is one, and what is different since."""
        rows = np.sort(_array_of(self._in_base))
        changes = {"rows": rows, "numbers": self._numbers[rows], "more": self._more()}
        return self._base, {name: array for name, array in changes.items() if len(array)}

    def _more(self) -> NDArray[np.int32]:
        return self.numbers[self._num_in_base :].copy()

    @classmethod
    def from_state(cls, empty: int, base: Tensors | None, changes: Tensors) -> Column:
        """Rebuild a column from what :meth:`to_state` gave.

        Raises
        ------
        ValueError, KeyError
            If that cannot be.
        """
        none = np.zeros(0, dtype=np.int32)
        if base is not None and set(base) != {"numbers"}:
            raise ValueError(f"the base of a column has {sorted(base)}")
        in_base = none if base is None else checked_array(base["numbers"], np.int32)
        rows, numbers, more = (
            checked_array(changes.get(name, none), np.int32) for name in ("rows", "numbers", "more")
        )
        if len(rows) != len(numbers) or (rows[1:] <= rows[:-1]).any():
            raise ValueError(f"{len(rows)} rows have {len(numbers)} numbers, or are not in order")
        if len(rows) and not 0 <= rows[0] <= rows[-1] < len(in_base):
            raise ValueError(f"rows up to {rows[-1]} changed, of {len(in_base)}")
        column = cls(empty)
        column._numbers = np.concatenate([in_base, none])
        column._num_rows = len(in_base)
        column._settle(read=base)
        column._in_base.update(zip(rows.tolist(), in_base[rows].tolist(), strict=True))
        column._numbers[rows] = numbers
        column._numbers = np.concatenate([column._numbers, more])
        column._num_rows = len(column._numbers)
        return column


def distinct(rows: Rows) -> Rows:
    """Give rows in order, each once."""
    rows = np.sort(rows)  # np.unique takes a hundred times as long for a million of them
    is_first = np.ones(len(rows), dtype=bool)
    is_first[1:] = rows[1:] != rows[:-1]
    return rows[is_first]


def _array_of(numbers: Collection[int]) -> NDArray[np.int32]:
    return np.fromiter(numbers, dtype=np.int32, count=len(numbers))


def checked_array(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """Give an array of a file back if it is a vector of this dtype.

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
