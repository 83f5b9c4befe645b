"""Splits are looked at again some rounds after they were made, if the rule wants to.

The clients below a split compare their cluster's model with those of the other clusters, and
with the mean of them all, which is what training together would have come to.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from fedbranch.core.geometry import weighted_mean
from fedbranch.protocol.tasks import Trial
from fedbranch.rules import Decision, Review, Rule
from fedbranch.rules.credibility import opposed_moves
from fedbranch.tree import ParameterTree, read_only

__all__ = ["Reviews", "compared_models", "merged_model"]

ROUNDS_FOR_ANSWERS = 3  # with no answer in so many, there will be none


class Reviews:
    """Which splits have been looked at again, and which are due.

    Parameters
    ----------
    rule
        Decides on reviews if it has ``review`` and ``review_after``.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.num_done: dict[int, int] = {}  # inner node -> how often its split was reviewed

    def due(
        self, tree: ParameterTree, this_round: int, standing_still: Collection[int]
    ) -> list[int]:
        """Give the inner nodes that are to be reviewed in a round.

        None is below another one, and no leaf below them stands still.
        """
        if not callable(getattr(self._rule, "review", None)):
            return []
        late = {
            node.id
            for node in tree
            if self._rounds_late(tree, node.id, this_round) >= 0
            and not any(below.id in standing_still for below in tree.subtree(node.id))
        }
        return [
            node_id
            for node_id in sorted(late)
            if not any(above.id in late for above in tree.path(node_id)[:-1])
        ]

    def is_overdue(self, tree: ParameterTree, node_id: int, this_round: int) -> bool:
        """Whether a review has been due for so long that nobody will answer any more."""
        return self._rounds_late(tree, node_id, this_round) >= ROUNDS_FOR_ANSWERS

    def _rounds_late(self, tree: ParameterTree, node_id: int, this_round: int) -> float:
        dates: Sequence[int] = getattr(self._rule, "review_after", ())
        num_done = self.num_done.get(node_id, 0)
        split_in = tree[node_id].split_in_round
        # Clusters that were given before the first round are nobody's decision.
        if not split_in or num_done >= len(dates):
            return -math.inf
        return this_round - split_in - dates[num_done]

    def decide(
        self,
        tree: ParameterTree,
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
        decision: Decision = self._rule.review(  # type: ignore[attr-defined]  # or none is due
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
                f"{self._rule!r} reviewed node {node_id} and decided {decision.verdict!r} on node "
                f"{decision.node_id}; it must keep or merge that node"
            )
        places = {*map(tree.positions.of, decision.moves), *decision.moves.values()}
        if not places <= set(clusters):
            raise ValueError(
                f"{self._rule!r} reviewed node {node_id} and moves {dict(decision.moves)}; it can "
                f"move clients of that split to {list(clusters)}"
            )
        return decision


class _Clusters(Mapping[int, list[str]]):
    """Leaves and their clients, who are listed only if somebody looks."""

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
    """Say which leaves below a node a client's update at its split pointed away from."""
    children = [tree[child_id] for child_id in tree[node_id].child_ids]
    leaf_ids = {child.id: [leaf.id for leaf in tree.leaves_below(child.id)] for child in children}
    opposed = opposed_moves({child.id: child.cached_updates for child in children})
    return {
        client_id: frozenset(leaf_id for branch in branches for leaf_id in leaf_ids[branch])
        for client_id, branches in opposed.items()
        if branches
    }


def compared_models(tree: ParameterTree, node_id: int) -> tuple[Trial, ...]:
    """Give what the clients below a node are to measure: the mean of its leaves, and each leaf."""
    return (
        merged_model(tree, node_id),
        *(
            Trial(params=read_only(leaf.params), buffers=read_only(leaf.buffers))
            for leaf in tree.leaves_below(node_id)
        ),
    )


def merged_model(tree: ParameterTree, node_id: int) -> Trial:
    """Average all leaves below a node, each counted by its clients."""
    leaves = tree.leaves_below(node_id)
    counts = np.array([max(1, tree.num_members(leaf.id)) for leaf in leaves])
    params, buffers = (
        weighted_mean(vectors, counts) if vectors.size else vectors[0]
        for vectors in (
            np.stack([leaf.params for leaf in leaves]),
            np.stack([leaf.buffers for leaf in leaves]),
        )
    )
    return Trial(params=read_only(params), buffers=read_only(buffers))
