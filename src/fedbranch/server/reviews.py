"""Splits are reviewed some rounds after they were made, if the rule has a ``review``.

The clients below a split compare their cluster's model with those of the other clusters, and
with the mean of all of these, which stands for training together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from fedbranch.rules import Decision, Review, Rule
from fedbranch.rules.credibility import opposed_moves
from fedbranch.tree import ParameterTree

__all__ = ["due_for_review", "is_overdue", "review"]

ROUNDS_FOR_ANSWERS = 3  # if none has come by then, none will


def due_for_review(
    tree: ParameterTree,
    rule: Rule,
    num_reviews: Mapping[int, int],
    this_round: int,
    standing_still: Collection[int],
) -> list[int]:
    """List the inner nodes whose splits are to be reviewed in a round.

    None is below another one, and no leaf below them stands still.

    Parameters
    ----------
    tree
        The tree.
    rule
        Decides on reviews if it has ``review`` and ``review_after``.
    num_reviews
        Inner node -> how often its split was reviewed.
    this_round
        The round.
    standing_still
        The leaves that stand still.
    """
    if not callable(getattr(rule, "review", None)):
        return []
    late = {
        node.id
        for node in tree
        if _rounds_late(tree, rule, num_reviews, node.id, this_round) >= 0
        and not any(below.id in standing_still for below in tree.subtree(node.id))
    }
    return [
        node_id
        for node_id in sorted(late)
        if not any(above.id in late for above in tree.path(node_id)[:-1])
    ]


def is_overdue(
    tree: ParameterTree,
    rule: Rule,
    num_reviews: Mapping[int, int],
    node_id: int,
    this_round: int,
) -> bool:
    """Return whether a review has been due for so long that no answer will come any more."""
    return _rounds_late(tree, rule, num_reviews, node_id, this_round) >= ROUNDS_FOR_ANSWERS


def _rounds_late(
    tree: ParameterTree,
    rule: Rule,
    num_reviews: Mapping[int, int],
    node_id: int,
    this_round: int,
) -> float:
    dates: Sequence[int] = getattr(rule, "review_after", ())
    num_done = num_reviews.get(node_id, 0)
    split_in = tree[node_id].split_in_round
    # Clusters that were given before the first round are no rule's decision.
    if not split_in or num_done >= len(dates):
        return -math.inf
    return this_round - split_in - dates[num_done]


def review(
    tree: ParameterTree,
    rule: Rule,
    node_id: int,
    this_round: int,
    losses: Mapping[str, tuple[float, ...]],
) -> Decision:
    """Ask the rule about a split.

    Raises
    ------
    ValueError
        If it decides what cannot be.
    """
    split_in = tree[node_id].split_in_round
    assert split_in is not None
    clusters = _Clusters(tree, [leaf.id for leaf in tree.leaves_below(node_id)])
    decision: Decision = rule.review(  # type: ignore[attr-defined]  # or none is due
        Review(
            node_id=node_id,
            round=this_round,
            rounds_since_split=this_round - split_in,
            clusters=clusters,
            losses=losses,
            leaf_of={client_id: tree.position(client_id) for client_id in losses},
            opposed=_opposed(tree, node_id),
        )
    )
    if decision.verdict not in ("keep", "merge") or decision.node_id != node_id:
        raise ValueError(
            f"{rule!r} reviewed node {node_id} and decided {decision.verdict!r} on node "
            f"{decision.node_id}; it must keep or merge that node"
        )
    if decision.verdict == "merge" and decision.moves:
        raise ValueError(
            f"{rule!r} reviewed node {node_id}, merges it and moves {dict(decision.moves)}; the "
            "clusters of a split that is merged are gone, so leave the moves out"
        )
    places = {*map(tree.positions.of, decision.moves), *decision.moves.values()}
    if not places <= set(clusters):
        raise ValueError(
            f"{rule!r} reviewed node {node_id} and moves {dict(decision.moves)}; it can "
            f"move clients of that split to {list(clusters)}"
        )
    return decision


class _Clusters(Mapping[int, list[str]]):
    """Leaves and their clients, which are listed only when they are looked up."""

    def __init__(self, tree: ParameterTree, leaf_ids: Sequence[int]) -> None:
        self._tree = tree
        self._leaf_ids = dict.fromkeys(leaf_ids)

    def __getitem__(self, leaf_id: int) -> list[str]:
        if leaf_id not in self._leaf_ids:
            raise KeyError(leaf_id)
        return self._tree.members(leaf_id)

    def __iter__(self) -> Iterator[int]:
        return iter(self._leaf_ids)

    def __len__(self) -> int:
        return len(self._leaf_ids)


def _opposed(tree: ParameterTree, node_id: int) -> dict[str, frozenset[int]]:
    """Map each client to the leaves that its update at the split pointed away from."""
    children = [tree[child_id] for child_id in tree[node_id].child_ids]
    leaf_ids = {child.id: [leaf.id for leaf in tree.leaves_below(child.id)] for child in children}
    opposed = opposed_moves({child.id: child.cached_updates for child in children})
    return {
        client_id: frozenset(leaf_id for branch in branches for leaf_id in leaf_ids[branch])
        for client_id, branches in opposed.items()
        if branches
    }
