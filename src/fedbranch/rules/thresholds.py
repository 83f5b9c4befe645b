"""The paper's rule, and the one that never splits."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import partial

from fedbranch.core.blocked_linkage import hierarchy_of
from fedbranch.core.exact_cut import (
    are_edges_right,
    cosines_of_pairs,
    likely_error,
    parts_of,
    refined,
)
from fedbranch.core.geometry import cosine_similarity, to_numpy
from fedbranch.core.linkage import Bipartition
from fedbranch.core.theory import tolerated_noise
from fedbranch.rules.draft import Draft
from fedbranch.rules.evidence import Decision, Evidence, norm_measurements

__all__ = ["NeverSplit", "Thresholds"]

MOST_REFINED = 8192  # clients; for more, the matrix of all similarities takes too much memory


@dataclass(frozen=True)
class NeverSplit:
    """Keep every cluster as it is. With a single cluster that is plain federated averaging."""

    def examine(self, evidence: Evidence) -> Decision:
        """Decide to train."""
        return Decision(
            node_id=evidence.node_id,
            round=evidence.round,
            verdict="train",
            reason="this run never splits",
            measurements=norm_measurements(evidence),
        )


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The paper's criteria: split a stationary cluster if its clients still pull apart.

    Parameters
    ----------
    eps_mean
        ε1. The cluster is stationary if its mean update is shorter than this.
    eps_max
        ε2. Its clients are incongruent if the longest of their updates is at least this.
    gamma_max
        The clients' relative noise, in [0, 1). A split is accepted if it would be correct
        under this noise: γ_max < √((1 − α_cross) / 2).
    min_cluster_size
        A split that leaves fewer clients on one side is not made.
    min_rounds
        A cluster trains for this many rounds before it is examined.
    coverage
        The share of the cluster's clients that must have answered at the same parameters
        before it is split, in (0, 1].
    max_hold_rounds
        How many rounds a cluster may stand still for that before it goes on training. After
        a hold without a split it trains for as many rounds before it holds again.

    Notes
    -----
    All norms scale with learning rate, local steps and model size, so there are no
    defaults for the first three.

    With partial participation the mean over the clients that answered differs from the
    cluster's by sampling. The part of its square that sampling explains is subtracted before
    the comparison with ε1; with full participation it is 0. A single reply does not show that
    part: a cluster of which one client answers in every round hardly ever looks stationary.

    From sketches the cut and its cross-similarity are known with an error. If the server keeps
    the updates, some pairs of them are compared in full:

    - the edges of the sketches' tree;
    - where the error leaves open which cut is the smallest, or whether γ_max accepts it, the
      pairs that may decide;
    - all pairs, if these are many, or if an edge is off by more than sketches usually are.

    Examples
    --------
    >>> Thresholds(eps_mean=0.4, eps_max=1.6, gamma_max=0.5).min_cluster_size
    1
    """

    eps_mean: float
    eps_max: float
    gamma_max: float
    min_cluster_size: int = 1
    min_rounds: int = 0
    coverage: float = 0.8
    max_hold_rounds: int = 10

    def __post_init__(self) -> None:
        # Plain numbers, whatever library they came from: they are saved as JSON.
        for name in ("eps_mean", "eps_max", "gamma_max", "coverage"):
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("min_cluster_size", "min_rounds", "max_hold_rounds"):
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        for name, allowed, is_allowed in [
            ("eps_mean", "a positive number", 0 < self.eps_mean < math.inf),
            ("eps_max", "a positive number", 0 < self.eps_max < math.inf),
            ("gamma_max", "a number in [0, 1)", 0 <= self.gamma_max < 1),
            ("min_cluster_size", "at least 1", self.min_cluster_size >= 1),
            ("min_rounds", "at least 0", self.min_rounds >= 0),
            ("coverage", "a number in (0, 1]", 0 < self.coverage <= 1),
            ("max_hold_rounds", "at least 1", self.max_hold_rounds >= 1),
        ]:
            if not is_allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")

    def examine(self, evidence: Evidence) -> Decision:
        """Apply the paper's criteria in their order, and decide at the first that fails."""
        draft = Draft(evidence)
        return (
            self._waits(draft)
            or self._has_no_conflict(draft)
            or self._lacks_replies(draft)
            or self._cut(draft)
        )

    def _waits(self, draft: Draft) -> Decision | None:
        """Decide before any criterion: too few members, too young, or standing still already."""
        evidence = draft.evidence
        if evidence.num_members < 2:
            return draft.train("a single client cannot be split")
        if evidence.rounds_trained < self.min_rounds:
            return draft.train(
                f"young: trained {evidence.rounds_trained} of min_rounds = {self.min_rounds} rounds"
            )
        answered = self._missing_replies(evidence)
        if evidence.rounds_held == 0 or not answered:
            return None
        if evidence.rounds_held < self.max_hold_rounds:
            return draft.hold(f"goes on standing still: {answered}")
        return draft.train(
            f"trains on, because {evidence.rounds_held} rounds of standing still were not enough: "
            f"{answered}"
        )

    def _has_no_conflict(self, draft: Draft) -> Decision | None:
        """Apply the criteria of the norms: stationary by ε1, incongruent by ε2."""
        measured = draft.measured
        if measured["mean_norm"] >= self.eps_mean:
            return draft.train(
                f"not stationary: the mean update's norm {measured['mean_norm']:.3g} "
                f"is not below eps_mean = {self.eps_mean:g}"
            )
        if measured["max_norm"] < self.eps_max:
            return draft.train(
                f"congruent: no client's update is as long as eps_max = {self.eps_max:g} "
                f"(the longest: {measured['max_norm']:.3g})"
            )
        return None

    def _lacks_replies(self, draft: Draft) -> Decision | None:
        """Stand still, unless that was in vain not long ago; None if enough have answered."""
        answered = self._missing_replies(draft.evidence)
        if not answered:
            return None
        since_hold = draft.evidence.rounds_since_hold
        if since_hold is not None and since_hold < self.max_hold_rounds:
            return draft.train(
                f"looks stationary, but stood still without a split not long ago: {answered}"
            )
        return draft.hold(f"looks stationary and stands still for more replies: {answered}")

    def _missing_replies(self, evidence: Evidence) -> str:
        """Describe how many replies a split needs; empty if they are there."""
        num_needed = max(2, math.ceil(self.coverage * evidence.num_members - 1e-9))
        num_answered = len(evidence.client_ids)
        if num_answered >= num_needed:
            return ""
        return f"{num_answered} of {num_needed} needed clients have answered"

    def _cut(self, draft: Draft) -> Decision:
        """Split by the optimal bipartition, if γ_max and the smaller side allow it."""
        evidence, measured = draft.evidence, draft.measured
        split = self._smallest_cut(evidence, measured)
        measured["cross_similarity"] = split.cross_similarity
        measured["tolerated_noise"] = tolerated_noise(split.cross_similarity)
        if measured["tolerated_noise"] <= self.gamma_max:
            return draft.train(
                f"too similar: the best split has cross-similarity {split.cross_similarity:.3f} and "
                f"tolerates noise {measured['tolerated_noise']:.3f}, not more than "
                f"gamma_max = {self.gamma_max:g}"
            )
        sides = (split.left_rows, split.right_rows)
        measured["smaller_side"] = min(len(rows) for rows in sides)
        if measured["smaller_side"] < self.min_cluster_size:
            return draft.train(
                f"too small: the best split leaves {measured['smaller_side']} client(s) on one "
                f"side, fewer than min_cluster_size = {self.min_cluster_size}"
            )
        return draft.split(
            f"{len(sides[0])} + {len(sides[1])} clients: stationary (mean {measured['mean_norm']:.3g} "
            f"< {self.eps_mean:g}) but incongruent (longest {measured['max_norm']:.3g} >= "
            f"{self.eps_max:g}); cross-similarity {split.cross_similarity:.3f} tolerates noise "
            f"{measured['tolerated_noise']:.3f} > {self.gamma_max:g}",
            tuple(tuple(evidence.client_ids[row] for row in rows) for rows in sides),
        )

    def _smallest_cut(self, evidence: Evidence, measured: dict[str, float]) -> Bipartition:
        """Find the optimal bipartition; where sketches leave it open, by updates in full."""
        merges = hierarchy_of(evidence.updates)
        split = merges.bipartition()
        if evidence.projection is None:
            return split
        num_clients = merges.num_clients
        error = likely_error(evidence.projection, num_clients)
        measured["similarity_error"] = error
        whole = evidence.whole
        if whole is None:
            return split
        exact = partial(cosines_of_pairs, whole)
        if are_edges_right(merges, error, exact):
            weakest, strongest = (
                tolerated_noise(min(1.0, max(-1.0, split.cross_similarity + sign * error)))
                for sign in (1, -1)
            )
            parts = parts_of(merges, error)
            is_clear = parts.num_parts == 2 and weakest > self.gamma_max
            is_out_of_question = strongest <= self.gamma_max
            measured["num_compared_in_full"] = num_clients - 1
            if is_clear or is_out_of_question:
                return split
            if num_clients <= MOST_REFINED:
                similarity = to_numpy(cosine_similarity(evidence.updates))
                if (better := refined(similarity, parts, error, exact)) is not None:
                    split, num_compared = better
                    measured["num_compared_in_full"] += num_compared
                    return split
        measured["num_compared_in_full"] = num_clients * (num_clients - 1) // 2
        return hierarchy_of(whole).bipartition()
