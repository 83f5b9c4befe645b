"""The loops of exact sums in machine code, by Numba: every number is touched once.

They give, bit for bit, what the NumPy code of :mod:`fedbranch.core.summation` and
:mod:`fedbranch.core.extents` gives, which say what they do and why. All of them are in this one
file, since Numba keeps its machine code until the file changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit
from numba.extending import intrinsic
from numba.types import Array, CPointer, boolean, float32, float64, int64, uint64, void
from numpy.typing import NDArray

from fedbranch.core import extents
from fedbranch.core.machine_code import compiled

__all__ = ["add_plain", "add_rows", "block_squares", "carry"]

BLOCK = 1024  # as there; Numba would not see that it changed in another file
assert BLOCK == extents.BLOCK
COLUMNS_AT_ONCE = 1024  # of which a few rows and their sums stay in the first cache

_UPDATES = Array(float32, 2, "C", readonly=True)
_NUMBERS = Array(float32, 1, "C", readonly=True)
_WHOLE = Array(int64, 1, "C", readonly=True)
_WEIGHTS = Array(float64, 1, "C", readonly=True)
_ADDRESSES = Array(uint64, 2, "C", readonly=True)


@njit(nogil=True, error_model="numpy", inline="always")  # type: ignore[untyped-decorator]
def _square_of(values: NDArray[np.float32], halves: NDArray[np.float32]) -> float:
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
            squares[row, block] = _square_of(values, halves)


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
def _write_sketch(
    folded: NDArray[np.float32],
    next_shifts: NDArray[np.int64],
    scale: np.float32,
    sketch: NDArray[np.float32],
) -> None:
    """Make a sketch of an update that was folded once."""
    if len(next_shifts) == 0:
        sketch[:] = folded
    else:
        sketch[:] = 0
        _fold(folded, next_shifts, sketch)
    for i in range(len(sketch)):
        sketch[i] *= scale


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
        _WEIGHTS,
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
                _write_sketch(folded[number], next_shifts, scale, sketches[few[number]])


@compiled(void(float64[::1], float64[::1], float64))
def carry(low: NDArray[np.float64], high: NDArray[np.float64], units: float) -> None:
    """Move what is large from low to high, so many units for one."""
    for i in range(len(low)):
        moved = np.floor(low[i] / units + 0.5)
        high[i] += moved
        low[i] -= moved * units


# Updates that are not written down yet


@intrinsic  # type: ignore[untyped-decorator]
def _numbers_at(typing_context: Any, address: Any) -> Any:  # noqa: ARG001 -- Numba's signature
    """See an address as that of float32 numbers."""
    signature = CPointer(float32)(address)

    def generated(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, generated


@njit(nogil=True, error_model="numpy", inline="always")  # type: ignore[untyped-decorator]
def _write_two(
    one: NDArray[np.uint64],
    two: NDArray[np.uint64],
    lengths: NDArray[np.int64],
    before: NDArray[np.float32],
    updates: NDArray[np.float32],
    squares_of_one: NDArray[np.float64],
    squares_of_two: NDArray[np.float64],
    halves: NDArray[np.float32],
) -> None:
    """Write what came back, at some addresses, minus what was sent; of two updates.

    And the squared length of each block of them, while that is in the processor's first cache.
    Both at once, because to wait for memory twice at a time takes half as long.
    """
    dim = len(before)
    place = 0
    for piece in range(len(one)):
        length = lengths[piece]
        from_one = carray(_numbers_at(one[piece]), (length,))
        from_two = carray(_numbers_at(two[piece]), (length,))
        done = 0
        while done < length:
            block = place // BLOCK
            last = min((block + 1) * BLOCK, dim)
            here = min(last - place, length - done)
            came_one, came_two = from_one[done : done + here], from_two[done : done + here]
            own = before[place : place + here]
            into_one, into_two = updates[0, place : place + here], updates[1, place : place + here]
            for i in range(here):
                into_one[i] = came_one[i] - own[i]
                into_two[i] = came_two[i] - own[i]
            place += here
            done += here
            if place == last:
                squares_of_one[block] = _square_of(updates[0, block * BLOCK : last], halves)
                squares_of_two[block] = _square_of(updates[1, block * BLOCK : last], halves)


@compiled(
    void(
        _ADDRESSES,
        _WHOLE,
        _NUMBERS,
        _WHOLE,
        _WEIGHTS,
        float64,
        float64,
        float64,
        _NUMBERS,
        float64[::1],
        float32[:, ::1],
        float32[:, ::1],
        _WHOLE,
        _WHOLE,
        float32,
        float32[:, ::1],
        float64[:, ::1],
        boolean[::1],
    )
)
def add_plain(
    addresses: NDArray[np.uint64],
    lengths: NDArray[np.int64],
    before: NDArray[np.float32],
    rows: NDArray[np.int64],
    weights: NDArray[np.float64],
    least: float,
    most: float,
    longest: float,
    table: NDArray[np.float32],
    low: NDArray[np.float64],
    memory: NDArray[np.float32],
    folded: NDArray[np.float32],
    shifts: NDArray[np.int64],
    next_shifts: NDArray[np.int64],
    scale: np.float32,
    sketches: NDArray[np.float32],
    squares: NDArray[np.float64],
    is_added: NDArray[np.bool_],
) -> None:
    """Measure updates; add and sketch those with strongest blocks from ``least`` to ``most``.

    But not those longer than ``longest``. Two at a time are written into memory, and what becomes
    of them there is what :func:`add_rows` does.
    """
    halves = np.empty(BLOCK // 2, np.float32)
    there = np.empty(2, np.int64)  # which of the two are added
    counted = np.empty(2)
    for number in range(0, len(rows), 2):
        two = rows[number : number + 2]
        _write_two(
            addresses[two[0]],
            addresses[two[-1]],
            lengths,
            before,
            memory,
            squares[two[0]],
            squares[two[-1]],
            halves,
        )
        num_added = 0
        for place in range(len(two)):
            row = two[place]
            strongest, total = 0.0, 0.0
            for block in range(squares.shape[1]):
                strongest = max(strongest, squares[row, block])
                total += squares[row, block]
            # What is not finite is not in between.
            if least <= np.sqrt(strongest) < most and np.sqrt(total) <= longest:
                there[num_added], counted[num_added] = place, weights[row]
                is_added[row] = True
                num_added += 1
        _add_group(memory, there[:num_added], counted, table, low, folded, shifts)
        for place in range(num_added):
            _write_sketch(folded[place], next_shifts, scale, sketches[two[there[place]]])
