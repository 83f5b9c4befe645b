"""Norms, cosine similarities and weighted means of client updates.

The functions take arrays of any Array API library (NumPy, PyTorch on any device)
and return arrays of the same kind. They work tile by tile, so the temporary memory is that of
one tile, whatever the number and length of updates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from array_api_compat import array_namespace, device

from fedbranch.core.products import (
    BLOCK_COLUMNS,
    column_blocks,
    inner_products,
    is_on_host,
    mirror_scaled,
    to_numpy,
    upper_products,
)
from fedbranch.types import Array

__all__ = [
    "Scaled",
    "checked_namespace",
    "cosine_error_bound",
    "cosine_similarity",
    "cosines_of_scaled",
    "norms",
    "scaled_for_cosines",
    "take_rows",
    "to_numpy",
    "unit_rows",
    "weighted_mean",
]

# Squared lengths between these bounds did not overflow, and what underflowed is below the last
# digit. By the bits of a number.
SAFE_SQUARES = {32: (1e-30, 1e30), 64: (1e-250, 1e250)}
ROWS_OF_A_MEAN = 512  # of a tile; with more rows, a tile would have few columns


def norms(updates: Array) -> Array:
    """Compute the Euclidean length of every update.

    Parameters
    ----------
    updates
        Shape (num_clients, dim), floating.

    Returns
    -------
    Array
        Shape (num_clients,), float64. Squares are summed in float64, so no float32
        update overflows or underflows.

    Examples
    --------
    >>> norms(np.array([[3.0, 4.0], [0.0, 0.0]], dtype=np.float32))
    array([5., 0.])
    """
    checked_namespace(updates, "updates")
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
        Shape (num_clients, num_others), in [-1, 1], of the updates' dtype. The
        similarities of a zero update are 0, also the one to itself. Those of an update
        with NaN or infinity are NaN.

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
    checked_namespace(updates, "updates")
    if others is None:
        return _similarity_of_all(updates)
    checked_namespace(others, "others")
    if others.shape[1] != updates.shape[1]:
        raise ValueError(
            f"updates have {updates.shape[1]} columns and others {others.shape[1]}; "
            "compare updates of the same model"
        )
    return cosines_of_scaled(scaled_for_cosines(updates), scaled_for_cosines(others))


def cosine_error_bound(dim: int, unit_roundoff: float = 2.0**-24) -> float:
    """Bound the error of any entry of :func:`cosine_similarity`.

    Summing a block of b products costs at most b roundings, adding up the blocks one
    rounding each. The squared lengths may be such sums as well; scaling costs the rest. Our
    blocks have at most 4096 entries. Where many updates are multiplied with themselves, the
    blocks are those of the BLAS library; all that we know have shorter ones.

    Examples
    --------
    >>> cosine_error_bound(1_000_000) < 5.3e-4
    True
    """
    roundings = 2 * (min(dim, BLOCK_COLUMNS) + math.ceil(dim / BLOCK_COLUMNS)) + 8
    if roundings * unit_roundoff >= 1:
        raise ValueError(
            f"unit_roundoff is {unit_roundoff}; with dim {dim} no bound holds, use more digits"
        )
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
    xp = checked_namespace(updates, "updates")
    if updates.shape[0] == 0:
        raise ValueError("there is no mean of zero updates; pass at least one")
    shares = xp.astype(xp.asarray(weights, device=device(updates)), xp.float64)
    if shares.shape != (updates.shape[0],):
        raise ValueError(
            f"weights have shape {tuple(shares.shape)}; pass one weight for each of the "
            f"{updates.shape[0]} updates"
        )
    shares = shares / xp.sum(shares)
    total = xp.zeros(updates.shape[1], dtype=xp.float64, device=device(updates))
    for rows, columns in _tiles(updates, ROWS_OF_A_MEAN):
        wide = xp.astype(updates[rows, columns], xp.float64)
        total[columns] += xp.sum(wide * shares[rows, None], axis=0)
    mean: Array = xp.astype(total, updates.dtype)
    return mean


def take_rows(matrix: Array, rows: Sequence[int]) -> Array:
    """Take rows of a matrix, in this order; consecutive rows are a view, not a copy."""
    first, end = rows[0], rows[0] + len(rows)
    if list(rows) == list(range(first, end)):
        return matrix if len(rows) == matrix.shape[0] else matrix[first:end]
    xp = array_namespace(matrix)
    taken: Array = xp.take(matrix, xp.asarray(list(rows), device=device(matrix)), axis=0)
    return taken


def checked_namespace(updates: Array, name: str):  # type: ignore[no-untyped-def]  # a module
    """Return the array library of updates; raise if their shape or dtype is wrong."""
    xp = array_namespace(updates)
    if updates.ndim != 2 or updates.shape[1] == 0:
        raise ValueError(
            f"{name} have shape {tuple(updates.shape)}; stack them to (num_clients, dim) with dim > 0"
        )
    if not xp.isdtype(updates.dtype, (xp.float32, xp.float64)):
        raise TypeError(f"{name} are {updates.dtype}; convert them to float32 or float64")
    return xp


def _tiles(updates: Array, num_rows: int = 1) -> Iterator[tuple[slice, slice]]:
    """Cut updates into tiles, each of which is widened to float64 at once.

    On the CPU a tile fits into the cache; elsewhere, where every operation is a launch, it is
    larger. A tile has ``num_rows`` rows and the columns that there is then room for. If these
    are all columns, it has more rows.
    """
    entries = 2**16 if is_on_host(updates) else 2**26
    num_updates, dim = (int(length) for length in updates.shape)
    num_columns = min(dim, max(1, entries // max(1, min(num_rows, num_updates))))
    for rows in column_blocks(num_updates, max(num_rows, entries // num_columns)):
        for columns in column_blocks(dim, num_columns):
            yield rows, columns


class _Lengths(NamedTuple):
    """The length of each update as a product of two factors, neither of which overflows."""

    largest: Array  # largest absolute entry, or 1 where squares cannot leave float64
    norms: Array  # norm of the update divided by that


def _lengths(updates: Array) -> _Lengths:
    largest = _largest_entries(updates)
    return _Lengths(largest, _scaled_norms(updates, largest))


def _largest_entries(updates: Array) -> Array:
    """Return divisors that keep squares in float64: the largest entries of float64, else ones."""
    xp = array_namespace(updates)
    largest = _ones(updates)
    if updates.dtype == xp.float64:
        entries = xp.max(xp.abs(updates), axis=1)
        largest = xp.where(entries > 0, entries, largest)
    return largest


def _scaled_norms(updates: Array, largest: Array) -> Array:
    xp = array_namespace(updates)
    squares = xp.zeros(updates.shape[0], dtype=xp.float64, device=device(updates))
    for rows, columns in _tiles(updates):
        wide = xp.astype(updates[rows, columns], xp.float64)
        if updates.dtype == xp.float64:
            with np.errstate(invalid="ignore"):  # infinity divided by itself becomes NaN
                wide = wide / largest[rows, None]
        squares[rows] += xp.sum(wide * wide, axis=1)
    scaled: Array = xp.sqrt(squares)
    return scaled


def unit_rows(updates: Array) -> Array:
    """Scale updates to length one, however short or long; a zero update stays zero.

    An update with NaN or infinity contains NaN afterwards.
    """
    xp = array_namespace(updates)
    lengths = _lengths(updates)
    divisor = xp.where(lengths.norms > 0, lengths.norms, xp.ones_like(lengths.norms))
    unit: Array = xp.empty_like(updates)
    for rows, columns in _tiles(updates):
        with np.errstate(invalid="ignore"):
            wide = xp.astype(updates[rows, columns], xp.float64) / lengths.largest[rows, None]
            unit[rows, columns] = xp.astype(wide / divisor[rows, None], updates.dtype)
    return unit


def _similarity_of_all(updates: Array) -> Array:
    """Compare all pairs by one symmetric product; its diagonal has the squared lengths."""
    xp = array_namespace(updates)
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        similarity = upper_products(updates)
    squares = xp.linalg.diagonal(similarity)
    if not _are_safe(updates, squares):
        updates = unit_rows(updates)
        similarity = upper_products(updates)
        squares = xp.linalg.diagonal(similarity)
    scale = _one_over_root(squares)
    # 1 for all but zero updates, set here as a product of rounded factors may miss it.
    own = xp.where(xp.isnan(squares), squares, xp.astype(scale > 0, similarity.dtype))
    mirror_scaled(similarity, scale)
    itself = xp.arange(similarity.shape[0], device=device(updates))
    similarity[itself, itself] = own
    return similarity


class Scaled(NamedTuple):
    """Updates whose inner products stay in range, and factors that make these products cosines."""

    rows: Array  # the updates, or a scaled copy if they are very long or short
    factors: Array  # (num_updates,), of the same dtype; 0 for a zero update


def cosines_of_scaled(left: Scaled, right: Scaled) -> Array:
    """Compute cosines as :func:`cosine_similarity` does, of updates that were scaled before."""
    similarity = inner_products(left.rows, right.rows)
    similarity *= left.factors[:, None]
    similarity *= right.factors[None, :]
    clipped: Array = array_namespace(similarity).clip(similarity, -1.0, 1.0)
    return clipped


def scaled_for_cosines(updates: Array) -> Scaled:
    """Compute the factors that make inner products of updates cosines."""
    with np.errstate(over="ignore"):  # checked below
        squares = _scaled_norms(updates, _ones(updates)) ** 2
    if not _are_safe(updates, squares):
        updates = unit_rows(updates)
        squares = _scaled_norms(updates, _ones(updates)) ** 2
    factors = array_namespace(updates).astype(_one_over_root(squares), updates.dtype)
    return Scaled(updates, factors)


def _are_safe(updates: Array, squares: Array) -> bool:
    """Return whether squared lengths neither overflowed nor lost digits."""
    bits = array_namespace(updates).finfo(updates.dtype).bits
    shortest, longest = SAFE_SQUARES.get(bits, (math.inf, -math.inf))
    found = to_numpy(squares)
    is_zero = found == 0
    if not bool(((found > shortest) & (found < longest) | is_zero).all()):
        return False
    # A square of 0 is right only for a zero update.
    zeros = np.flatnonzero(is_zero).tolist()
    return not zeros or not bool(to_numpy(take_rows(updates, zeros)).any())


def _one_over_root(squares: Array) -> Array:
    """Compute the factors that scale to length one; 0 for a zero update."""
    xp = array_namespace(squares)
    wide = xp.astype(squares, xp.float64)
    safe = xp.where(wide > 0, wide, xp.ones_like(wide))
    found = xp.where(wide > 0, 1 / xp.sqrt(safe), xp.zeros_like(wide))
    scale: Array = xp.astype(found, squares.dtype)
    return scale


def _ones(updates: Array) -> Array:
    xp = array_namespace(updates)
    ones: Array = xp.ones(updates.shape[0], dtype=xp.float64, device=device(updates))
    return ones
