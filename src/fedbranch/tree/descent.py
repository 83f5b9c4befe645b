"""Descent: newcomers go from an inner node to the child whose edge they resemble most.

This is a step of the paper's "Assigning new Clients". The paper compares a newcomer with the
single most similar cached update. Here the similarity to a child may leave out the most similar
ones and average over the next, so that one poisoned update decides nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.geometry import scaled_for_cosines
from fedbranch.core.products import column_blocks
from fedbranch.tree.edge import Edge, EdgeCache
from fedbranch.types import Array, Vector

__all__ = ["Descent", "descents"]

SIMILARITIES_AT_ONCE = 2**25  # of newcomers with the clients on an edge


class Descent(NamedTuple):
    """The child to which a client goes from an inner node, and its similarity to each child."""

    child_id: int
    similarities: dict[int, float]  # child id -> similarity to its most similar cached updates


def descents(
    edges: Mapping[int, Edge],
    cache: EdgeCache,
    updates: Array,
    *,
    ignored_share: float = 0.0,
    num_best: int = 1,
    similarities_at_once: int = SIMILARITIES_AT_ONCE,
) -> list[Descent]:
    """Choose a child for each of some updates.

    Parameters
    ----------
    edges
        Child id -> the edge to it; none is empty.
    cache
        Made the edges.
    updates
        Shape (num_clients, dim), computed at the inner node's parameters.
    ignored_share
        Share of a child's cached updates, the most similar ones, that is left out; rounded to
        whole updates. At least one update counts.
    num_best
        The similarity to a child is the mean over this many of the most similar updates that
        count, or over all if there are fewer.
    similarities_at_once
        Bounds the memory: similarities that are computed together.

    Returns
    -------
    list of Descent
        In the order of the rows. Of equally similar children, the first is chosen.
    """
    if operator.index(num_best) < 1 or not 0 <= ignored_share <= 1:
        raise ValueError(
            f"num_best is {num_best} and ignored_share {ignored_share}; at least one update "
            "counts, and a share is in [0, 1]"
        )
    dims = {edge.dim for edge in edges.values()}
    if dims != {updates.shape[1]}:
        raise ValueError(
            f"the update has {updates.shape[1]} numbers and the cached ones {sorted(dims)}; "
            "compare updates of the same model"
        )
    compared = cache.compared(updates)
    num_rows = max(1, similarities_at_once // max(map(len, edges.values())))
    found = []
    for rows in column_blocks(len(compared), num_rows):
        some = scaled_for_cosines(compared[rows])
        columns = [
            _mean_of_best(edge.similarities(some), ignored_share, num_best).tolist()
            for edge in edges.values()
        ]
        for similarities in zip(*columns, strict=True):
            of_client = dict(zip(edges, similarities, strict=True))
            found.append(Descent(max(of_client, key=of_client.__getitem__), of_client))
    return found


def _mean_of_best(similarity: Vector, ignored_share: float, num_best: int) -> NDArray[np.float64]:
    """Average the most similar entries of each row that count."""
    num_cached = similarity.shape[1]
    end = num_cached - min(int(ignored_share * num_cached + 0.5), num_cached - 1)
    first = max(0, end - num_best)
    ranked = np.partition(similarity, (first, end - 1), axis=1)[:, first:end]
    means: NDArray[np.float64] = np.sort(ranked, axis=1).mean(axis=1, dtype=np.float64)
    return means
