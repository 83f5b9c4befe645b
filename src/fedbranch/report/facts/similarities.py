"""How similar the clients' updates were when a cluster was split, as a matrix to look at.

The updates are those that the saved tree keeps on its edges. The clients are in the order of
the dendrogram, child after child, so groups are blocks on the diagonal.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.geometry import cosine_similarity, to_numpy
from fedbranch.core.linkage import hierarchy, separation_gap
from fedbranch.report.facts.folding import folded, number
from fedbranch.tree import Node, ParameterTree
from fedbranch.types import JSON

__all__ = ["dendrogram_order", "similarities"]

MOST_CELLS = 256  # per side
MOST_CELLS_IN_ALL = 900_000
FEWEST_CELLS = 8  # per side: below, cells are not made larger
MOST_COMPARED = 4096  # clients of one matrix; of more, those at equal distances


def similarities(
    tree: ParameterTree, index_of: Mapping[str, int], groups: Mapping[str, str]
) -> list[JSON]:
    """Compute the similarity matrix of every split whose updates were kept.

    Parameters
    ----------
    tree
        As saved last.
    index_of
        Client id -> its place in the report.
    groups
        Client id -> its true group, where known.
    """
    split_nodes = [node for node in tree if _compared(tree, node, index_of)]
    counts = [len(_compared(tree, node, index_of)) for node in split_nodes]
    most_cells = MOST_CELLS
    while (
        most_cells > FEWEST_CELLS
        and sum(min(n, most_cells) ** 2 for n in counts) > MOST_CELLS_IN_ALL
    ):
        most_cells //= 2
    return [_of_split(tree, node, index_of, groups, most_cells) for node in split_nodes]


def dendrogram_order(similarity: NDArray[np.floating]) -> list[int]:
    """Order rows so that every group of the hierarchy is together, similar ones side by side.

    Returns
    -------
    list of int
        Rows. Of two groups that are merged, the one with the smaller first row comes first.

    Examples
    --------
    >>> dendrogram_order(np.array([[1.0, -0.8, 0.9], [-0.8, 1.0, -0.7], [0.9, -0.7, 1.0]]))
    [0, 2, 1]
    """
    group_of = [[row] for row in range(len(similarity))]
    for a_row, b_row in hierarchy(similarity).edge_rows.tolist():
        a, b = sorted((group_of[a_row], group_of[b_row]), key=lambda rows: rows[0])
        merged = a + b
        for row in merged:
            group_of[row] = merged
    return group_of[0]


def _compared(
    tree: ParameterTree, node: Node, index_of: Mapping[str, int]
) -> list[tuple[str, int]]:
    """Return the clients that a split compared, each with the child that it went to."""
    pairs = [
        (client_id, child_id)
        for child_id in node.child_ids
        for client_id in tree[child_id].cached_updates
        if client_id in index_of
    ]
    if len(pairs) > MOST_COMPARED:
        pairs = [pairs[i * len(pairs) // MOST_COMPARED] for i in range(MOST_COMPARED)]
    return pairs if len(pairs) > 1 else []


def _of_split(
    tree: ParameterTree,
    node: Node,
    index_of: Mapping[str, int],
    groups: Mapping[str, str],
    most_cells: int,
) -> JSON:
    pairs = _compared(tree, node, index_of)
    child_of = np.array([child_id for _, child_id in pairs])
    updates = np.stack([tree[child].cached_updates[client_id] for client_id, child in pairs])
    similarity = to_numpy(cosine_similarity(updates)).astype(np.float64)
    order = _order(similarity, child_of, node.child_ids)
    is_cross = child_of[:, None] != child_of[None, :]
    are_known = all(client_id in groups for client_id, _ in pairs)
    labels = [groups[i] for i, _ in pairs] if are_known else child_of.tolist()
    size = min(len(pairs), most_cells)
    cells = folded(similarity[np.ix_(order, order)], size)
    return {
        "node": node.id,
        "round": node.split_in_round,
        "num_clients": len(pairs),
        "size": size,
        "order": [index_of[pairs[row][0]] for row in order],
        "children": [pairs[row][1] for row in order],
        "matrix": base64.b64encode(np.rint(127 * cells).astype(np.int8).tobytes()).decode(),
        "gap": number(separation_gap(similarity, labels)),
        "cross": number(float(similarity[is_cross].max())) if is_cross.any() else None,
    }


def _order(
    similarity: NDArray[np.floating], child_of: NDArray[np.int64], child_ids: Sequence[int]
) -> list[int]:
    """Put child after child, and the clients of each in the order of their dendrogram."""
    order: list[int] = []
    for child_id in child_ids:
        rows = np.flatnonzero(child_of == child_id)
        if len(rows):
            within = dendrogram_order(similarity[np.ix_(rows, rows)])
            order.extend(int(rows[place]) for place in within)
    return order
