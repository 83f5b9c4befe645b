"""Changes of the population and of the tree: clients join, leave and move, splits are taken back.

Each function changes the state and notes the change for the next record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedbranch.core.geometry import to_numpy
from fedbranch.protocol.client_ids import checked_ids, some_of
from fedbranch.server.leaf import Leaf, LeafMemory
from fedbranch.server.state import ServerState
from fedbranch.server.trials import merged_model
from fedbranch.types import Array

__all__ = [
    "forget_replies",
    "known",
    "merge_split",
    "partition",
    "place",
    "place_newcomers",
    "remove",
    "undo_split",
]

EXAMINATIONS_TO_FORGET = 6  # how many examinations a split that did not pay counts for


def known(state: ServerState, client_ids: Iterable[str]) -> list[str]:
    """Check that clients are known, and list them.

    Raises
    ------
    TypeError, ValueError
        If one is no id, or is not known.
    """
    ids = checked_ids(client_ids)
    unknown = state.tree.positions.missing(ids)
    if unknown:
        raise ValueError(
            f"clients {some_of(unknown)} are not known; they never joined or have left"
        )
    return ids


def place_newcomers(state: ServerState, client_ids: Iterable[str], node_id: int) -> None:
    """Let clients that are not known join at a node."""
    in_order = sorted(client_ids)  # so that the order in which they are named changes nothing
    state.tree.positions.place_all(in_order, node_id)
    state.changes.joined += in_order
    if node_id != state.tree.root.id:
        state.changes.moved |= dict.fromkeys(in_order, node_id)


def place(state: ServerState, places: Mapping[str, int]) -> None:
    """Put clients at nodes, from wherever they stood: client id -> node."""
    ids = list(places)
    for client_id, present in zip(ids, state.tree.positions.of_all(ids), strict=True):
        node_id = state.tree[places[client_id]].id
        if present != node_id:
            state.tree.place(client_id, node_id)
            state.changes.moved[client_id] = node_id


def remove(state: ServerState, client_ids: Iterable[str]) -> None:
    """Let clients leave."""
    ids = known(state, client_ids)
    forget_replies(state, ids)
    state.tree.positions.remove(ids)
    state.presence.count_out(state.round + 1)
    state.set_aside.difference_update(ids)
    changes = state.changes
    changes.gone.update(ids)
    # A client that joined since the last record was in none: it has not left, it never was there.
    never_told = set(changes.joined).intersection(ids)
    changes.joined = [client_id for client_id in changes.joined if client_id not in never_told]
    changes.left += [client_id for client_id in ids if client_id not in never_told]
    for client_id in ids:
        changes.moved.pop(client_id, None)


def forget_replies(state: ServerState, client_ids: Sequence[str]) -> None:
    """Drop what clients were asked for, and what they have sent to leaves that stand still."""
    at_leaf: dict[int, list[str]] = {}
    for client_id, node_id in zip(client_ids, state.tree.positions.of_all(client_ids), strict=True):
        assert node_id is not None
        if node_id in state.leaves:
            at_leaf.setdefault(node_id, []).append(client_id)
        state.asked.pop(client_id, None)
        state.on_trial.pop(client_id, None)
    for leaf_id, ids in at_leaf.items():
        state.leaves[leaf_id] = state.leaves[leaf_id].without(ids)


def undo_split(state: ServerState, node_id: int) -> None:
    """Make a split cluster one again, at the parameters at which it was split."""
    below = [node.id for node in state.tree.subtree(node_id)]
    state.tree.undo_split(node_id)
    state.changes.vanished |= dict.fromkeys(below[1:], node_id)
    state.on_trial = {i: asked for i, asked in state.on_trial.items() if asked.node_id not in below}
    if node_id in state.archive:
        state.leaves[node_id] = Leaf(memory=state.archive[node_id])
    for gone_id in below:
        if gone_id != node_id:
            state.leaves.pop(gone_id, None)
        state.archive.pop(gone_id, None)
        state.num_reviews.pop(gone_id, None)


def merge_split(state: ServerState, node_id: int) -> None:
    """Make a split cluster one again, at the mean of its clusters' models."""
    merged = merged_model(state.tree, node_id)
    undo_split(state, node_id)
    node = state.tree[node_id]
    state.tree.advance(node_id, merged.params - node.params, merged.buffers - node.buffers)
    # It has been examined before, and wrongly: the next examination comes later.
    memory = state.leaves.get(node_id, Leaf()).memory
    num_merged = memory.num_merged + 1
    state.leaves[node_id] = Leaf(
        memory=LeafMemory(
            past=memory.past,
            usual=memory.usual,
            num_examined=EXAMINATIONS_TO_FORGET * num_merged,
            examined_at=node.version,
            num_merged=num_merged,
        )
    )


def partition(
    state: ServerState,
    groups: Mapping[str, Iterable[str]],
    params: Mapping[str, Array] | None = None,
) -> dict[str, int]:
    """Split the root into given clusters; see :meth:`fedbranch.Server.partition`."""
    tree = state.tree
    if state.round > 0 or len(tree) > 1:
        raise ValueError("the clusters can only be given before the first round")
    named = {name: checked_ids(client_ids) for name, client_ids in groups.items()}
    starts = {name: to_numpy(start) for name, start in (params or {}).items()}
    for name, start in starts.items():
        if name not in named:
            raise ValueError(f"params has {name!r}; the clusters are {list(named)}")
        if start.shape != (tree.num_params,) or not np.isfinite(start).all():
            raise ValueError(
                f"params of {name!r} have shape {start.shape}; they must be "
                f"{tree.num_params} finite numbers"
            )
    if len(named) == 1:
        leaf_ids: tuple[int, ...] = (tree.root.id,)
        tree.positions.place_all(next(iter(named.values())), tree.root.id)
    else:
        leaf_ids = tree.split(
            tree.root.id, [dict.fromkeys(client_ids) for client_ids in named.values()]
        )
        state.changes.children[tree.root.id] = leaf_ids
        for leaf_id, client_ids in zip(leaf_ids, named.values(), strict=True):
            state.changes.moved |= dict.fromkeys(client_ids, leaf_id)
    leaves = dict(zip(named, leaf_ids, strict=True))
    for name, start in starts.items():
        node = tree[leaves[name]]
        tree.advance(node.id, start.astype(np.float32) - node.params)
    return leaves
