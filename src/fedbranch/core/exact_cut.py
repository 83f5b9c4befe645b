"""The exact two-way split, found from approximate similarities such as those of sketches.

Approximate similarities tell which clients the smallest cut cannot separate: those that are joined
by similarities larger than the cut's, by more than twice the error. Such clients form a part. Exact
similarities are computed only between parts, and only for pairs that may be the most similar ones.

The likely error assumes updates that are spread over many coordinates. So the edges of the sketches'
spanning tree, on which everything depends, are checked against exact similarities as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from fedbranch.core.geometry import (
    cosine_error_bound,
    cosine_similarity,
    scaled_for_cosines,
    take_rows,
)
from fedbranch.core.linkage import Bipartition, Hierarchy, spanning_tree_of
from fedbranch.core.products import column_blocks, to_numpy
from fedbranch.core.projection import Projection
from fedbranch.types import Array

__all__ = [
    "PairCosines",
    "Parts",
    "are_edges_right",
    "cosines_of_pairs",
    "likely_error",
    "parts_of",
    "refined",
]

# Maps rows a and rows b, of equal length, to the exact cosine of each pair.
PairCosines: TypeAlias = Callable[[NDArray[np.intp], NDArray[np.intp]], NDArray[np.floating]]

FAILURE = 0.01  # probability that any pair is off by more than the likely error
NUMBERS_AT_ONCE = 2**22
# If more than this share of the pairs is needed, computing all of them at once is faster.
LARGEST_SHARE = 0.2
# Comparing a pair by itself takes as long as this many entries of a matrix product.
PAIR_COST = 8


@dataclass(frozen=True, eq=False)
class Parts:
    """Parts of the clients that no smallest cut separates, by approximate similarities.

    Attributes
    ----------
    part
        Shape (num_clients,): the part of each row, numbered in the order of their first rows.
    """

    part: NDArray[np.intp]

    @property
    def num_parts(self) -> int:
        """Count of parts; if there are two, the cut is certain."""
        return int(self.part.max()) + 1


def likely_error(projection: Projection, num_clients: int) -> float:
    """Bound the likely error of the cosine of any two of ``num_clients`` sketches.

    Notes
    -----
    The cosine of two sketches is a sum over many coordinates. So its error is taken to be normal,
    with the projection's typical error as the standard deviation. With probability 0.99 no pair
    is then off by more. The bound of rounding is added, which counts where sketches are exact.

    For updates that consist of a few coordinates the bound is too small;
    :func:`are_edges_right` finds that out.

    Examples
    --------
    >>> round(likely_error(Projection(dim=50_000, size=1024), num_clients=1000), 2)
    0.19
    """
    num_pairs = max(1, num_clients * (num_clients - 1) // 2)
    most = NormalDist().inv_cdf(1 - FAILURE / (2 * num_pairs))
    return projection.typical_error() * most + cosine_error_bound(projection.dim)


def parts_of(merges: Hierarchy, error: float) -> Parts:
    """Find the parts: clients that are joined too strongly for the smallest cut.

    The cut through the weakest edge has a cross-similarity of at most that edge's plus the
    error. A similarity that is larger by more than twice the error is larger in truth.
    """
    level = merges.similarities[-1] + 2 * error
    num_weak = int(np.count_nonzero(merges.similarities <= level))
    return Parts(merges.groups(1 + num_weak))


def are_edges_right(merges: Hierarchy, error: float, exact: PairCosines) -> bool:
    """Return whether every edge of the sketches' spanning tree is within the error.

    Two sketches that are similar by mistake matter only if they are an edge of this tree.
    """
    cosines = exact(merges.edge_rows[:, 0], merges.edge_rows[:, 1])
    return bool((np.abs(cosines - merges.similarities) <= error).all())


def refined(
    similarity: NDArray[np.floating],
    parts: Parts,
    error: float,
    exact: PairCosines,
    *,
    largest_share: float = LARGEST_SHARE,
) -> tuple[Bipartition, int] | None:
    """Find the two-way split with the smallest exact cross-similarity.

    Parameters
    ----------
    similarity
        Shape (num_clients, num_clients): cosines with at most this error.
    parts
        What :func:`parts_of` found, at least two.
    error
        Of any similarity.
    exact
        Computes exact cosines.
    largest_share
        Share of all pairs for which exact cosines may be computed.

    Returns
    -------
    tuple or None
        The split with its exact cross-similarity, and the number of exact cosines computed.
        None, without computing any, if more than ``largest_share`` would be needed.
    """
    part, num_parts = parts.part, parts.num_parts
    most_pairs = largest_share * len(part) ** 2 / 2
    if num_parts**2 / 2 > most_pairs:
        return None
    order = np.argsort(part, kind="stable")
    firsts = np.searchsorted(part[order], np.arange(num_parts))
    strongest = np.empty((num_parts, num_parts), dtype=similarity.dtype)
    for number, first in enumerate(firsts.tolist()):
        rows = order[first : firsts[number + 1] if number + 1 < num_parts else None]
        nearest = similarity[rows].max(axis=0)
        strongest[number] = np.maximum.reduceat(nearest[order], firsts)
    # Pairs within a part decide nothing. Nor do those of two parts that are joined through other
    # parts, more strongly than any of their own pairs can be similar.
    decides = strongest + 2 * error >= _paths(strongest)
    np.fill_diagonal(decides, val=False)
    to_beat = np.where(decides, strongest - 2 * error, math.inf)
    found_a, found_b, num_found = [], [], 0
    for block in column_blocks(len(part), max(1, NUMBERS_AT_ONCE // len(part))):
        may_be = similarity[block] >= to_beat[part[block]][:, part]
        a_rows, b_rows = np.nonzero(may_be)
        a_rows += block.start
        is_once = a_rows < b_rows
        found_a.append(a_rows[is_once])
        found_b.append(b_rows[is_once])
        num_found += len(found_a[-1])
        if num_found > most_pairs:
            return None
    a_rows, b_rows = np.concatenate(found_a), np.concatenate(found_b)
    cosines = exact(a_rows, b_rows)
    between = np.full((num_parts, num_parts), -np.inf, dtype=np.float64)
    np.maximum.at(between, (part[a_rows], part[b_rows]), cosines)
    between = np.maximum(between, between.T)
    np.fill_diagonal(between, 1.0)
    cut = spanning_tree_of(between).bipartition()
    is_left = np.isin(part, cut.left_rows)
    split = Bipartition(np.flatnonzero(is_left), np.flatnonzero(~is_left), cut.cross_similarity)
    return split, len(a_rows)


def _paths(similarity: NDArray[np.floating]) -> NDArray[np.floating]:
    """Compute the weakest edge on the strongest path between every two rows."""
    num_rows = len(similarity)
    merges = spanning_tree_of(similarity)
    weakest = np.full((num_rows, num_rows), np.inf, dtype=similarity.dtype)
    members = {row: [row] for row in range(num_rows)}
    group = list(range(num_rows))
    for (a_row, b_row), link in zip(merges.edge_rows.tolist(), merges.similarities, strict=True):
        small, large = sorted((group[a_row], group[b_row]), key=lambda g: len(members[g]))
        weakest[np.ix_(members[small], members[large])] = link
        weakest[np.ix_(members[large], members[small])] = link
        for row in members[small]:
            group[row] = large
        members[large] += members.pop(small)
    return weakest


def cosines_of_pairs(
    updates: Array,
    a_rows: NDArray[np.intp],
    b_rows: NDArray[np.intp],
    *,
    numbers_at_once: int = NUMBERS_AT_ONCE,
    pair_cost: float = PAIR_COST,
) -> NDArray[np.floating]:
    """Compute the cosines of some pairs of updates.

    Parameters
    ----------
    updates
        Shape (num_clients, dim); of any library, on any device.
    a_rows, b_rows
        Shape (num_pairs,): the rows of each pair.
    numbers_at_once
        Bounds the temporary memory.
    pair_cost
        Time of comparing a pair by itself, in entries of a matrix product. It decides which of
        the two ways is taken.

    Returns
    -------
    NDArray
        Shape (num_pairs,), within :func:`fedbranch.cosine_error_bound` of the exact ones.

    Examples
    --------
    >>> updates = np.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    >>> cosines_of_pairs(updates, np.array([0, 1]), np.array([1, 2]))
    array([0.6, 0.8])
    """
    lefts, left_places = np.unique(a_rows, return_inverse=True)
    rights, right_places = np.unique(b_rows, return_inverse=True)
    found = np.empty(len(a_rows), dtype=np.float64)
    if pair_cost * len(a_rows) < len(lefts) * len(rights):
        at_once = max(1, numbers_at_once // int(updates.shape[1]))
        for some in column_blocks(len(a_rows), at_once):
            found[some] = _one_by_one(updates, a_rows[some], b_rows[some])
        return found
    # Some rows of the left side at a time; each block is multiplied with the rows of its pairs.
    at_once = max(1, numbers_at_once // max(1, len(rights)))
    by_left = np.argsort(left_places, kind="stable")
    starts = np.searchsorted(left_places[by_left], np.arange(0, len(lefts) + at_once, at_once))
    for block, (start, end) in enumerate(pairwise(starts.tolist())):
        if start == end:
            continue
        pairs = by_left[start:end]
        needed, columns = np.unique(right_places[pairs], return_inverse=True)
        own = lefts[block * at_once : (block + 1) * at_once]
        cosines = cosine_similarity(
            take_rows(updates, own.tolist()), take_rows(updates, rights[needed].tolist())
        )
        found[pairs] = to_numpy(cosines)[left_places[pairs] - block * at_once, columns]
    return found


def _one_by_one(
    updates: Array, a_rows: NDArray[np.intp], b_rows: NDArray[np.intp]
) -> NDArray[np.floating]:
    """Compute the cosine of each pair by itself."""
    xp = array_namespace(updates)
    (left, left_scale), (right, right_scale) = (
        scaled_for_cosines(take_rows(updates, rows.tolist())) for rows in (a_rows, b_rows)
    )
    products = xp.zeros_like(left_scale)
    for block in column_blocks(int(left.shape[1])):
        products += xp.sum(left[:, block] * right[:, block], axis=1)
    return to_numpy(xp.clip(products * left_scale * right_scale, -1.0, 1.0))
