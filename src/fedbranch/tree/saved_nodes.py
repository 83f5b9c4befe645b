"""The nodes of a tree in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from fedbranch.population import LARGEST_NODE_ID
from fedbranch.storage.checkpoint import Tensors
from fedbranch.tree.edge import Edge, EdgeCache, restore_edge
from fedbranch.tree.node import Node
from fedbranch.types import JSON

__all__ = ["check_nodes", "nodes_from_state", "nodes_to_state"]


def nodes_to_state(nodes: Iterable[Node]) -> tuple[list[JSON], dict[str, Tensors]]:
    """Describe nodes as JSON, and as tensors by file.

    What never changes, the parameters of inner nodes and the edges, has files of its own.
    """
    leaves: dict[str, NDArray[np.float32]] = {}
    files: dict[str, Tensors] = {"leaves": leaves}
    entries: list[JSON] = []
    for node in nodes:
        if node.is_leaf:
            leaves |= node.tensors()
        else:
            files[f"node-{node.id}"] = node.frozen_tensors()
        if node.cached_updates:
            files[f"edge-{node.id}"] = node.cached_updates.tensors
            files[f"ids-{node.id}"] = node.cached_updates.ids
        entries.append(
            {
                "id": node.id,
                "parent_id": node.parent_id,
                "child_ids": list(node.child_ids),
                "version": node.version,
                "born_in_round": node.born_in_round,
                "split_in_round": node.split_in_round,
                "num_cached": len(node.cached_updates),
            }
        )
    return entries, files


def nodes_from_state(
    entries: Iterable[JSON],
    files: Mapping[str, Tensors],
    cache: EdgeCache,
    *,
    num_compared: int | None,
) -> dict[int, Node]:
    """Rebuild nodes from what :func:`nodes_to_state` returned.

    Parameters
    ----------
    entries, files
        What it returned.
    cache
        Keeps their edges from now on.
    num_compared
        Length of the updates on edges; None if that was not saved.

    Returns
    -------
    dict
        By id.

    Raises
    ------
    KeyError, TypeError, ValueError, AttributeError
        If an entry or a file contradicts another.
    """
    nodes: dict[int, Node] = {}
    for entry in entries:
        node_id = entry["id"]
        if type(node_id) is not int or not 0 <= node_id <= LARGEST_NODE_ID:
            raise ValueError(f"a node has the id {node_id!r}")
        tensors = files[f"node-{node_id}" if entry["child_ids"] else "leaves"]
        edge, num_cached = Edge(), entry["num_cached"]
        if num_cached or f"edge-{node_id}" in files:
            ids, kept = files[f"ids-{node_id}"], files[f"edge-{node_id}"]
            edge = restore_edge(cache, ids, kept, dim=num_compared)
        if type(num_cached) is not int or len(edge) != num_cached:
            raise ValueError(f"node {node_id} has {len(edge)} cached updates")
        nodes[node_id] = Node(
            id=node_id,
            parent_id=entry["parent_id"],
            params=tensors[f"params-{node_id}"],
            buffers=tensors[f"buffers-{node_id}"],
            born_in_round=entry["born_in_round"],
            version=entry["version"],
            child_ids=tuple(entry["child_ids"]),
            split_in_round=entry["split_in_round"],
            cached_updates=edge,
        )
    return nodes


def check_nodes(
    nodes: Mapping[int, Node], *, next_id: int, num_params: int, num_buffers: int
) -> None:
    """Raise ValueError if nodes do not form one tree of equally long vectors.

    Parameters
    ----------
    nodes
        By id; 0 is the root.
    next_id
        The id of the next node to be made.
    num_params, num_buffers
        Lengths of the vectors.

    Raises
    ------
    KeyError, ValueError
        If they do not.
    """
    reached = [0]
    for node_id in reached:
        children = nodes[node_id].child_ids
        reached.extend(children)
        if any(nodes[child_id].parent_id != node_id for child_id in children):
            raise ValueError(f"a child of node {node_id} names another parent")
        if len(reached) > len(nodes):
            break
    if sorted(reached) != sorted(nodes) or next_id <= max(nodes):
        raise ValueError("the nodes do not form one tree")
    # What was compared may have a length of its own, but one for all edges.
    compared = {node.cached_updates.dim for node in nodes.values() if node.cached_updates}
    if len(compared) > 1:
        raise ValueError(f"the cached updates have lengths {sorted(compared)}")
    for node in nodes.values():
        if node.params.shape != (num_params,):
            raise ValueError(f"node {node.id} has vectors of another length")
        if node.buffers.shape != (num_buffers,):
            raise ValueError(f"node {node.id} has buffers of another length")
