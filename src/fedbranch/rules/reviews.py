"""A split is reviewed: clients compare their leaf with the others and with their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedbranch.rules.evidence import Decision, Review, Verdict
from fedbranch.rules.paired_losses import gain, p_value

__all__ = ["review_split"]

# A client moves only if its gain is this many standard deviations from that of most clients.
DEVIATIONS_TO_MOVE = 5
DEVIATION_PER_MEDIAN = 1.4826  # a normal distribution's standard deviation per median deviation


def review_split(review: Review, *, error_level: float) -> Decision:
    """Merge a split back if the clients are worse off; otherwise keep it, and move some of them."""
    measured: dict[str, float] = {"num_answered": len(review.losses)}

    def decide(verdict: Verdict, reason: str, moves: Mapping[str, int] | None = None) -> Decision:
        return Decision(
            node_id=review.node_id,
            round=review.round,
            verdict=verdict,
            reason=f"reviewed {review.rounds_since_split} rounds after the split: {reason}",
            measurements=measured,
            moves=moves or {},
        )

    if not review.losses:
        return decide("keep", "no client could compare the models")
    column = {leaf: number for number, leaf in enumerate(review.clusters, start=1)}
    gains = {
        client_id: gain(own[0], own[column[review.leaf_of[client_id]]])
        for client_id, own in review.losses.items()
    }
    p_worse = p_value(list(gains.values()), "less")
    measured |= {
        "p_worse": p_worse,
        "mean_gain": float(np.mean(list(gains.values()))),
        "share_better": float(np.mean([own > 0 for own in gains.values()])),
    }
    told = (
        f"{measured['share_better']:.0%} of {len(gains)} clients are better off with their own "
        f"cluster than with the mean of all, their loss is lower by {measured['mean_gain']:.3g}"
    )
    if p_worse <= error_level:
        return decide("merge", f"{told} (p = {p_worse:.1g} for worse): the split did not pay")
    moves = {
        client_id: leaf
        for client_id, leaf in _better_elsewhere(review.losses, review.leaf_of, column).items()
        if leaf not in review.opposed.get(client_id, ())
    }
    if moves:
        told += f"; {', '.join(moves)} would be better off in another cluster and move there"
    return decide("keep", told, moves)


def _better_elsewhere(
    losses: Mapping[str, Sequence[float]], leaf_of: Mapping[str, int], column: Mapping[int, int]
) -> dict[str, int]:
    """Find the clients that are in the wrong group: client id -> leaf.

    The other clients show what the right group is worth: by how much the own cluster's model is
    better than the second best, and how much that varies. A client belongs elsewhere if another
    model is better by more than half of that, and by too much for an outlier.

    Parameters
    ----------
    losses
        Client id -> its losses.
    leaf_of
        Client id -> its leaf.
    column
        Leaf -> which of a client's losses is the one under that leaf.
    """
    best, by_how_much = {}, {}
    for client_id, own in losses.items():
        others = [leaf for leaf in column if leaf != leaf_of[client_id]]
        best[client_id] = min(others, key=lambda leaf: own[column[leaf]])
        by_how_much[client_id] = gain(own[column[leaf_of[client_id]]], own[column[best[client_id]]])
    values = np.array(list(by_how_much.values()))
    worth = -float(np.median(values))
    deviation = DEVIATION_PER_MEDIAN * float(np.median(np.abs(values + worth)))
    enough = max(worth / 2, DEVIATIONS_TO_MOVE * deviation - worth)
    return {
        client_id: best[client_id]
        for client_id, better in by_how_much.items()
        if worth > 0 and better > enough
    }
