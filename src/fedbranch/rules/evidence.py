"""What a rule is shown about a cluster, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.geometry import norms, to_numpy
from fedbranch.core.projection import Projection
from fedbranch.types import Array

__all__ = [
    "Asks",
    "Decision",
    "Evidence",
    "Groups",
    "PastRound",
    "Review",
    "Rule",
    "Verdict",
    "norm_measurements",
]

Verdict = Literal["train", "hold", "split", "keep", "merge"]
Asks = Literal["nothing", "halves", "losses"]
Groups = tuple[tuple[str, ...], ...]


class PastRound(NamedTuple):
    """A round in which a cluster trained."""

    norm: float  # root of the mean squared length of the clients' updates
    loss: float | None  # mean of the training losses that they reported, if they did


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
        Shape (num_answered, num_params): what is compared; or their sketches, of which cosines
        and lengths are right up to what ``projection`` says.
    weights
        Shape (num_answered,): each client's weight in the mean.
    mean_update
        Shape (num_params,): the aggregate of ``updates``; or its sketch.
    num_members
        All clients of the cluster, answered or not.
    rounds_trained
        How often the cluster's parameters have moved since it was born.
    rounds_held
        For how many rounds they have stood still to collect these updates.
    rounds_since_hold
        How often they have moved since the cluster last held without being split; None if it
        never did.
    num_new
        How many of the clients answered in this round; the others before, while the parameters
        stood still. None if that is unknown.
    asked_for_halves
        Whether the clients were asked for half updates. ``updates`` of the clients that could
        make them are then means of two.
    halved_rows
        Which of the clients, by row of ``updates``, sent half updates.
    half_differences
        Shape (len(halved_rows), num_params): half the difference of the two; None if no
        client sent them.
    proposal
        The groups that the rule proposed before, while it waits for losses; otherwise empty.
        Clients that have left since are not among them.
    losses
        Client id -> its losses under the proposal's trials, in pairs: one step together, one
        step in its group. One pair on held-out data; or two, each of steps made by one half
        of all clients' data and measured on the other half. Empty unless there is a proposal.
    rounds_proposed
        How many rounds ago the proposal was made.
    can_measure
        Whether the server can make the models under which clients measure whether a split
        pays. It cannot if it has summed the updates and kept none.
    num_examined
        How many examinations with half updates did not end in a split.
    rounds_since_examined
        How often the parameters have moved since the last such examination; None without one.
    num_merged
        How many splits of the cluster did not pay and were merged back.
    rounds_held_for_it
        How many rounds the cluster stood still for the last such examination.
    last_measured
        What was measured in it.
    past
        The rounds in which the cluster trained, from the first on.
    projection
        What made sketches of the updates; None if ``updates`` are in full. ``lengths`` and
        ``mean_length`` are those of the updates in full.
    whole
        Where there are sketches and the server keeps the updates as well: what is compared, in
        full, a row for each client.
    whole_half_differences
        Likewise ``half_differences`` in full.
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
    num_new: int | None = None
    asked_for_halves: bool = False
    halved_rows: tuple[int, ...] = ()
    half_differences: Array | None = None
    proposal: Groups = ()
    losses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    rounds_proposed: int = 0
    can_measure: bool = True
    num_examined: int = 0
    rounds_since_examined: int | None = None
    num_merged: int = 0
    rounds_held_for_it: int = 0
    last_measured: Mapping[str, float] = field(default_factory=dict)
    past: Sequence[PastRound] = ()
    projection: Projection | None = None
    whole: Array | None = None
    whole_half_differences: Array | None = None

    @cached_property
    def lengths(self) -> NDArray[np.float64]:
        """Shape (num_answered,): how long each update is."""
        return to_numpy(norms(self.updates))

    @cached_property
    def mean_length(self) -> float:
        """How long the mean update is."""
        return float(norms(self.mean_update[None, :])[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Review:
    """What is known about a split some rounds after it.

    Attributes
    ----------
    node_id, round
        Which inner node, and when.
    rounds_since_split
        How long ago it was split.
    clusters
        Leaf below the node -> ids of its clients.
    losses
        Client id -> its held-out losses: under the mean of all leaves below the node, then
        under each leaf, in the order of ``clusters``.
    opposed
        Client id -> the leaves on branches of the split that its update, by which it was
        split, had nothing in common with.
    leaf_of
        Client id -> its leaf, of all clients in ``losses``; by default, as ``clusters`` says.
    """

    node_id: int
    round: int
    rounds_since_split: int
    clusters: Mapping[int, Sequence[str]]
    losses: Mapping[str, tuple[float, ...]]
    opposed: Mapping[str, frozenset[int]] = field(default_factory=dict)
    leaf_of: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.losses and not self.leaf_of:
            leaf_of = {i: leaf for leaf, members in self.clusters.items() for i in members}
            object.__setattr__(self, "leaf_of", leaf_of)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was measured in a cluster, what follows from it, and why.

    Attributes
    ----------
    node_id, round
        Which leaf, and when.
    verdict
        ``"train"``: average the updates and go on. ``"hold"``: keep the parameters still
        until more of the cluster's clients have answered. ``"split"``: into ``groups``. And
        of a split that is reviewed: ``"keep"`` it, or ``"merge"`` it back.
    reason
        One line that a user reads in records and reports.
    measurements
        Every number in the reason, and others, by name.
    groups
        Client ids of each new cluster; empty unless the verdict is to split or losses are
        asked for.
    asks
        What the clients are asked for beside updates. ``"halves"``: in the next round, half
        updates, after training on. ``"losses"``, with the verdict to hold: each client's loss
        after one step together and after one in its group of ``groups``.
    is_examination
        Whether the cluster was looked at; False if it was not time to.
    moves
        Client id -> leaf: clients of a kept split that are better off with another group.
    """

    node_id: int
    round: int
    verdict: Verdict
    reason: str
    measurements: Mapping[str, float] = field(default_factory=dict)
    groups: Groups = ()
    asks: Asks = "nothing"
    is_examination: bool = True
    moves: Mapping[str, int] = field(default_factory=dict)


class Rule(Protocol):
    """Anything that can look at a cluster and decide.

    A rule may also have ``review_after``, ascending numbers of rounds, and ``review(review) ->
    Decision``. It then reviews each of its splits these numbers of rounds after the split.

    The contract, which :func:`fedbranch.testing.check_rule` checks:

    - Any evidence is answered with a decision about its ``node_id`` and ``round``.
    - The evidence is not changed. Its arrays may be of any Array API library.
    - The same evidence leads to the same decision: no random numbers, no clock, no memory of
      earlier calls.
    - ``asks`` goes with the verdict: ``"halves"`` with ``"train"``, ``"losses"`` with ``"hold"``,
      ``"nothing"`` with any.
    - There are groups exactly if the verdict is ``"split"`` or losses are asked for: at least
      two, none empty, disjoint, of clients in the evidence.
    - A review ends with ``"keep"`` or ``"merge"``. Clients may be moved between the leaves of a
      split that is kept.
    - The reason is one line. Measurements are numbers, by name.
    """

    def examine(self, evidence: Evidence) -> Decision:
        """Decide what happens to a cluster."""
        ...


def norm_measurements(evidence: Evidence) -> dict[str, float]:
    """Measure the two norms of the paper's criteria, and count the clients they are of."""
    num_answered = len(evidence.client_ids)
    squared_mean = evidence.mean_length**2
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
        "max_norm": float(evidence.lengths.max()),
        "num_answered": num_answered,
        "num_members": evidence.num_members,
    }
