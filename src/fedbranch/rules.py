"""When to split a cluster: a rule looks at the evidence and returns a decision with its reason.

Users write their own rule by passing any object with ``examine(evidence) -> Decision``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol

import numpy as np

from fedbranch.checkpoint import JSON
from fedbranch.core.bipartition import bipartition
from fedbranch.core.geometry import Array, cosine_similarity, norms, to_numpy
from fedbranch.core.theory import tolerated_noise
from fedbranch.errors import DamagedFile

__all__ = [
    "Decision",
    "Evidence",
    "NeverSplit",
    "Rule",
    "Thresholds",
    "rule_from_state",
    "rule_to_state",
]

Verdict = Literal["train", "hold", "split"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """What the server knows about one cluster, all of it measured at the same parameters.

    Attributes
    ----------
    node_id, round
        Which leaf, and when.
    client_ids
        The clients that answered, sorted; one row of ``updates`` each.
    updates
        Shape (num_answered, num_params): what is compared.
    weights
        Shape (num_answered,): each client's weight in the mean.
    mean_update
        Shape (num_params,): the aggregate of ``updates``.
    num_members
        All clients of the cluster, answered or not.
    rounds_trained
        How often the cluster's parameters have moved since it was born.
    rounds_held
        For how many rounds they have stood still to collect these updates.
    rounds_since_hold
        How often they have moved since the cluster last held without being split; None if it
        never did.
    """

    node_id: int
    round: int
    client_ids: tuple[str, ...]
    updates: Array
    weights: Array
    mean_update: Array
    num_members: int
    rounds_trained: int
    rounds_held: int
    rounds_since_hold: int | None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was measured in a cluster, what follows from it, and why.

    Attributes
    ----------
    node_id, round
        Which leaf, and when.
    verdict
        ``"train"``: average the updates and go on. ``"hold"``: keep the parameters still
        until more of the cluster's clients have answered. ``"split"``: into ``groups``.
    reason
        One line, for people.
    measurements
        Everything the reason speaks of, by name.
    groups
        Client ids of each new cluster; empty unless the verdict is to split.
    """

    node_id: int
    round: int
    verdict: Verdict
    reason: str
    measurements: Mapping[str, float] = field(default_factory=dict)
    groups: tuple[tuple[str, ...], ...] = ()


class Rule(Protocol):
    """Anything that can look at a cluster and decide."""

    def examine(self, evidence: Evidence) -> Decision:
        """Decide what happens to a cluster."""
        ...


@dataclass(frozen=True)
class NeverSplit:
    """Keep every cluster as it is. From one cluster, that is plain federated averaging."""

    def examine(self, evidence: Evidence) -> Decision:
        """Decide to train."""
        return Decision(
            node_id=evidence.node_id,
            round=evidence.round,
            verdict="train",
            reason="this run never splits",
            measurements=_norm_measurements(evidence),
        )


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The paper's criteria: split a stationary cluster whose clients still pull apart.

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
        How many rounds a cluster may stand still for that, before it goes on training. After
        a hold without a split it trains for as many rounds before it holds again.

    Notes
    -----
    All norms scale with learning rate, local steps and model size, so there are no
    defaults for the first three. With partial participation the mean over those who
    answered differs from the cluster's by sampling; the part of its square that sampling
    explains is subtracted before the comparison with ε1. With full participation it is 0.
    It cannot be told from a single answer: a cluster of which only one client answers in
    every round hardly ever looks stationary.

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
        """Apply the paper's criteria in their order, and say at which one it ended."""
        measured = _norm_measurements(evidence)

        def decide(
            verdict: Verdict, reason: str, groups: tuple[tuple[str, ...], ...] = ()
        ) -> Decision:
            return Decision(
                node_id=evidence.node_id,
                round=evidence.round,
                verdict=verdict,
                reason=reason,
                measurements=measured,
                groups=groups,
            )

        num_answered, num_members = len(evidence.client_ids), evidence.num_members
        if num_members < 2:
            return decide("train", "a single client cannot be split")
        if evidence.rounds_trained < self.min_rounds:
            return decide(
                "train",
                f"young: trained {evidence.rounds_trained} of min_rounds = {self.min_rounds} rounds",
            )
        num_needed = max(2, math.ceil(self.coverage * num_members - 1e-9))
        is_covered = num_answered >= num_needed
        waiting = f"{num_answered} of {num_needed} needed clients have answered"
        if evidence.rounds_held > 0 and not is_covered:
            if evidence.rounds_held < self.max_hold_rounds:
                return decide("hold", f"still stands still: {waiting}")
            return decide(
                "train", f"held in vain for {evidence.rounds_held} rounds: {waiting}; trains on"
            )
        if measured["mean_norm"] >= self.eps_mean:
            return decide(
                "train",
                f"not stationary: the mean update's norm {measured['mean_norm']:.3g} "
                f"is not below eps_mean = {self.eps_mean:g}",
            )
        if measured["max_norm"] < self.eps_max:
            return decide(
                "train",
                f"congruent: no client's update is as long as eps_max = {self.eps_max:g} "
                f"(the longest: {measured['max_norm']:.3g})",
            )
        if not is_covered:
            since_hold = evidence.rounds_since_hold
            if since_hold is not None and since_hold < self.max_hold_rounds:
                return decide(
                    "train", f"looks stationary, but held without a split of late; {waiting}"
                )
            return decide("hold", f"looks stationary and stands still for the others: {waiting}")

        split = bipartition(cosine_similarity(evidence.updates))
        measured["cross_similarity"] = split.cross_similarity
        measured["tolerated_noise"] = tolerated_noise(split.cross_similarity)
        if measured["tolerated_noise"] <= self.gamma_max:
            return decide(
                "train",
                f"too similar: the best split has cross-similarity {split.cross_similarity:.3f} and "
                f"tolerates noise {measured['tolerated_noise']:.3f}, not more than "
                f"gamma_max = {self.gamma_max:g}",
            )
        sides = (split.left_rows, split.right_rows)
        measured["smaller_side"] = min(len(rows) for rows in sides)
        if measured["smaller_side"] < self.min_cluster_size:
            return decide(
                "train",
                f"too small: the best split leaves {measured['smaller_side']} client(s) on one "
                f"side, fewer than min_cluster_size = {self.min_cluster_size}",
            )
        return decide(
            "split",
            f"{len(sides[0])} + {len(sides[1])} clients: stationary (mean {measured['mean_norm']:.3g} "
            f"< {self.eps_mean:g}) but incongruent (longest {measured['max_norm']:.3g} >= "
            f"{self.eps_max:g}); cross-similarity {split.cross_similarity:.3f} tolerates noise "
            f"{measured['tolerated_noise']:.3f} > {self.gamma_max:g}",
            groups=tuple(tuple(evidence.client_ids[row] for row in rows) for rows in sides),
        )


def rule_to_state(rule: Rule) -> JSON:
    """Describe a rule for a checkpoint; one that we do not ship is only named."""
    if isinstance(rule, Thresholds | NeverSplit):
        return {"name": type(rule).__name__, "settings": asdict(rule)}
    return {"name": type(rule).__name__, "settings": None}


def rule_from_state(state: JSON) -> Rule:
    """Rebuild a rule that :func:`rule_to_state` described."""
    shipped = {rule.__name__: rule for rule in (Thresholds, NeverSplit)}
    if state["settings"] is None or state["name"] not in shipped:
        raise DamagedFile(
            f"the rule {state['name']!r} is not part of fedbranch and was not saved; "
            "pass it when loading: Server.load(folder, rule=...)"
        )
    return shipped[state["name"]](**state["settings"])


def _norm_measurements(evidence: Evidence) -> dict[str, float]:
    """Measure the two norms of the paper's criteria, and say over whom."""
    lengths = to_numpy(norms(evidence.updates))
    num_answered = len(evidence.client_ids)
    squared_mean = float(norms(evidence.mean_update[None, :])[0]) ** 2
    # E‖mean of a sample‖² = ‖mean of all‖² + sampling variance. For a sample of n out of N
    # drawn without replacement the variance is (1 − n/N) n/(n−1) Σ p_i² ‖u_i − mean‖²,
    # with p_i the normalised weights.
    missing_share = 1 - num_answered / evidence.num_members
    if missing_share > 0 and num_answered > 1:
        shares = to_numpy(evidence.weights).astype(np.float64)
        shares = shares / shares.sum()
        distances = to_numpy(norms(evidence.updates - evidence.mean_update[None, :]))
        spread = num_answered / (num_answered - 1) * float((shares**2 * distances**2).sum())
        squared_mean -= missing_share * spread
    return {
        "mean_norm": math.sqrt(max(0.0, squared_mean)),
        "max_norm": float(lengths.max()),
        "num_answered": num_answered,
        "num_members": evidence.num_members,
    }
