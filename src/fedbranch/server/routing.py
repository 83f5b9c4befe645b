"""Clients at inner nodes find their way down: the paper's "Assigning new Clients", a step a round.

Newcomers, clients that were absent when their cluster split, and clients that are re-routed are
the same here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from fedbranch.server.guard import Guard
from fedbranch.server.records import Routing
from fedbranch.server.replies.reply import Reply, stacked
from fedbranch.tree import ParameterTree

__all__ = ["Descents", "descents"]

_AS_THE_PAPER = Guard(ignored_share=0.0, num_best=1)


class Descents(NamedTuple):
    """Where the clients of a round go.

    Attributes
    ----------
    at_leaves
        The replies of those who are there already.
    moves
        To which child the others go, in the order of the replies.
    refused
        Client id -> why it cannot be told.
    """

    at_leaves: dict[str, Reply]
    moves: tuple[Routing, ...]
    refused: dict[str, str]


def descents(
    tree: ParameterTree,
    replies: Mapping[str, Reply],
    guard: Guard | None,
    set_aside: Collection[str],
) -> Descents:
    """Compare the updates of clients at inner nodes with those cached on the edges there.

    Parameters
    ----------
    tree
        Which is not changed.
    replies
        Client id -> reply, of clients in the tree.
    guard
        Says which cached updates count.
    set_aside
        Clients whose last reply the guard set aside: they have to resemble somebody first.
    """
    at_leaves: dict[str, Reply] = {}
    at_inner: dict[int, list[str]] = {}  # node -> its clients
    refused: dict[str, str] = {}
    standing = tree.positions.of_all(list(replies))
    for (client_id, reply), node_id in zip(replies.items(), standing, strict=True):
        assert node_id is not None
        if tree[node_id].is_leaf:
            at_leaves[client_id] = reply
        elif not tree.can_route(node_id):
            refused[client_id] = f"node {node_id} has no cached updates to be routed by"
        else:
            at_inner.setdefault(node_id, []).append(client_id)
    counting = _AS_THE_PAPER if guard is None else guard
    moves: dict[str, Routing] = {}
    for node_id, client_ids in at_inner.items():
        ids = sorted(client_ids)  # in whatever order they came, the same sums
        compared = stacked([replies[client_id] for client_id in ids], "compared")
        found = tree.descend_all(
            node_id, compared, ignored_share=counting.ignored_share, num_best=counting.num_best
        )
        num_compared = tree.num_compared(compared.shape[1])
        for client_id, (child_id, similarities) in zip(ids, found, strict=True):
            if (
                guard is not None
                and client_id in set_aside
                and not guard.knows(similarities.values(), num_compared)
            ):
                refused[client_id] = "set aside: the update still resembles nobody's"
                continue
            moves[client_id] = Routing(
                client_id=client_id, from_node=node_id, to_node=child_id, similarities=similarities
            )
    in_order = tuple(moves[client_id] for client_id in replies if client_id in moves)
    return Descents(at_leaves, in_order, refused)
