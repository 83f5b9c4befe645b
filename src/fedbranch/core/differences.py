"""Updates that nobody has written down yet: what came back, in pieces, less what was sent.

Replies lie in memory as they came, an array here and an array there. To write all updates down
first and to read them again takes longer than adding them up; so who only adds them up goes over
them where they are (:meth:`fedbranch.core.summation.ExactSum.add_plain`). Needs Numba.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.machine_code import machine_code

__all__ = ["Differences"]

# How far behind the address of a bytes object its bytes begin, in CPython; Numba needs that too.
BYTES_BEGIN = bytes.__basicsize__ - 1


class Differences:
    """Updates as what came back and what was sent, all of it float32.

    Parameters
    ----------
    came_back
        The pieces of the first update in their order, then those of the second, and so on.
    offsets, lengths
        Shape (num_pieces,): behind how many bytes the numbers of each piece begin, and how many
        there are.
    before
        Shape (dim,): what was sent.

    Attributes
    ----------
    addresses
        Shape (num_updates, num_pieces): where the numbers are, as long as this object is there.

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
        self.lengths = np.array(lengths, np.int64)
        starts = np.array(offsets, np.int64)
        self.before = np.ascontiguousarray(before, np.float32)
        # Machine code believes what it is told.
        if set(map(type, came_back)) - {bytes}:
            raise TypeError("updates can be read from bytes only: nothing else stays where it is")
        sizes = np.fromiter(map(len, came_back), np.int64, len(came_back))
        sizes = sizes.reshape(-1, len(self.lengths))
        if (
            len(starts) != len(self.lengths)
            or min(starts.min(initial=0), self.lengths.min(initial=0)) < 0
            or self.lengths.sum() != len(self.before)
            or (sizes < starts + 4 * self.lengths).any()
        ):
            raise ValueError(
                f"pieces of {sizes[:1].tolist()} bytes ... cannot hold {lengths} numbers behind "
                f"{offsets} bytes, which make an update of {len(self.before)}"
            )
        self._came_back = came_back  # or there would be nothing at these addresses
        addresses = np.fromiter(map(id, came_back), np.uint64, len(came_back)).reshape(sizes.shape)
        self.addresses = addresses + (starts + BYTES_BEGIN).astype(np.uint64)

    @staticmethod
    @lru_cache
    def can_be_read() -> bool:
        """Whether there is machine code for it, and bytes are where it expects them."""
        probe = b"fedbranch"
        return (
            sys.implementation.name == "cpython"
            and ctypes.string_at(id(probe) + BYTES_BEGIN, len(probe)) == probe
            and machine_code() is not None
        )

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def shape(self) -> tuple[int, int]:
        """How many updates, and how many numbers each of them has."""
        return len(self.addresses), len(self.before)

    def written(self, rows: Sequence[int] | None = None) -> NDArray[np.float32]:
        """Write updates down, by default all: shape (num_rows, dim)."""
        addresses = self.addresses if rows is None else self.addresses[list(rows)]
        updates = np.empty((len(addresses), len(self.before)), np.float32)
        compiled = machine_code()
        assert compiled is not None
        compiled.write_differences(addresses, self.lengths, self.before, updates)
        return updates
