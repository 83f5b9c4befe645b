"""Two-way splits with the smallest cross-similarity, and the hierarchy they are cuts of.

Deleting the weakest edge of a maximum spanning tree gives the optimal cut (the paper's
"Optimal Bipartition"). Deleting the next ones gives three groups, four groups, and so on:
single-linkage clustering. So one pass over the similarity matrix gives all of these.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fedbranch.core.products import TILE_ON_HOST, column_blocks, for_each_strip, to_numpy
from fedbranch.types import Array

__all__ = [
    "Bipartition",
    "Hierarchy",
    "bipartition",
    "hierarchy",
    "separation_gap",
    "spanning_tree_of",
    "strict_order",
]

NOT_FINITE = (
    "similarity contains NaN or infinity; compute it with cosine_similarity, which has none "
    "if the updates have none"
)


class Bipartition(NamedTuple):
    """A two-way split, by rows of the similarity matrix."""

    left_rows: NDArray[np.intp]  # ascending; contains row 0
    right_rows: NDArray[np.intp]  # ascending
    cross_similarity: float  # largest similarity between the two sides


@dataclass(frozen=True, eq=False)
class Hierarchy:
    """A maximum spanning tree of the similarities: all single-linkage groupings at once.

    Attributes
    ----------
    edge_rows
        Shape (num_clients - 1, 2). The tree's edges, from the most similar pair down.
    similarities
        Shape (num_clients - 1,), descending. ``similarities[-j]`` is the largest
        similarity between any two of the groups in ``groups(j + 1)``.
    """

    edge_rows: NDArray[np.intp]
    similarities: NDArray[np.floating]

    @property
    def num_clients(self) -> int:
        """Number of rows of the similarity matrix."""
        return len(self.similarities) + 1

    def groups(self, num_groups: int) -> NDArray[np.intp]:
        """Cut into groups so that the largest similarity between two groups is smallest.

        Parameters
        ----------
        num_groups
            From 1 to num_clients.

        Returns
        -------
        NDArray
            Shape (num_clients,): the group of each row, numbered in the order of their
            first rows.

        Examples
        --------
        >>> similarity = np.array([[1, 0.9, -0.2], [0.9, 1, -0.1], [-0.2, -0.1, 1]])
        >>> hierarchy(similarity).groups(2)
        array([0, 0, 1])
        """
        if not 1 <= num_groups <= self.num_clients:
            raise ValueError(
                f"num_groups is {num_groups}; {self.num_clients} clients form between "
                f"1 and {self.num_clients} groups"
            )
        kept = self.edge_rows[: self.num_clients - num_groups]
        return _components(self.num_clients, kept)

    def bipartition(self) -> Bipartition:
        """Cut at the weakest edge: the two-way split with the smallest cross-similarity.

        Raises
        ------
        ValueError
            If there is only one client.
        """
        if self.num_clients < 2:
            raise ValueError("a single client cannot be split; pass a similarity of two or more")
        groups = self.groups(2)
        return Bipartition(
            left_rows=np.flatnonzero(groups == 0),
            right_rows=np.flatnonzero(groups == 1),
            cross_similarity=float(self.similarities[-1]),
        )

    def linkage(self) -> NDArray[np.float64]:
        """Return the merges as SciPy's linkage matrix, with 1 - similarity as the distance.

        Returns
        -------
        NDArray
            Shape (num_clients - 1, 4), for ``scipy.cluster.hierarchy``.
        """
        parent = list(range(2 * self.num_clients - 1))
        size = [1] * self.num_clients + [0] * (self.num_clients - 1)
        merges = np.empty((self.num_clients - 1, 4))
        for step, (a_row, b_row) in enumerate(self.edge_rows):
            a, b = sorted((_find(parent, int(a_row)), _find(parent, int(b_row))))
            merged = self.num_clients + step
            parent[a] = parent[b] = merged
            size[merged] = size[a] + size[b]
            merges[step] = a, b, 1.0 - float(self.similarities[step]), size[merged]
        return merges


def bipartition(similarity: Array) -> Bipartition:
    """Find the two-way split with the smallest cross-similarity.

    Parameters
    ----------
    similarity
        Symmetric, shape (num_clients, num_clients). The diagonal is ignored.

    Returns
    -------
    Bipartition
        Rows, not client ids: map them back with ``[client_ids[row] for row in
        split.left_rows]``. ``cross_similarity`` is the paper's α_cross^max.

    Raises
    ------
    ValueError
        If the matrix is not square, not symmetric, contains NaN or has fewer than two rows.

    Notes
    -----
    O(num_clients**2) time. Of equally good cuts, it returns the one that the paper's
    algorithm finds when it takes equal similarities in the order of their (row, column).

    Examples
    --------
    >>> bipartition(np.array([[1.0, 0.9, -0.8], [0.9, 1.0, -0.7], [-0.8, -0.7, 1.0]]))
    Bipartition(left_rows=array([0, 1]), right_rows=array([2]), cross_similarity=-0.7)
    """
    return hierarchy(similarity).bipartition()


def hierarchy(similarity: Array) -> Hierarchy:
    """Build the whole single-linkage hierarchy of a similarity matrix.

    Parameters
    ----------
    similarity
        Symmetric, shape (num_clients, num_clients). The diagonal is ignored.

    Returns
    -------
    Hierarchy
        From which any number of groups can be cut.

    Notes
    -----
    Prim's algorithm on the dense matrix, O(num_clients**2). Edges are ordered by
    similarity, equal ones by (row, column); in that strict order the spanning tree is
    unique, so ties have one answer whatever the algorithm. If the matrix would not fit into
    memory, use :func:`fedbranch.core.blocked_linkage.hierarchy_of`.

    Examples
    --------
    >>> tree = hierarchy(np.array([[1.0, 0.9, -0.8], [0.9, 1.0, -0.7], [-0.8, -0.7, 1.0]]))
    >>> tree.edge_rows.tolist(), tree.similarities.tolist()
    ([[0, 1], [1, 2]], [0.9, -0.7])
    """
    merges = spanning_tree_of(_checked_similarity(similarity))
    if not np.isfinite(merges.similarities).all():
        raise ValueError(NOT_FINITE)
    return merges


def spanning_tree_of(matrix: NDArray[np.floating]) -> Hierarchy:
    """Build the :func:`hierarchy` of a matrix that is known to be symmetric and finite."""
    edges, similarities = _grown_tree(matrix)
    order = strict_order(edges, similarities, len(matrix))
    return Hierarchy(edge_rows=edges[order], similarities=similarities[order])


def strict_order(
    edge_rows: NDArray[np.intp], similarities: NDArray[np.floating], num_clients: int
) -> NDArray[np.intp]:
    """Order edges by similarity, the strongest first, and equal ones by (row, column)."""
    order = np.argsort(-similarities)
    ordered = similarities[order]
    is_tied = np.zeros(len(order), dtype=bool)
    is_tied[1:] = ordered[1:] == ordered[:-1]
    is_tied[:-1] |= is_tied[1:]
    tied = order[is_tied]
    places = edge_rows[tied, 0] * num_clients + edge_rows[tied, 1]
    order[is_tied] = tied[np.lexsort((places, -similarities[tied]))]
    return order


def _grown_tree(matrix: NDArray[np.floating]) -> tuple[NDArray[np.intp], NDArray[np.floating]]:
    """Grow the maximum spanning tree from row 0 (Prim): its edges, and how similar they are.

    A step reads one row of the matrix, and a vector twice. Few rows get a better edge in a step,
    so the work for these is cheap.
    """
    num_clients = len(matrix)
    joined = np.empty(num_clients - 1, dtype=np.intp)
    similarities = np.empty(num_clients - 1, dtype=matrix.dtype)
    # For every row its largest similarity to a row of the tree, and that row. A row in the tree
    # has -inf here and +inf to beat, so it never joins again.
    best = matrix[0].copy()
    best[0] = -np.inf
    to_beat = best.copy()
    to_beat[0] = np.inf
    source = np.zeros(num_clients, dtype=np.intp)
    is_better = np.empty(num_clients, dtype=bool)

    joins = int(best.argmax())
    for step in range(num_clients - 1):
        strongest = best[joins]
        best[joins] = -np.inf
        runner_up = int(best.argmax())
        if best[runner_up] == strongest:
            best[joins] = strongest
            equal = np.flatnonzero(best == strongest)
            others = source[equal]
            places = np.minimum(equal, others) * num_clients + np.maximum(equal, others)
            joins = int(equal[places.argmin()])
            best[joins] = -np.inf
            runner_up = int(best.argmax())
        to_beat[joins] = np.inf
        joined[step] = joins
        similarities[step] = strongest

        offered = matrix[joins]
        np.greater_equal(offered, to_beat, out=is_better)
        rows = is_better.nonzero()[0]
        if rows.size:
            values = offered[rows]
            if (values == best[rows]).any():  # of equal ones, the smaller (row, column) is better
                before = source[rows]
                ours = np.minimum(rows, joins) * num_clients + np.maximum(rows, joins)
                theirs = np.minimum(rows, before) * num_clients + np.maximum(rows, before)
                is_ours = (values > best[rows]) | (ours < theirs)
                rows, values = rows[is_ours], values[is_ours]
        if rows.size:
            best[rows] = to_beat[rows] = values
            source[rows] = joins
            place = int(values.argmax())
            if values[place] > best[runner_up]:
                runner_up = int(rows[place])
        joins = runner_up
    # The source of a row has not changed since the row joined.
    edges = np.sort(np.stack([joined, source[joined]], axis=1), axis=1)
    return edges, similarities


def separation_gap(similarity: Array, groups: Iterable[Hashable]) -> float:
    """Compute how clearly the true groups separate: the paper's g(α) = α_intra − α_cross.

    Parameters
    ----------
    similarity
        Symmetric, shape (num_clients, num_clients), num_clients >= 2.
    groups
        The true group of each row.

    Returns
    -------
    float
        The smallest similarity within a group (1 if no two clients share one) minus the
        cross-similarity of the optimal bipartition. If it is positive, the bipartition
        is correct; with a negative gap it may be correct, too.

    Examples
    --------
    >>> separation_gap(np.array([[1.0, 0.9, -0.8], [0.9, 1.0, -0.7], [-0.8, -0.7, 1.0]]), "aab")
    1.6
    """
    matrix = _checked_similarity(similarity)
    numbers: dict[Hashable, int] = {}
    names = np.array([numbers.setdefault(group, len(numbers)) for group in groups])
    if len(names) != len(matrix):
        raise ValueError(
            f"got {len(names)} groups; name one group for each of the {len(matrix)} rows"
        )
    same_group = names[:, None] == names[None, :]
    np.fill_diagonal(same_group, False)
    intra = matrix[same_group].min(initial=1.0)
    return float(intra - bipartition(matrix).cross_similarity)


def _checked_similarity(similarity: Array) -> NDArray[np.floating]:
    matrix = to_numpy(similarity)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise ValueError(
            f"similarity has shape {matrix.shape}; it must be square, one row for each client"
        )
    if not np.issubdtype(matrix.dtype, np.floating):
        matrix = matrix.astype(np.float64)
    worst = max(for_each_strip(partial(_asymmetry, matrix), matrix, TILE_ON_HOST))
    if worst > 1e-5:
        raise ValueError(f"similarity differs from its transpose by {worst:.3g}; symmetrise it")
    return matrix if worst == 0 else np.maximum(matrix, matrix.T)


def _asymmetry(matrix: NDArray[np.floating], rows: slice) -> float:
    """Compute the largest difference between some rows, from the diagonal on, and their mirror."""
    worst = 0.0
    right, down = matrix[rows, rows.start :], matrix[rows.start :, rows].T
    for columns in column_blocks(right.shape[1], TILE_ON_HOST):
        above, below = right[:, columns], down[:, columns]
        if np.array_equal(above, below):  # so that there is no NaN either
            continue
        if not (np.isfinite(above).all() and np.isfinite(below).all()):
            raise ValueError(NOT_FINITE)
        worst = max(worst, float(np.abs(above - below).max()))
    return worst


def _components(num_clients: int, edge_rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Find the connected components, counted in the order of their first rows."""
    links = coo_array(
        (np.ones(len(edge_rows), dtype=bool), (edge_rows[:, 0], edge_rows[:, 1])),
        shape=(num_clients, num_clients),
    )
    numbers = connected_components(links, directed=False)[1]
    _, first_rows, groups = np.unique(numbers, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first_rows))[groups].astype(np.intp)


def _find(parent: list[int], row: int) -> int:
    while parent[row] != row:
        parent[row] = parent[parent[row]]
        row = parent[row]
    return row
