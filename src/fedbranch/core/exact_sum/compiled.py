"""The loops of exact sums in machine code, by Numba: every number is touched once.

They compute, bit for bit, the same as the NumPy code of :mod:`fedbranch.core.exact_sum.total` and
:mod:`fedbranch.core.exact_sum.block_norms`, which is their specification. All are in this one file,
because Numba keeps its machine code until the file changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic
from numba.types import Array, CPointer, boolean, float32, float64, int64, uint64, void
from numpy.typing import NDArray

from fedbranch.core.exact_sum.block_norms import NUMBERS_PER_BLOCK
from fedbranch.core.exact_sum.machine_code import compile_now

__all__ = ["add_plain", "add_rows", "block_squares", "carry", "measure_plain"]

BLOCK = 1024  # repeated here, as Numba would not notice a change in another file
assert BLOCK == NUMBERS_PER_BLOCK
COLUMNS_AT_ONCE = 1024  # a few rows of these and their sums stay in the first cache
NUMBERS_AHEAD = 128  # prefetched together; with more, the processor would wait
LINE_BYTES = 64  # of a cache line, on most machines

_UPDATES = Array(float32, 2, "C", readonly=True)
_NUMBERS = Array(float32, 1, "C", readonly=True)
_WHOLE = Array(int64, 1, "C", readonly=True)
_WEIGHTS = Array(float64, 1, "C", readonly=True)
_ADDRESSES = Array(uint64, 2, "C", readonly=True)


_inlined = njit(nogil=True, error_model="numpy", inline="always")


@_inlined  # type: ignore[untyped-decorator]
def _square_of(values: NDArray[np.float32], halves: NDArray[np.float32]) -> np.float64:
    """Compute the squared length of one block, with memory for half a block."""
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
    square: np.float64 = _sum_of(halves)
    return square


@_inlined  # type: ignore[untyped-decorator]
def _sum_of(halves: NDArray[np.float32]) -> np.float64:
    """Add the second half of the numbers to the first half, and so on; two steps at once."""
    length = BLOCK // 2
    while length > 2:
        quarter = length // 4
        one, two = halves[:quarter], halves[quarter : 2 * quarter]
        three, four = halves[2 * quarter : 3 * quarter], halves[3 * quarter : length]
        for i in range(quarter):
            one[i] = (one[i] + three[i]) + (two[i] + four[i])
        length = quarter
    return np.float64(halves[0] + halves[1])


@compile_now(void(_UPDATES, float64[:, ::1]))
def block_squares(updates: NDArray[np.float32], squares: NDArray[np.float64]) -> None:
    """Write the squared length of every block of every update, shape (n, num_blocks)."""
    num_rows, dim = updates.shape
    halves = np.empty(BLOCK // 2, np.float32)
    for row in range(num_rows):
        for block in range(squares.shape[1]):
            values = updates[row, block * BLOCK : min((block + 1) * BLOCK, dim)]
            squares[row, block] = _square_of(values, halves)


@_inlined  # type: ignore[untyped-decorator]
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
    """Add some columns of all rows, and fold them into the columns from ``place`` on."""
    signed_units, sums = table[start:end], low[start:end]
    number = 0
    while number + 1 < len(rows):  # two rows at once, so sums are read and written half as often
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


@_inlined  # type: ignore[untyped-decorator]
def _fold(
    vector: NDArray[np.float32], shifts: NDArray[np.int64], folded: NDArray[np.float32]
) -> None:
    """Fold a vector: block b of columns into the columns from ``shifts[b]`` on."""
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


@_inlined  # type: ignore[untyped-decorator]
def _write_sketch(
    folded: NDArray[np.float32],
    next_shifts: NDArray[np.int64],
    scale: np.float32,
    sketch: NDArray[np.float32],
) -> None:
    """Write the sketch of an update that was folded once."""
    if len(next_shifts) == 0:
        sketch[:] = folded
    else:
        sketch[:] = 0
        _fold(folded, next_shifts, sketch)
    for i in range(len(sketch)):
        sketch[i] *= scale


@_inlined  # type: ignore[untyped-decorator]
def _add_group(
    updates: NDArray[np.float32],
    rows: NDArray[np.int64],
    weights: NDArray[np.float64],
    table: NDArray[np.float32],
    low: NDArray[np.float64],
    folded: NDArray[np.float32],
    shifts: NDArray[np.int64],
) -> None:
    """Add at most as many rows as ``folded`` has."""
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


@compile_now(
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

    Before they are rounded they are folded: block b of ``folded.shape[1]`` columns into the columns
    from ``shifts[b]`` on, and around the end. These, folded once more if there are ``next_shifts``
    and times ``scale``, are the rows' sketches. If ``sketches`` has no rows, they are dropped.
    """
    for first in range(0, len(rows), len(folded)):
        few = rows[first : first + len(folded)]
        _add_group(updates, few, weights[first:], table, low, folded, shifts)
        if len(sketches):
            for number in range(len(few)):
                _write_sketch(folded[number], next_shifts, scale, sketches[few[number]])


@compile_now(void(float64[::1], float64[::1], float64))
def carry(low: NDArray[np.float64], high: NDArray[np.float64], units: float) -> None:
    """Move multiples of ``units`` from low to high, where each counts one."""
    for i in range(len(low)):
        moved = np.floor(low[i] / units + 0.5)
        high[i] += moved
        low[i] -= moved * units


# Raw updates


@intrinsic  # type: ignore[untyped-decorator]
def _numbers_at(typing_context: Any, address: Any) -> Any:  # noqa: ARG001 -- Numba's signature
    """Convert an address to a pointer to float32 numbers."""
    signature = CPointer(float32)(address)

    def generated(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, generated


@intrinsic  # type: ignore[untyped-decorator]
def _fetch(typing_context: Any, address: Any) -> Any:  # noqa: ARG001 -- Numba's signature
    """Prefetch a line of memory that is read soon; an invalid address does no harm."""

    def generated(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        whole = ir.IntType(32)
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        signature = ir.FunctionType(ir.VoidType(), [pointer.type, whole, whole, whole])
        function = get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
        # For reading, into all data caches.
        builder.call(function, [pointer, whole(0), whole(0), whole(1)])
        return context.get_dummy_value()

    return void(address), generated


@_inlined  # type: ignore[untyped-decorator]
def _places_of_blocks(
    lengths: NDArray[np.int64], num_blocks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the piece in which each block begins, and the count of numbers before it there."""
    pieces, behind = np.empty(num_blocks, np.int64), np.empty(num_blocks, np.int64)
    piece, done = 0, 0
    for block in range(num_blocks):
        while done >= lengths[piece]:
            done -= lengths[piece]
            piece += 1
        pieces[block], behind[block] = piece, done
        done += BLOCK
    return pieces, behind


@_inlined  # type: ignore[untyped-decorator]
def _write_block(
    addresses: NDArray[np.uint64],
    lengths: NDArray[np.int64],
    piece: int,
    behind: int,
    before: NDArray[np.float32],
    update: NDArray[np.float32],
    halves: NDArray[np.float32],
) -> np.float64:
    """Write a block of an update, the reply minus what was sent; return its squared length."""
    square: np.float64
    half = BLOCK // 2
    if len(before) == BLOCK and lengths[piece] - behind >= BLOCK:  # nearly always
        came_back = carray(_numbers_at(addresses[piece]), (lengths[piece],))
        first, second = came_back[behind : behind + half], came_back[behind + half : behind + BLOCK]
        own_first, own_second = before[:half], before[half:]
        into_first, into_second = update[:half], update[half:]
        for i in range(half):
            one, two = first[i] - own_first[i], second[i] - own_second[i]
            into_first[i], into_second[i] = one, two
            halves[i] = one * one + two * two
        square = _sum_of(halves)
        return square
    place = 0
    while place < len(before):
        here = min(lengths[piece] - behind, len(before) - place)
        came_back = carray(_numbers_at(addresses[piece]), (lengths[piece],))
        part = came_back[behind : behind + here]
        own, into = before[place : place + here], update[place : place + here]
        for i in range(here):
            into[i] = part[i] - own[i]
        place += here
        behind = 0
        piece += 1
    square = _square_of(update[: len(before)], halves)
    return square


@_inlined  # type: ignore[untyped-decorator]
def _add_block(
    update: NDArray[np.float32],
    start: int,
    weight: float,
    table: NDArray[np.float32],
    low: NDArray[np.float64],
    folded: NDArray[np.float32],
    shifts: NDArray[np.int64],
    next_address: np.uint64,
) -> None:
    """Add a block of columns from ``start`` on, and prefetch the numbers that are read next."""
    width, end = len(folded), start + len(update)
    fold = start // width
    within = start - fold * width
    at = start
    while at < end:
        place = within + shifts[fold]
        if place >= width:
            place -= width
        last = min(end, at + min(width - within, width - place))
        within += last - at
        if within == width:
            fold, within = fold + 1, 0
        while at < last:
            here = min(NUMBERS_AHEAD, last - at)
            for byte in range(4 * (at - start), 4 * (at - start + here), LINE_BYTES):
                _fetch(next_address + np.uint64(byte))
            part, signed_units = update[at - start : at - start + here], table[at : at + here]
            into, sums = folded[place : place + here], low[at : at + here]
            for i in range(here):
                scaled = part[i] * signed_units[i]
                into[i] += scaled
                sums[i] += weight * np.float64(np.rint(scaled))
            at += here
            place += here


@compile_now(void(_ADDRESSES, _WHOLE, _NUMBERS, float64[:, ::1]))
def measure_plain(
    addresses: NDArray[np.uint64],
    lengths: NDArray[np.int64],
    before: NDArray[np.float32],
    squares: NDArray[np.float64],
) -> None:
    """Write the squared length of every block of every update, shape (n, num_blocks)."""
    halves, update = np.empty(BLOCK // 2, np.float32), np.empty(BLOCK, np.float32)
    pieces, behind = _places_of_blocks(lengths, squares.shape[1])
    for row in range(len(addresses)):
        for block in range(squares.shape[1]):
            own = before[block * BLOCK : min((block + 1) * BLOCK, len(before))]
            squares[row, block] = _write_block(
                addresses[row], lengths, pieces[block], behind[block], own, update, halves
            )


@compile_now(
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
    folded: NDArray[np.float32],
    shifts: NDArray[np.int64],
    next_shifts: NDArray[np.int64],
    scale: np.float32,
    sketches: NDArray[np.float32],
    squares: NDArray[np.float64],
    is_added: NDArray[np.bool_],
) -> None:
    """Measure updates; add and sketch those with strongest blocks from ``least`` to ``most``.

    Updates longer than ``longest`` are not added.

    The loop goes block by block, for some rows at a time. So the sums and the parameters sent stay
    in the first cache, and each number of an update is read once, after it was prefetched. A row's
    strongest block and length are known only after the row was added. If it should not have been,
    the same numbers are subtracted again; that is exact, because sums are whole numbers.
    """
    num_blocks, dim = squares.shape[1], len(before)
    halves, update = np.empty(BLOCK // 2, np.float32), np.empty(BLOCK, np.float32)
    pieces, behind = _places_of_blocks(lengths, num_blocks)
    num_added = np.empty(len(folded), np.int64)  # blocks of each row
    for first in range(0, len(rows), len(folded)):
        few = rows[first : first + len(folded)]
        folded[: len(few)] = 0
        num_added[:] = 0
        for block in range(num_blocks):
            start, end = block * BLOCK, min((block + 1) * BLOCK, dim)
            for number in range(len(few)):
                row = few[number]
                squares[row, block] = _write_block(
                    addresses[row],
                    lengths,
                    pieces[block],
                    behind[block],
                    before[start:end],
                    update,
                    halves,
                )
                # False for squares that are not finite.
                if num_added[number] == block and np.sqrt(squares[row, block]) < most:
                    next_block = block if number + 1 < len(few) else min(block + 1, num_blocks - 1)
                    next_row = few[(number + 1) % len(few)]
                    next_address = addresses[next_row, pieces[next_block]]
                    next_address += np.uint64(4 * behind[next_block])
                    _add_block(
                        update[: end - start],
                        start,
                        weights[row],
                        table,
                        low,
                        folded[number],
                        shifts,
                        next_address,
                    )
                    num_added[number] = block + 1
        for number in range(len(few)):
            row = few[number]
            strongest, total = 0.0, 0.0
            for block in range(num_blocks):
                strongest = max(strongest, squares[row, block])
                total += squares[row, block]
            if (
                num_added[number] == num_blocks
                and np.sqrt(strongest) >= least
                and np.sqrt(total) <= longest
            ):
                is_added[row] = True
                _write_sketch(folded[number], next_shifts, scale, sketches[row])
                continue
            for block in range(num_added[number]):
                start, end = block * BLOCK, min((block + 1) * BLOCK, dim)
                _write_block(
                    addresses[row],
                    lengths,
                    pieces[block],
                    behind[block],
                    before[start:end],
                    update,
                    halves,
                )
                _add_block(
                    update[: end - start],
                    start,
                    -weights[row],
                    table,
                    low,
                    folded[number],
                    shifts,
                    addresses[row, pieces[block]],
                )
