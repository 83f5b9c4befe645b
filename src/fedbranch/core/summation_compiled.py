"""The loops of exact sums in machine code, by Numba: every number is touched once.

They give, bit for bit, what the NumPy code of :mod:`fedbranch.core.summation` gives, which says
what they do and why; that module loads this one if Numba is installed.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numba.types import Array, float32, float64, int64, void
from numpy.typing import NDArray

from fedbranch.core.machine_code import compiled

__all__ = ["BLOCK", "add_rows", "block_squares", "carry", "square_of"]

BLOCK = 1024  # as in summation
COLUMNS_AT_ONCE = 1024  # of which a few rows and their sums stay in the first cache

_UPDATES = Array(float32, 2, "C", readonly=True)
_NUMBERS = Array(float32, 1, "C", readonly=True)
_WHOLE = Array(int64, 1, "C", readonly=True)


@njit(nogil=True, error_model="numpy", inline="always")  # type: ignore[untyped-decorator]
def square_of(values: NDArray[np.float32], halves: NDArray[np.float32]) -> float:
    """Give the squared length of one block, with memory for half of one."""
    half = BLOCK // 2
    if len(values) == BLOCK:
        first, second = values[:half], values[half:]
        for i in range(half):
            halves[i] = first[i] * first[i] + second[i] * second[i]
    else:
        for i in range(half):
            halves[i] = 0.0
        for i in range(min(half, len(values))):
            halves[i] = values[i] * values[i]
        for i in range(half, len(values)):
            halves[i - half] += values[i] * values[i]
    while half > 1:
        half //= 2
        first, second = halves[:half], halves[half : 2 * half]
        for i in range(half):
            first[i] += second[i]
    return np.float64(halves[0])


@compiled(void(_UPDATES, float64[:, ::1]))
def block_squares(updates: NDArray[np.float32], squares: NDArray[np.float64]) -> None:
    """Write the squared length of every block of every update, shape (n, num_blocks)."""
    num_rows, dim = updates.shape
    halves = np.empty(BLOCK // 2, np.float32)
    for row in range(num_rows):
        for block in range(squares.shape[1]):
            values = updates[row, block * BLOCK : min((block + 1) * BLOCK, dim)]
            squares[row, block] = square_of(values, halves)


@njit(nogil=True, error_model="numpy", inline="always")  # type: ignore[untyped-decorator]
def _add_few(
    updates: NDArray[np.float32],
    rows: NDArray[np.int64],
    weights: NDArray[np.float64],
    table: NDArray[np.float32],
    low: NDArray[np.float64],
    folded: NDArray[np.float32],
    start: int,
    end: int,
    place: int,
) -> None:
    """Add some columns of all rows; they are folded into those that begin at a place."""
    signed_units, sums = table[start:end], low[start:end]
    number = 0
    while number + 1 < len(rows):  # two rows at once: the sums are read and written half as often
        one, two = updates[rows[number], start:end], updates[rows[number + 1], start:end]
        into_one = folded[number, place : place + end - start]
        into_two = folded[number + 1, place : place + end - start]
        weight_one, weight_two = weights[number], weights[number + 1]
        for i in range(end - start):
            scaled_one, scaled_two = one[i] * signed_units[i], two[i] * signed_units[i]
            into_one[i] += scaled_one
            into_two[i] += scaled_two
            sums[i] += weight_one * np.float64(np.rint(scaled_one)) + weight_two * np.float64(
                np.rint(scaled_two)
            )
        number += 2
    if number < len(rows):
        one = updates[rows[number], start:end]
        into_one = folded[number, place : place + end - start]
        weight_one = weights[number]
        for i in range(end - start):
            scaled_one = one[i] * signed_units[i]
            into_one[i] += scaled_one
            sums[i] += weight_one * np.float64(np.rint(scaled_one))


@njit(nogil=True, error_model="numpy", inline="always")  # type: ignore[untyped-decorator]
def _fold(
    vector: NDArray[np.float32], shifts: NDArray[np.int64], folded: NDArray[np.float32]
) -> None:
    """Fold a vector: block number b of columns into those that begin at ``shifts[b]``."""
    width, dim = len(folded), len(vector)
    for block in range(len(shifts)):
        start, place = block * width, shifts[block]
        end = min(start + width, dim)
        while start < end:
            here = min(end - start, width - place)
            part, into = vector[start : start + here], folded[place : place + here]
            for i in range(here):
                into[i] += part[i]
            start += here
            place = 0


@njit(nogil=True, error_model="numpy", inline="always")  # type: ignore[untyped-decorator]
def _add_group(
    updates: NDArray[np.float32],
    rows: NDArray[np.int64],
    weights: NDArray[np.float64],
    table: NDArray[np.float32],
    low: NDArray[np.float64],
    folded: NDArray[np.float32],
    shifts: NDArray[np.int64],
) -> None:
    """Add so many rows as can be folded at once."""
    width, dim = folded.shape[1], updates.shape[1]
    folded[: len(rows)] = 0
    for block in range(len(shifts)):
        start = block * width
        end = min(start + width, dim)
        place = shifts[block]
        while start < end:
            here = min(COLUMNS_AT_ONCE, end - start, width - place)
            _add_few(updates, rows, weights, table, low, folded, start, start + here, place)
            start += here
            place = (place + here) % width


@compiled(
    void(
        _UPDATES,
        _WHOLE,
        Array(float64, 1, "C", readonly=True),
        _NUMBERS,
        float64[::1],
        float32[:, ::1],
        _WHOLE,
        _WHOLE,
        float32,
        float32[:, ::1],
    )
)
def add_rows(
    updates: NDArray[np.float32],
    rows: NDArray[np.int64],
    weights: NDArray[np.float64],
    table: NDArray[np.float32],
    low: NDArray[np.float64],
    folded: NDArray[np.float32],
    shifts: NDArray[np.int64],
    next_shifts: NDArray[np.int64],
    scale: np.float32,
    sketches: NDArray[np.float32],
) -> None:
    """Add rows of updates times the table, rounded, times their weights, to the sums ``low``.

    Before they are rounded they are folded: block number b of ``folded.shape[1]`` columns into
    those that begin at ``shifts[b]``, and around the end. These, if need be folded once more and
    times ``scale``, are the rows' sketches; without any rows there, they are forgotten.
    """
    for first in range(0, len(rows), len(folded)):
        few = rows[first : first + len(folded)]
        _add_group(updates, few, weights[first:], table, low, folded, shifts)
        if len(sketches):
            for number in range(len(few)):
                sketch = sketches[few[number]]
                if len(next_shifts) == 0:
                    sketch[:] = folded[number]
                else:
                    sketch[:] = 0
                    _fold(folded[number], next_shifts, sketch)
                for i in range(len(sketch)):
                    sketch[i] *= scale


@compiled(void(float64[::1], float64[::1], float64))
def carry(low: NDArray[np.float64], high: NDArray[np.float64], units: float) -> None:
    """Move what is large from low to high, so many units for one."""
    for i in range(len(low)):
        moved = np.floor(low[i] / units + 0.5)
        high[i] += moved
        low[i] -= moved * units
