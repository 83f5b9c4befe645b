"""Clients at inner nodes go down: the paper's "Assigning new Clients", one step a round.

Newcomers, clients that were absent when their cluster split, and clients that are sent back to the
root are the same here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fedbranch.server.guard import Guard
from fedbranch.server.records import Routing
from fedbranch.server.replies.reply import Reply, stacked
from fedbranch.tree import ParameterTree

__all__ = ["Routes", "routes"]

_AS_IN_THE_PAPER = Guard(ignored_share=0.0, num_best=1)


class Routes(NamedTuple):
    """Where the clients at inner nodes go.

    Attributes
    ----------
    moves
        In the order of client ids.
    refused
        Client id -> why it cannot be routed.
    """

    moves: tuple[Routing, ...]
    refused: dict[str, str]


def routes(
    tree: ParameterTree,
    at_inner: Mapping[int, Sequence[str]],
    replies: Mapping[str, Reply],
    guard: Guard | None,
    set_aside: Collection[str],
) -> Routes:
    """Compare the updates of clients at inner nodes with those cached on the edges there.

    Parameters
    ----------
    tree
        It is not changed.
    at_inner
        Inner node -> ids of the clients that replied from there, sorted.
    replies
        Client id -> reply.
    guard
        Says which cached updates count.
    set_aside
        Clients whose last reply the guard set aside: their updates must resemble a cached one
        before they are routed.
    """
    counting = _AS_IN_THE_PAPER if guard is None else guard
    moves: list[Routing] = []
    refused: dict[str, str] = {}
    for node_id, client_ids in at_inner.items():
        if not tree.can_route(node_id):
            refused |= dict.fromkeys(
                client_ids, f"node {node_id} has no cached updates to be routed by"
            )
            continue
        compared = stacked([replies[client_id] for client_id in client_ids], "compared")
        found = tree.descend_all(
            node_id, compared, ignored_share=counting.ignored_share, num_best=counting.num_best
        )
        num_compared = tree.num_compared(compared.shape[1])
        for client_id, (child_id, similarities) in zip(client_ids, found, strict=True):
            if (
                guard is not None
                and client_id in set_aside
                and not guard.knows(similarities.values(), num_compared)
            ):
                refused[client_id] = "set aside: the update still resembles no other"
                continue
            moves.append(
                Routing(
                    client_id=client_id,
                    from_node=node_id,
                    to_node=child_id,
                    similarities=similarities,
                )
            )
    return Routes(tuple(sorted(moves, key=lambda move: move.client_id)), refused)
