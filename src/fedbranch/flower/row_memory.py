"""Memory for the updates of a round, used again in the next one."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

__all__ = ["RowMemory"]

# Every view of an array refers to it. Two references are ours: the attribute, and the argument
# of the function that counts.
OWN_REFERENCES = 2


class RowMemory:
    """A matrix of float32 that is handed out again as soon as nothing refers to it.

    To allocate a new matrix of that size costs more than to write the updates into it.

    Examples
    --------
    >>> memory = RowMemory()
    >>> first = memory.rows(10, num_columns=2)
    >>> address = first.ctypes.data
    >>> memory.rows(2, num_columns=2).ctypes.data == address  # ``first`` is still in use
    False
    >>> del first
    >>> memory.rows(2, num_columns=2).ctypes.data == address
    True
    """

    def __init__(self) -> None:
        self._matrix = np.zeros((0, 0), np.float32)

    def rows(self, num_rows: int, num_columns: int) -> NDArray[np.float32]:
        """Return a matrix of this shape; its entries are arbitrary.

        Memory that is still in use is not written over: then the matrix is a new one.
        """
        is_large_enough = len(self._matrix) >= num_rows and self._matrix.shape[1] == num_columns
        is_in_use = sys.getrefcount(self._matrix) > OWN_REFERENCES
        if is_large_enough and not is_in_use:
            return self._matrix[:num_rows]
        matrix = np.zeros((num_rows, num_columns), np.float32)
        if not is_large_enough or num_rows >= len(self._matrix) // 2:
            self._matrix = matrix  # a small one for second replies does not replace a large one
        return matrix[:num_rows]
