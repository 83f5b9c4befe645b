"""Two-way splits with the smallest cross-similarity, and the hierarchy they are cuts of.

Deleting the weakest edge of a maximum spanning tree gives the optimal cut (the paper's
"Optimal Bipartition"); deleting the next ones gives three groups, four groups, and so on:
single-linkage clustering. So one pass over the similarity matrix answers all of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.geometry import Array, to_numpy

__all__ = ["Bipartition", "Hierarchy", "bipartition", "hierarchy", "separation_gap"]


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

    def linkage(self) -> NDArray[np.float64]:
        """Give the merges as SciPy's linkage matrix, with 1 - similarity as the distance.

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
    O(num_clients**2) time. Of equally good cuts, the one is returned that the paper's
    algorithm finds when it takes equal similarities in the order of their (row, column).

    Examples
    --------
    >>> bipartition(np.array([[1.0, 0.9, -0.8], [0.9, 1.0, -0.7], [-0.8, -0.7, 1.0]]))
    Bipartition(left_rows=array([0, 1]), right_rows=array([2]), cross_similarity=-0.7)
    """
    merges = hierarchy(similarity)
    if merges.num_clients < 2:
        raise ValueError("a single client cannot be split; pass a similarity of two or more")
    groups = merges.groups(2)
    return Bipartition(
        left_rows=np.flatnonzero(groups == 0),
        right_rows=np.flatnonzero(groups == 1),
        cross_similarity=float(merges.similarities[-1]),
    )


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
    unique, so ties have one answer whatever the algorithm.

    Examples
    --------
    >>> tree = hierarchy(np.array([[1.0, 0.9, -0.8], [0.9, 1.0, -0.7], [-0.8, -0.7, 1.0]]))
    >>> tree.edge_rows.tolist(), tree.similarities.tolist()
    ([[0, 1], [1, 2]], [0.9, -0.7])
    """
    matrix = _checked_similarity(similarity)
    num_clients = len(matrix)
    rows = np.arange(num_clients)
    last = 0  # the row that joined the tree last
    outside = np.ones(num_clients, dtype=bool)
    outside[last] = False
    best = np.full(num_clients, -np.inf, dtype=matrix.dtype)
    best_edge = np.full(num_clients, num_clients * num_clients)
    edges = np.empty((num_clients - 1, 2), dtype=np.intp)
    similarities = np.empty(num_clients - 1, dtype=matrix.dtype)

    for step in range(num_clients - 1):
        edge = np.minimum(rows, last) * num_clients + np.maximum(rows, last)
        offered = matrix[last]
        better = outside & ((offered > best) | ((offered == best) & (edge < best_edge)))
        best[better] = offered[better]
        best_edge[better] = edge[better]
        strongest = best[outside].max()
        candidates = np.flatnonzero(outside & (best == strongest))
        last = int(candidates[np.argmin(best_edge[candidates])])
        outside[last] = False
        edges[step] = divmod(int(best_edge[last]), num_clients)
        similarities[step] = strongest

    order = np.lexsort((edges[:, 0] * num_clients + edges[:, 1], -similarities))
    return Hierarchy(edge_rows=edges[order], similarities=similarities[order])


def separation_gap(similarity: Array, groups: Iterable[Hashable]) -> float:
    """Measure how clearly the true groups separate: the paper's g(α) = α_intra − α_cross.

    Parameters
    ----------
    similarity
        Symmetric, shape (num_clients, num_clients), num_clients >= 2.
    groups
        The true group of each row.

    Returns
    -------
    float
        The smallest similarity within a group (1 if no two clients share one) less the
        cross-similarity of the optimal bipartition. Positive means that the bipartition
        is correct; it may be correct with a negative gap too.

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
    if np.isnan(matrix).any():
        raise ValueError(
            "similarity contains NaN; compute it with cosine_similarity, which has none"
        )
    if not np.array_equal(matrix, matrix.T):
        worst = float(np.abs(matrix - matrix.T).max())
        if worst > 1e-5:
            raise ValueError(f"similarity differs from its transpose by {worst:.3g}; symmetrise it")
        matrix = np.maximum(matrix, matrix.T)
    return matrix


def _components(num_clients: int, edge_rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Find the connected components, counted in the order of their first rows."""
    parent = list(range(num_clients))
    for a_row, b_row in edge_rows:
        a, b = _find(parent, int(a_row)), _find(parent, int(b_row))
        parent[max(a, b)] = min(a, b)
    roots = [_find(parent, row) for row in range(num_clients)]
    # The root of a component is its first row, so ascending roots are ascending first rows.
    return np.unique(roots, return_inverse=True)[1].astype(np.intp)


def _find(parent: list[int], row: int) -> int:
    while parent[row] != row:
        parent[row] = parent[parent[row]]
        row = parent[row]
    return row
