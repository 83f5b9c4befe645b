"""Raw updates: reply arrays minus the model sent, evaluated where they are in memory.

A reply is several arrays in several places. Writing all updates to one matrix and reading them
again takes longer than summing them. So :meth:`fedbranch.core.exact_sum.total.ExactSum.add_plain`
sums them straight from the replies. That needs Numba.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.exact_sum.block_norms import NUMBERS_PER_BLOCK
from fedbranch.core.exact_sum.machine_code import machine_code

__all__ = ["Differences"]

# In CPython, the content of a bytes object begins at this offset from its address.
CONTENT_OFFSET = bytes.__basicsize__ - 1


class Differences:
    """Updates as the difference between replies and the model that was sent, in float32.

    Parameters
    ----------
    came_back
        The pieces of the first reply in their order, then those of the second, and so on.
    offsets, lengths
        Shape (num_pieces,): for each piece, the bytes before its numbers, and the count of
        numbers.
    before
        Shape (dim,): the parameters that were sent. They must not be changed afterwards.

    Attributes
    ----------
    addresses
        Shape (num_updates, num_pieces): the addresses of the numbers, valid while this object
        exists.

    Examples
    --------
    >>> sent = np.float32([1.0, 2.0, 3.0])
    >>> pieces = [np.float32([1.5, 2.0]).tobytes(), np.float32([2.0]).tobytes()]
    >>> Differences(pieces, offsets=[0, 0], lengths=[2, 1], before=sent).written()
    array([[ 0.5,  0. , -1. ]], dtype=float32)
    """

    def __init__(
        self,
        came_back: Sequence[bytes],
        offsets: Sequence[int],
        lengths: Sequence[int],
        before: NDArray[np.float32],
    ) -> None:
        self._came_back = tuple(came_back)  # keeps the pieces at their addresses
        self._offsets = tuple(offsets)
        self.before = np.ascontiguousarray(before, np.float32)
        # Machine code checks nothing.
        if set(map(type, self._came_back)) - {bytes}:
            raise TypeError("updates can be read from bytes only: nothing else stays where it is")
        if len(offsets) != len(lengths) or len(self._came_back) % len(lengths):
            raise ValueError(
                f"{len(self._came_back)} pieces cannot be updates of {len(lengths)} pieces with "
                f"{len(offsets)} offsets"
            )
        ends = [offset + 4 * length for offset, length in zip(offsets, lengths, strict=True)]
        sizes = np.fromiter(map(len, self._came_back), np.int64, len(self._came_back))
        sizes = sizes.reshape(-1, len(lengths))
        if (
            min(*offsets, *lengths) < 0
            or sum(lengths) != len(self.before)
            or (sizes < np.array([min(end, 2**62) for end in ends])).any()
        ):
            raise ValueError(
                f"pieces of {sizes[:1].tolist()} bytes ... cannot hold {list(lengths)} numbers "
                f"behind {list(offsets)} bytes, which make an update of {len(self.before)}"
            )
        self.lengths = np.array(lengths, np.int64)
        addresses = np.fromiter(map(id, self._came_back), np.uint64, len(self._came_back))
        behind = np.array(offsets, np.uint64) + np.uint64(CONTENT_OFFSET)
        self.addresses = addresses.reshape(sizes.shape) + behind

    @staticmethod
    @lru_cache
    def can_be_read() -> bool:
        """Return whether there is machine code, and bytes are where it expects them."""
        probe = b"fedbranch"
        return (
            sys.implementation.name == "cpython"
            and ctypes.string_at(id(probe) + CONTENT_OFFSET, len(probe)) == probe
            and machine_code() is not None
        )

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def shape(self) -> tuple[int, int]:
        """(num_updates, dim), as of a matrix of the updates."""
        return len(self.addresses), len(self.before)

    @cached_property
    def squares(self) -> NDArray[np.float64]:
        """Shape (num_updates, num_blocks): the squared length of every block of an update."""
        compiled = machine_code()
        assert compiled is not None
        squares = np.empty((len(self), -(-len(self.before) // NUMBERS_PER_BLOCK)))
        compiled.measure_plain(self.addresses, self.lengths, self.before, squares)
        return squares

    def written(self, rows: Sequence[int] | None = None) -> NDArray[np.float32]:
        """Write updates, by default all, to a matrix of shape (num_rows, dim)."""
        rows = range(len(self)) if rows is None else rows
        updates = np.empty((len(rows), len(self.before)), np.float32)
        num_pieces = len(self.lengths)
        for update, row in zip(updates, rows, strict=True):
            pieces = self._came_back[row * num_pieces : (row + 1) * num_pieces]
            start = 0
            for piece, offset, length in zip(
                pieces, self._offsets, self.lengths.tolist(), strict=True
            ):
                place = slice(start, start + length)
                came_back = np.frombuffer(piece, np.float32, length, offset)
                with np.errstate(invalid="ignore", over="ignore"):
                    np.subtract(came_back, self.before[place], out=update[place])
                start += length
        return updates
