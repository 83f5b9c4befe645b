"""How long updates are, each measured by itself, in one pass.

Numbers are squared and added up block by block in float32, in an order that is the same on every
machine, and the blocks in float64. The length of the strongest block says as well how large the
entries are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.exact_sum.machine_code import worthwhile_machine_code

__all__ = [
    "BLOCK",
    "STRONGEST",
    "WEAKEST",
    "Extent",
    "extents",
    "is_plain",
    "lengths_of",
    "strongest_of",
]

# Numbers per dot product in float32: so short that its rounding does not show.
BLOCK = 1024
# Of updates with strongest blocks of such lengths no square leaves float32 or its digits.
WEAKEST, STRONGEST = 1e-12, 1e18
BLOCKS_AT_ONCE = 128


class Extent(NamedTuple):
    """How long updates are, and how large.

    Attributes
    ----------
    lengths
        Shape (n,): Euclidean lengths, to about 1e-7 of themselves. NaN or infinite if the
        update is not finite or beyond 1e30.
    strongest
        Shape (n,): the length of the strongest block of 1024 numbers; the largest entry is
        at most that, and at least 1/32 of it.
    """

    lengths: NDArray[np.float64]
    strongest: NDArray[np.float64]


def extents(updates: NDArray[np.float32]) -> Extent:
    """Measure updates, shape (n, dim), each by itself, in one pass.

    Examples
    --------
    >>> extents(np.float32([[3.0, 4.0], [0.0, 2.0**100]])).lengths == [5.0, 2.0**100]
    array([ True,  True])
    """
    squares = _block_squares(updates)
    found = Extent(lengths_of(squares), strongest_of(squares))
    # Squares of such numbers leave float32 or its digits; there are few such updates.
    odd = np.flatnonzero(~((found.strongest > WEAKEST) & (found.strongest < STRONGEST)))
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
    """Give the lengths of the strongest blocks, from the squared lengths of all."""
    strongest: NDArray[np.float64] = np.sqrt(squares.max(axis=1, initial=0.0))
    return strongest


def lengths_of(squares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Give the lengths of updates, from the squared lengths of their blocks."""
    lengths: NDArray[np.float64] = np.sqrt(squares.sum(axis=1))
    return lengths


def _block_squares(updates: NDArray[np.floating]) -> NDArray[np.float64]:
    """Give the squared length of every block, shape (n, num_blocks).

    The second half of a block's squares is added to the first, and so on with what is left: an
    order that is the same on every machine. What a block lacks at the end counts as zeros.
    """
    num_rows, dim = updates.shape
    squares = np.zeros((num_rows, -(-dim // BLOCK)))
    compiled = worthwhile_machine_code(updates.size) if is_plain(updates) else None
    if compiled is not None:
        compiled.block_squares(updates, squares)
        return squares
    num_whole = dim // BLOCK
    whole = updates[:, : num_whole * BLOCK].reshape(num_rows, num_whole, BLOCK)
    memory = np.empty((min(num_whole, BLOCKS_AT_ONCE), BLOCK), updates.dtype)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for row in range(num_rows):
            for first in range(0, num_whole, BLOCKS_AT_ONCE):
                part = whole[row, first : first + BLOCKS_AT_ONCE]
                squared = np.square(part, out=memory[: len(part)])
                squares[row, first : first + len(part)] = _halved(squared)
        if dim % BLOCK:
            rest = np.zeros((num_rows, BLOCK), updates.dtype)
            np.square(updates[:, num_whole * BLOCK :], out=rest[:, : dim % BLOCK])
            squares[:, -1] = _halved(rest)
    return squares


def _halved(squares: NDArray[np.floating]) -> NDArray[np.floating]:
    """Add up rows of BLOCK squares."""
    half = BLOCK
    while half > 32:
        half //= 2
        squares = squares[:, :half] + squares[:, half:]
    few = np.ascontiguousarray(squares.T)  # short rows take long
    while half > 1:
        half //= 2
        few[:half] += few[half : 2 * half]
    sums: NDArray[np.floating] = few[0]
    return sums


def is_plain(updates: NDArray[np.floating]) -> bool:
    """Whether updates lie in memory as machine code expects it."""
    return (
        updates.dtype == np.float32
        and updates.dtype.isnative
        and updates.flags.c_contiguous
        and updates.flags.aligned
    )
