"""Lengths of updates, and of their strongest blocks, in one pass over each.

Numbers are squared and summed block by block in float32, in an order that is the same on every
machine, and the blocks in float64. The length of the strongest block bounds the largest entry, from
above and from below.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.exact_sum.machine_code import worthwhile_machine_code

__all__ = [
    "LONGEST_SAFE",
    "NUMBERS_PER_BLOCK",
    "SHORTEST_SAFE",
    "Extent",
    "extents",
    "is_plain",
    "lengths_of",
    "strongest_of",
]

NUMBERS_PER_BLOCK = 1024  # few enough that rounding in float32 does not show
# If the length of the strongest block is between these, no square overflows or loses digits.
SHORTEST_SAFE, LONGEST_SAFE = 1e-12, 1e18
BLOCKS_AT_ONCE = 128


class Extent(NamedTuple):
    """The lengths of updates, and bounds of their entries.

    Attributes
    ----------
    lengths
        Shape (n,): Euclidean lengths, to about 1e-7 of themselves. NaN or infinite for an
        update that is not finite or beyond 1e30.
    strongest
        Shape (n,): the length of the strongest block of 1024 numbers; the largest entry is
        at most that, and at least 1/32 of it.
    """

    lengths: NDArray[np.float64]
    strongest: NDArray[np.float64]


def extents(updates: NDArray[np.float32]) -> Extent:
    """Compute the lengths of updates, shape (n, dim), each by itself and in one pass.

    Examples
    --------
    >>> extents(np.float32([[3.0, 4.0], [0.0, 2.0**100]])).lengths == [5.0, 2.0**100]
    array([ True,  True])
    """
    squares = _block_squares(updates)
    found = Extent(lengths_of(squares), strongest_of(squares))
    # The others are measured in float64; there are few.
    odd = np.flatnonzero(~((found.strongest > SHORTEST_SAFE) & (found.strongest < LONGEST_SAFE)))
    for row in odd.tolist():
        largest = float(np.abs(updates[row]).max())
        if largest == 0 or not largest <= 1e31:
            found.lengths[row] = found.strongest[row] = largest if largest == 0 else math.nan
            continue
        # A power of two, so that nothing is rounded.
        scale = math.ldexp(1.0, math.frexp(largest)[1])
        wide = _block_squares(updates[row : row + 1].astype(np.float64) / scale)
        found.lengths[row] = scale * math.sqrt(float(wide.sum()))
        found.strongest[row] = scale * math.sqrt(float(wide.max()))
    return found


def strongest_of(squares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the lengths of the strongest blocks, from the squared lengths of all blocks."""
    strongest: NDArray[np.float64] = np.sqrt(squares.max(axis=1, initial=0.0))
    return strongest


def lengths_of(squares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the lengths of updates, from the squared lengths of their blocks."""
    lengths: NDArray[np.float64] = np.sqrt(squares.sum(axis=1))
    return lengths


def _block_squares(updates: NDArray[np.floating]) -> NDArray[np.float64]:
    """Compute the squared length of every block, shape (n, num_blocks).

    The second half of a block's squares is added to the first half, and so on with the sums: an
    order that is the same on every machine. The last block is filled up with zeros.
    """
    num_rows, dim = updates.shape
    squares = np.zeros((num_rows, -(-dim // NUMBERS_PER_BLOCK)))
    compiled = worthwhile_machine_code(updates.size) if is_plain(updates) else None
    if compiled is not None:
        compiled.block_squares(updates, squares)
        return squares
    num_whole = dim // NUMBERS_PER_BLOCK
    whole = updates[:, : num_whole * NUMBERS_PER_BLOCK].reshape(
        num_rows, num_whole, NUMBERS_PER_BLOCK
    )
    memory = np.empty((min(num_whole, BLOCKS_AT_ONCE), NUMBERS_PER_BLOCK), updates.dtype)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for row in range(num_rows):
            for first in range(0, num_whole, BLOCKS_AT_ONCE):
                part = whole[row, first : first + BLOCKS_AT_ONCE]
                squared = np.square(part, out=memory[: len(part)])
                squares[row, first : first + len(part)] = _halved(squared)
        if dim % NUMBERS_PER_BLOCK:
            rest = np.zeros((num_rows, NUMBERS_PER_BLOCK), updates.dtype)
            np.square(
                updates[:, num_whole * NUMBERS_PER_BLOCK :], out=rest[:, : dim % NUMBERS_PER_BLOCK]
            )
            squares[:, -1] = _halved(rest)
    return squares


def _halved(squares: NDArray[np.floating]) -> NDArray[np.floating]:
    """Sum rows of ``NUMBERS_PER_BLOCK`` squares."""
    half = NUMBERS_PER_BLOCK
    while half > 32:
        half //= 2
        squares = squares[:, :half] + squares[:, half:]
    few = np.ascontiguousarray(squares.T)  # operations on short rows take long
    while half > 1:
        half //= 2
        few[:half] += few[half : 2 * half]
    sums: NDArray[np.floating] = few[0]
    return sums


def is_plain(updates: NDArray[np.floating]) -> bool:
    """Return whether updates have the memory layout that machine code expects."""
    return (
        updates.dtype == np.float32
        and updates.dtype.isnative
        and updates.flags.c_contiguous
        and updates.flags.aligned
    )
