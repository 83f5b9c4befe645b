"""Inner products of many updates, close to what the hardware can do.

A matrix of updates times its own transpose is symmetric, so one half of the work is enough:
BLAS has a routine for that on the CPU, and elsewhere blocks of rows meet only those after them.
The other half is filled in, and all of it scaled, tile by tile, without a second matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray
from scipy.linalg import get_blas_funcs

__all__ = [
    "BLOCK",
    "Array",
    "column_blocks",
    "is_on_host",
    "mirror_scaled",
    "products",
    "to_numpy",
    "upper_products",
]

# An array of whichever Array API library the caller uses. There is no static type for
# "an array of any library", so the functions check what they get at run time.
Array: TypeAlias = NDArray[np.floating]

# Columns per block. A float32 dot product over one block is off by at most
# BLOCK * 2**-24 of the product of the two norms; longer blocks would be a little
# faster and less exact.
BLOCK = 4096
# Beyond so many rows BLAS certainly sums in blocks of its own, shorter than ours.
MANY_ROWS = 512
TILE_ON_HOST = 128  # rows of a tile that stays in the cache
TILE_ELSEWHERE = 4096  # where every operation is a launch


def is_on_host(array: Array) -> bool:
    """Whether an array is in main memory, where NumPy can work on it without a copy."""
    return type(array) is np.ndarray or str(device(array)) == "cpu"


def to_numpy(array: object) -> NDArray[Any]:
    """Bring an array of any library to NumPy, from whatever device it is on."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "detach"):  # a tensor, perhaps on a GPU or part of a graph
        array = array.detach().cpu()
    return np.asarray(array)


def column_blocks(dim: int, width: int = BLOCK) -> Iterator[slice]:
    """Cut columns into blocks."""
    for start in range(0, dim, width):
        yield slice(start, min(start + width, dim))


def products(left: Array, right: Array) -> Array:
    """Multiply every row of one matrix with every row of another, summing in short blocks.

    Returns
    -------
    Array
        Shape (num_left, num_right).
    """
    xp = array_namespace(left)
    total: Array | None = None
    for block in column_blocks(left.shape[1]):
        part = xp.matmul(left[:, block], xp.permute_dims(right[:, block], (1, 0)))
        if total is None:
            total = part
        else:
            total += part
    assert total is not None
    return total


def upper_products(updates: Array) -> Array:
    """Multiply every row with itself and with those after it.

    Returns
    -------
    Array
        Shape (num_clients, num_clients). Below the diagonal it holds anything.
    """
    num_clients = int(updates.shape[0])
    if is_on_host(updates) and num_clients > MANY_ROWS:
        rows = np.ascontiguousarray(to_numpy(updates))
        # Fortran reads our rows as columns, and what it calls lower is our upper triangle.
        syrk = get_blas_funcs("syrk", (rows,))
        return _beside(updates, syrk(1.0, rows.T, trans=1, lower=1).T)
    if num_clients <= MANY_ROWS:
        return products(updates, updates)
    xp = array_namespace(updates)
    shape = (num_clients, num_clients)
    found: Array = xp.empty(shape, dtype=updates.dtype, device=device(updates))
    for block in column_blocks(num_clients, TILE_ELSEWHERE):
        found[block, block.start :] = products(updates[block, :], updates[block.start :, :])
    return found


def mirror_scaled(matrix: Array, scale: Array) -> None:
    """Scale the upper triangle's rows and columns, keep it in [-1, 1], and fill in the lower one.

    Parameters
    ----------
    matrix
        Shape (n, n). Changed in place.
    scale
        Shape (n,), of the matrix's dtype: entry (i, j) is multiplied by those of i and j.
    """
    if is_on_host(matrix):  # NumPy has the least overhead for small tiles
        matrix, scale = to_numpy(matrix), to_numpy(scale)
    xp = array_namespace(matrix)
    num_rows = int(matrix.shape[0])
    side = min(TILE_ON_HOST, max(1, num_rows // 16)) if is_on_host(matrix) else TILE_ELSEWHERE
    blocks = list(column_blocks(num_rows, side))
    for number, rows in enumerate(blocks):
        strip = matrix[rows, rows.start :]  # a view
        strip *= scale[rows][:, None]
        strip *= scale[rows.start :][None, :]
        xp.clip(strip, -1.0, 1.0, out=strip)
        for columns in blocks[number + 1 :]:
            matrix[columns, rows] = matrix[rows, columns].T
        tile = matrix[rows, rows]
        matrix[rows, rows] = xp.triu(tile) + xp.triu(tile, k=1).T


def _beside(updates: Array, found: NDArray[np.floating]) -> Array:
    shared: Array = array_namespace(updates).asarray(found)
    return shared
