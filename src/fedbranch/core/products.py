"""Inner products of many updates, close to what the hardware can do.

A matrix of updates times its own transpose is symmetric, so half of the work is enough. On the
CPU, BLAS has a routine for that. Elsewhere, blocks of rows are multiplied only with the rows after
them. The other half is filled in, and the matrix scaled, strip by strip, without a second matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray
from scipy.linalg import get_blas_funcs

from fedbranch.core.parallel import num_cores
from fedbranch.types import Array

__all__ = [
    "BLOCK_COLUMNS",
    "TILE_ON_HOST",
    "column_blocks",
    "for_each_strip",
    "inner_products",
    "is_on_host",
    "mirror_scaled",
    "to_numpy",
    "upper_products",
]

# Columns that are summed together. A float32 dot product over one block is off by at most
# BLOCK_COLUMNS * 2**-24 of the product of the two norms. Longer blocks would be a little faster
# and less exact.
BLOCK_COLUMNS = 4096
# With more rows than this, BLAS certainly sums in blocks of its own, which are shorter than ours.
MOST_ROWS_IN_OUR_BLOCKS = 512
TILE_ON_HOST = 256  # rows of a tile that stays in the cache
TILE_ELSEWHERE = 4096  # where every operation is a launch
ROWS_PER_THREAD = 1024  # with fewer, a thread costs more than it saves

_Result = TypeVar("_Result")


def is_on_host(array: Array) -> bool:
    """Return whether an array is in main memory, where NumPy can use it without a copy."""
    return type(array) is np.ndarray or str(device(array)) == "cpu"


def to_numpy(array: object) -> NDArray[Any]:
    """Bring an array of any library, on any device, to NumPy."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "detach"):  # a tensor, perhaps on a GPU or part of a graph
        array = array.detach().cpu()
    return np.asarray(array)


def column_blocks(dim: int, width: int = BLOCK_COLUMNS) -> Iterator[slice]:
    """Cut ``dim`` columns, or rows, into blocks of at most ``width``."""
    for start in range(0, dim, width):
        yield slice(start, min(start + width, dim))


def inner_products(left: Array, right: Array, *, block_columns: int = BLOCK_COLUMNS) -> Array:
    """Multiply every row of one matrix with every row of another, summing in short blocks.

    Parameters
    ----------
    left, right
        Shapes (num_left, dim) and (num_right, dim).
    block_columns
        Columns that are summed together.

    Returns
    -------
    Array
        Shape (num_left, num_right).
    """
    xp = array_namespace(left)
    total: Array | None = None
    for block in column_blocks(left.shape[1], block_columns):
        part = xp.matmul(left[:, block], xp.permute_dims(right[:, block], (1, 0)))
        if total is None:
            total = part
        else:
            total += part
    assert total is not None
    return total


def upper_products(updates: Array) -> Array:
    """Multiply every row with itself and with the rows after it.

    Returns
    -------
    Array
        Shape (num_clients, num_clients). Entries below the diagonal are arbitrary.
    """
    num_clients = int(updates.shape[0])
    if is_on_host(updates) and num_clients > MOST_ROWS_IN_OUR_BLOCKS:
        rows = np.ascontiguousarray(to_numpy(updates))
        # Fortran reads our rows as columns, and what it calls lower is our upper triangle.
        syrk = get_blas_funcs("syrk", (rows,))
        # Memory of SciPy's own would first be filled with zeros, by one thread.
        memory = np.empty((num_clients, num_clients), rows.dtype)
        return _like(updates, syrk(1.0, rows.T, c=memory.T, overwrite_c=1, trans=1, lower=1).T)
    if num_clients <= MOST_ROWS_IN_OUR_BLOCKS:
        return inner_products(updates, updates)
    xp = array_namespace(updates)
    shape = (num_clients, num_clients)
    found: Array = xp.empty(shape, dtype=updates.dtype, device=device(updates))
    for block in column_blocks(num_clients, TILE_ELSEWHERE):
        found[block, block.start :] = inner_products(updates[block, :], updates[block.start :, :])
    return found


def mirror_scaled(matrix: Array, scale: Array, *, tile_rows: int | None = None) -> None:
    """Scale and clip the upper triangle to [-1, 1], and mirror it into the lower one.

    Parameters
    ----------
    matrix
        Shape (n, n). Changed in place.
    scale
        Shape (n,), of the matrix's dtype: entry (i, j) is multiplied by ``scale[i] * scale[j]``.
    tile_rows
        Rows of the tiles that are mirrored at once; by default a good size for the device.
    """
    on_host = is_on_host(matrix)
    if on_host:  # NumPy has the least overhead for small tiles
        matrix, scale = to_numpy(matrix), to_numpy(scale)
    xp = array_namespace(matrix)
    num_rows = int(matrix.shape[0])
    side = tile_rows
    if side is None:
        side = min(TILE_ON_HOST, max(1, num_rows // 16)) if on_host else TILE_ELSEWHERE
    place = xp.arange(min(side, num_rows), device=device(matrix))
    is_below = place[:, None] > place[None, :]

    def mirror(rows: slice) -> None:
        strip, tile = matrix[rows, rows.start :], matrix[rows, rows]  # views
        is_below_here = is_below[: tile.shape[0], : tile.shape[0]]
        tile[is_below_here] = 0  # arbitrary, perhaps infinite: not to be multiplied
        strip *= scale[rows][:, None]
        strip *= scale[rows.start :][None, :]
        xp.clip(strip, -1.0, 1.0, out=strip)
        matrix[rows.stop :, rows] = matrix[rows, rows.stop :].T
        matrix[rows, rows] = xp.where(is_below_here, tile.T, tile)

    for_each_strip(mirror, matrix, side)


def for_each_strip(
    work: Callable[[slice], _Result],
    matrix: Array,
    num_rows: int,
    *,
    num_threads: int | None = None,
) -> list[_Result]:
    """Call ``work`` for every strip of a matrix; if the matrix is large, on all cores at once.

    Parameters
    ----------
    work
        Gets the rows of the strip as a slice. Calls for different strips must not write to the
        same memory.
    matrix
        If it is on the host, several threads share its strips. That is worth it because NumPy
        releases the interpreter lock while it works on many numbers.
    num_rows
        Rows of a strip.
    num_threads
        By default one for each core, if each then has at least 1024 rows.

    Returns
    -------
    list
        The results, in the order of the strips.
    """
    strips = list(column_blocks(int(matrix.shape[0]), num_rows))
    if num_threads is None:
        num_threads = min(num_cores(), int(matrix.shape[0]) // ROWS_PER_THREAD)
    if num_threads < 2 or not is_on_host(matrix):
        return [work(rows) for rows in strips]
    with ThreadPoolExecutor(num_threads) as threads:
        # In the caller's context, which has NumPy's error state for invalid numbers.
        found = [threads.submit(copy_context().run, work, rows) for rows in strips]
        return [each.result() for each in found]


def _like(updates: Array, found: NDArray[np.floating]) -> Array:
    shared: Array = array_namespace(updates).asarray(found)
    return shared
