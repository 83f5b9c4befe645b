"""Norms, cosine similarities and weighted means of client updates.

The functions take arrays of any Array API library (NumPy, PyTorch on any device)
and return arrays of the same kind. They walk over blocks of columns, so that the
temporary memory is one block, however long the updates are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

__all__ = [
    "Array",
    "cosine_error_bound",
    "cosine_similarity",
    "norms",
    "take_rows",
    "to_numpy",
    "weighted_mean",
]

# An array of whichever Array API library the caller uses. There is no static type for
# "an array of any library", so the functions check what they get at run time.
Array: TypeAlias = NDArray[np.floating]

# Columns per block. A float32 dot product over one block is off by at most
# BLOCK * 2**-24 of the product of the two norms; longer blocks would be a little
# faster and less exact.
BLOCK = 4096


def norms(updates: Array) -> Array:
    """Compute the Euclidean length of every update.

    Parameters
    ----------
    updates
        Shape (num_clients, dim), floating.

    Returns
    -------
    Array
        Shape (num_clients,), float64. Squares are summed in float64, so that no
        float32 update overflows or underflows.

    Examples
    --------
    >>> norms(np.array([[3.0, 4.0], [0.0, 0.0]], dtype=np.float32))
    array([5., 0.])
    """
    _checked_namespace(updates, "updates")
    largest = _largest_entries(updates)
    return largest * _scaled_norms(updates, largest)


def cosine_similarity(updates: Array, others: Array | None = None) -> Array:
    """Compute the cosine of the angle between every two updates (the paper's α).

    Parameters
    ----------
    updates
        Shape (num_clients, dim), floating.
    others
        Shape (num_others, dim). Without it the updates are compared with each other;
        the result is then exactly symmetric, with ones on the diagonal.

    Returns
    -------
    Array
        Shape (num_clients, num_others), in [-1, 1], of the updates' dtype. A zero
        update is similar to nothing: its similarities are 0, also the one to itself.

    Notes
    -----
    With u the unit round-off of the dtype (float32: 2**-24), every entry is within
    ``cosine_error_bound(dim)`` of the exact cosine. That is a worst case; the error on
    random data is near u itself.

    Examples
    --------
    >>> cosine_similarity(np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 0.0]]))
    array([[1., 1., 0.],
           [1., 1., 0.],
           [0., 0., 0.]])
    """
    xp = _checked_namespace(updates, "updates")
    left_lengths = _lengths(updates)
    if others is None:
        right, right_lengths = updates, left_lengths
    else:
        _checked_namespace(others, "others")
        if others.shape[1] != updates.shape[1]:
            raise ValueError(
                f"updates have {updates.shape[1]} columns and others {others.shape[1]}; "
                "compare updates of the same model"
            )
        right, right_lengths = others, _lengths(others)

    shape = (updates.shape[0], right.shape[0])
    similarity = xp.zeros(shape, dtype=updates.dtype, device=device(updates))
    for block in _column_blocks(updates.shape[1]):
        left_unit = _unit(updates[:, block], left_lengths)
        right_unit = left_unit if others is None else _unit(right[:, block], right_lengths)
        similarity += xp.matmul(left_unit, xp.permute_dims(right_unit, (1, 0)))

    if others is None:
        # Not every library's product of a matrix with its own transpose is symmetric to
        # the last bit, and whoever reads only one triangle must get the same answer.
        similarity = (similarity + xp.permute_dims(similarity, (1, 0))) / 2
        itself = xp.arange(shape[0], device=device(updates))
        same = itself[:, None] == itself[None, :]
        is_zero = left_lengths.norms == 0
        own = xp.where(is_zero, xp.zeros_like(left_lengths.norms), xp.ones_like(left_lengths.norms))
        similarity = xp.where(same, xp.astype(own, similarity.dtype)[:, None], similarity)
    clipped: Array = xp.clip(similarity, -1.0, 1.0)
    return clipped


def cosine_error_bound(dim: int, unit_roundoff: float = 2.0**-24) -> float:
    """Bound the error of any entry of :func:`cosine_similarity`.

    Summing a block of b products costs at most b roundings, adding up the blocks one
    rounding each; scaling the two updates to length one and the last average cost five.

    Examples
    --------
    >>> cosine_error_bound(1_000_000) < 2.7e-4
    True
    """
    roundings = min(dim, BLOCK) + math.ceil(dim / BLOCK) + 5
    if roundings * unit_roundoff >= 1:
        raise ValueError(f"unit_roundoff is {unit_roundoff}; there is no bound for so few digits")
    return roundings * unit_roundoff / (1 - roundings * unit_roundoff)


def weighted_mean(updates: Array, weights: Array) -> Array:
    """Average updates, each counted with its weight.

    Parameters
    ----------
    updates
        Shape (num_clients, dim), floating.
    weights
        Shape (num_clients,). Positive; they need not sum to one.

    Returns
    -------
    Array
        Shape (dim,), of the updates' dtype. Sums are formed in float64, client after
        client, so the number of threads changes no bit.

    Examples
    --------
    >>> weighted_mean(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([3.0, 1.0]))
    array([0.75, 0.25])
    """
    xp = _checked_namespace(updates, "updates")
    if updates.shape[0] == 0:
        raise ValueError("there is no mean of zero updates; pass at least one")
    shares = xp.astype(xp.asarray(weights, device=device(updates)), xp.float64)
    if shares.shape != (updates.shape[0],):
        raise ValueError(
            f"weights have shape {tuple(shares.shape)}; pass one weight for each of the "
            f"{updates.shape[0]} updates"
        )
    shares = shares / xp.sum(shares)
    blocks = [
        xp.sum(xp.astype(updates[:, block], xp.float64) * shares[:, None], axis=0)
        for block in _column_blocks(updates.shape[1], _columns_at_hand(updates))
    ]
    mean: Array = xp.astype(xp.concat(blocks), updates.dtype)
    return mean


def take_rows(matrix: Array, rows: Sequence[int]) -> Array:
    """Give some rows of a matrix, in this order; rows that follow each other are not copied."""
    first, end = rows[0], rows[0] + len(rows)
    if list(rows) == list(range(first, end)):
        return matrix if len(rows) == matrix.shape[0] else matrix[first:end]
    xp = array_namespace(matrix)
    taken: Array = xp.take(matrix, xp.asarray(list(rows), device=device(matrix)), axis=0)
    return taken


def to_numpy(array: object) -> NDArray[Any]:
    """Bring an array of any library to NumPy, from whatever device it is on."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "detach"):  # a tensor, perhaps on a GPU or part of a graph
        array = array.detach().cpu()
    return np.asarray(array)


def _checked_namespace(updates: Array, name: str):  # type: ignore[no-untyped-def]  # a module
    xp = array_namespace(updates)
    if updates.ndim != 2 or updates.shape[1] == 0:
        raise ValueError(
            f"{name} have shape {tuple(updates.shape)}; stack them to (num_clients, dim) with dim > 0"
        )
    if not xp.isdtype(updates.dtype, "real floating"):
        raise TypeError(f"{name} are {updates.dtype}; convert them to float32 or float64")
    return xp


def _column_blocks(dim: int, width: int = BLOCK) -> Iterator[slice]:
    for start in range(0, dim, width):
        yield slice(start, min(start + width, dim))


def _columns_at_hand(updates: Array) -> int:
    """Choose how many columns to widen to float64 at once.

    On the CPU what fits into the cache; elsewhere, where every operation is a launch, more.
    """
    entries = 2**16 if isinstance(updates, np.ndarray) else 2**26
    return max(1, entries // max(1, int(updates.shape[0])))


class _Lengths(NamedTuple):
    """The length of each update as a product of two factors, neither of which overflows."""

    largest: Array  # largest absolute entry, or 1 where squares cannot leave float64
    norms: Array  # norm of the update divided by that


def _lengths(updates: Array) -> _Lengths:
    largest = _largest_entries(updates)
    return _Lengths(largest, _scaled_norms(updates, largest))


def _largest_entries(updates: Array) -> Array:
    """Give what to divide by before squaring in float64: nothing, unless it is float64 already."""
    xp = array_namespace(updates)
    largest: Array = xp.ones(updates.shape[0], dtype=xp.float64, device=device(updates))
    if updates.dtype == xp.float64:
        entries = xp.max(xp.abs(updates), axis=1)
        largest = xp.where(entries > 0, entries, largest)
    return largest


def _scaled_norms(updates: Array, largest: Array) -> Array:
    xp = array_namespace(updates)
    squares = xp.zeros(updates.shape[0], dtype=xp.float64, device=device(updates))
    for block in _column_blocks(updates.shape[1], _columns_at_hand(updates)):
        wide = xp.astype(updates[:, block], xp.float64)
        if updates.dtype == xp.float64:
            wide = wide / largest[:, None]
        squares = squares + xp.sum(wide * wide, axis=1)
    scaled: Array = xp.sqrt(squares)
    return scaled


def _unit(block: Array, lengths: _Lengths) -> Array:
    """Scale the updates to length one; a zero update stays zero and so is similar to nothing."""
    xp = array_namespace(block)
    divisor = xp.where(lengths.norms > 0, lengths.norms, xp.ones_like(lengths.norms))
    wide = xp.astype(block, xp.float64) / lengths.largest[:, None]
    unit: Array = xp.astype(wide / divisor[:, None], block.dtype)
    return unit
