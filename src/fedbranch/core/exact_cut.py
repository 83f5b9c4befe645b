"""The exact two-way split from similarities that are only nearly right, such as of sketches.

Which clients the smallest cut may part is seen from the sketches: those that hang together by
similarities that are larger than any it could have, by twice the error. Only between such parts,
and of those only for the pairs that may be the most similar ones, are exact similarities asked.
How large the error is likely to be rests on updates that are spread over many coordinates, so the
edges of the sketches' tree, on which all depends, are looked at as well.
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

# Maps rows a and rows b, as many, to the exact cosine of each pair.
PairCosines: TypeAlias = Callable[[NDArray[np.intp], NDArray[np.intp]], NDArray[np.floating]]

FAILURE = 0.01  # how probable it may be that any of all pairs is off by more than likely
NUMBERS_AT_ONCE = 2**22
# Of a larger share of the pairs, comparing all of them at once is faster than picking them.
LARGEST_SHARE = 0.2
# So many numbers of a product take as long as one of a pair that is compared by itself.
PAIR_COST = 8


@dataclass(frozen=True, eq=False)
class Parts:
    """What no smallest cut can part, as far as similarities with an error can tell.

    Attributes
    ----------
    part
        Shape (num_clients,): the part of each row, numbered in the order of their first rows.
    """

    part: NDArray[np.intp]

    @property
    def num_parts(self) -> int:
        """How many there are; if two, the cut is certain."""
        return int(self.part.max()) + 1


def likely_error(projection: Projection, num_clients: int) -> float:
    """Give how far the cosine of any two of so many sketches is likely off at most.

    Notes
    -----
    The cosine of two sketches is a sum over many coordinates, so it is taken to be normal with
    the projection's typical error; no pair of all is then off by more with probability 0.99.
    Rounding, of which the bound is added, counts where sketches are exact.
    For updates that consist of a few coordinates only that is too little:
    :func:`are_edges_right` tells.

    Examples
    --------
    >>> round(likely_error(Projection(dim=50_000, size=1024), num_clients=1000), 2)
    0.19
    """
    num_pairs = max(1, num_clients * (num_clients - 1) // 2)
    most = NormalDist().inv_cdf(1 - FAILURE / (2 * num_pairs))
    return projection.typical_error() * most + cosine_error_bound(projection.dim)


def parts_of(merges: Hierarchy, error: float) -> Parts:
    """Find what hangs together too strongly for the smallest cut.

    The cut through the weakest edge has a cross-similarity of at most that edge's plus the
    error. A similarity that is larger by twice the error is larger in truth.
    """
    level = merges.similarities[-1] + 2 * error
    num_weak = int(np.count_nonzero(merges.similarities <= level))
    return Parts(merges.groups(1 + num_weak))


def are_edges_right(merges: Hierarchy, error: float, exact: PairCosines) -> bool:
    """Whether no edge of a tree of sketches is off by more than the error.

    Two clients whose sketches resemble each other by mistake are an edge of it, if that changes
    anything.
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
        Gives exact cosines.
    largest_share
        Of all pairs, for how many that is asked at most.

    Returns
    -------
    tuple or None
        The split with its exact cross-similarity, and of how many pairs the exact cosine was
        asked. None, and nothing was asked, if it would be more of them.
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
    # Pairs within a part decide nothing, nor do those of two parts that are connected through
    # others more strongly than any of their own pairs can be.
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
    """Give the weakest edge on the strongest path between every two rows."""
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
    updates: Array, a_rows: NDArray[np.intp], b_rows: NDArray[np.intp]
) -> NDArray[np.floating]:
    """Compute the cosines of some pairs of updates.

    Parameters
    ----------
    updates
        Shape (num_clients, dim); of any library, on any device.
    a_rows, b_rows
        Shape (num_pairs,): the rows of each pair.

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
    if PAIR_COST * len(a_rows) < len(lefts) * len(rights):
        at_once = max(1, NUMBERS_AT_ONCE // int(updates.shape[1]))
        for some in column_blocks(len(a_rows), at_once):
            found[some] = _one_by_one(updates, a_rows[some], b_rows[some])
        return found
    # Some rows of the left side at a time; each asks for a product with those it is paired with.
    at_once = max(1, NUMBERS_AT_ONCE // max(1, len(rights)))
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
