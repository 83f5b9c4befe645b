"""A leaf is examined: from its replies to a decision, and the step to take if it trains.

Nothing changes here. A rule or an aggregate that fails leaves the server as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.geometry import norms
from fedbranch.core.projection import Projection
from fedbranch.rules import Asks, Decision, Evidence, PastRound, Rule, Verdict
from fedbranch.server.averaging import beside, locked, weights_of
from fedbranch.server.leaf import EVENT_OF, Leaf, Proposing
from fedbranch.server.options import ServerOptions
from fedbranch.server.replies.reply import Reply, stacked
from fedbranch.server.replies.store import Averages, LeafStore, Steps
from fedbranch.tree import Node

__all__ = ["Outcome", "check_decision", "examine"]


@dataclass(frozen=True, eq=False)
class Outcome:
    """A decision about a leaf, and the step to take if the leaf trains."""

    decision: Decision
    steps: Steps | None = None
    past_round: PastRound | None = None


def examine(
    node: Node,
    leaf: Leaf,
    *,
    options: ServerOptions,
    projection: Projection | None,
    this_round: int,
    num_members: int,
    num_new: int,
    most_groups: float = math.inf,
) -> Outcome:
    """Ask the rule about a leaf.

    Parameters
    ----------
    node, leaf
        Its model, and its replies, all computed at the parameters of the model.
    options, projection
        As the server has them.
    this_round, num_members, num_new
        As :class:`fedbranch.Evidence` wants them.
    most_groups
        Into how many groups the leaf may be split.

    Raises
    ------
    ValueError
        If the rule or the aggregate returns something impossible.
    """
    if leaf.store is None or not leaf.store.replies:
        decision = Decision(
            node_id=node.id,
            round=this_round,
            verdict="train",
            reason="no client of the cluster has answered",
        )
        return Outcome(decision)
    averages = leaf.store.averages(options)
    evidence = _evidence(
        node,
        leaf,
        leaf.store,
        averages,
        options=options,
        projection=projection,
        this_round=this_round,
        num_members=num_members,
        num_new=num_new,
    )
    decision = options.rule.examine(evidence)
    check_decision(decision, evidence, options.rule)
    if len(decision.groups) > most_groups:  # also a proposal, which would be for nothing
        decision = replace(
            decision,
            verdict="train",
            reason=f"{decision.reason}; but there would be {len(decision.groups) - most_groups:g} "
            "clusters more than max_clusters of the guard",
            groups=(),
            asks="nothing",
        )
    if decision.verdict != "train":
        return Outcome(decision)
    _, ordered = leaf.store.replies.in_order()
    return Outcome(decision, averages.steps(), _past_round(evidence.lengths, ordered))


def _evidence(
    node: Node,
    leaf: Leaf,
    store: LeafStore,
    averages: Averages,
    *,
    options: ServerOptions,
    projection: Projection | None,
    this_round: int,
    num_members: int,
    num_new: int,
) -> Evidence:
    """Put together what the rule is shown."""
    client_ids, ordered = store.replies.in_order()
    if projection is None:
        assert averages.whole is not None, "without sketches updates are kept"
        compared = averages.whole
    else:
        compared = locked(stacked(ordered, "sketch"))
    phase, memory = leaf.phase, leaf.memory
    halved_rows = tuple(
        row for row, reply in enumerate(ordered) if phase.halves is not None and reply.has_half
    )
    halved = [ordered[row] for row in halved_rows]
    mean = averages.compared
    shown_mean = mean if projection is None else projection.of(mean[None, :])[0]
    has_whole = projection is not None and averages.whole is not None
    proposal = leaf.proposal
    evidence = Evidence(
        node_id=node.id,
        round=this_round,
        client_ids=client_ids,
        updates=compared,
        weights=weights_of(ordered, options, compared),
        mean_update=beside(compared, shown_mean),
        num_members=num_members,
        rounds_trained=node.version,
        rounds_held=phase.rounds_held,
        rounds_since_hold=_since(memory.hold_ended, node),
        num_new=num_new,
        asked_for_halves=phase.halves is not None,
        halved_rows=halved_rows,
        half_differences=locked(stacked(halved, "half_compared")) if halved else None,
        proposal=proposal,
        losses=dict(sorted(leaf.losses.items())) if proposal else {},
        rounds_proposed=this_round - phase.since
        if proposal and isinstance(phase, Proposing)
        else 0,
        can_measure=store.can_measure,
        num_examined=memory.num_examined,
        num_merged=memory.num_merged,
        rounds_since_examined=_since(memory.examined_at, node),
        rounds_held_for_it=memory.rounds_held_for_it,
        last_measured=memory.last_measured,
        past=memory.past,
        projection=projection,
        whole=averages.whole if has_whole else None,
        whole_half_differences=locked(stacked(halved, "half")) if halved and has_whole else None,
    )
    evidence.__dict__["lengths"] = (
        averages.lengths
    )  # or its cached property would measure them again
    if projection is not None:
        evidence.__dict__["mean_length"] = float(norms(mean[None, :])[0])
    return evidence


def _since(version: int | None, node: Node) -> int | None:
    return None if version is None else node.version - version


def _past_round(lengths: NDArray[np.float64], replies: Sequence[Reply]) -> PastRound:
    """Remember how long the updates were, and the losses that were reported, under any name."""
    losses = [
        value
        for reply in replies
        for name, value in sorted(reply.metrics.items())
        if "loss" in name.lower() and value is not None
    ]
    # Divided first: the sum of reported numbers may leave the range of floats.
    mean_loss = float(sum(loss / len(losses) for loss in losses)) if losses else None
    return PastRound(float(np.sqrt(np.mean(lengths**2))), mean_loss)


def check_decision(decision: Decision, evidence: Evidence, rule: Rule) -> None:
    """Refuse a decision that a user's rule cannot mean.

    Raises
    ------
    TypeError, ValueError
        With the rule and the problem.
    """
    if not isinstance(decision, Decision):
        raise TypeError(f"{rule!r} returned {decision!r}; it must return a Decision")
    if decision.verdict not in get_args(Verdict):
        problem = f"the verdict {decision.verdict!r}, not one of {get_args(Verdict)}"
    elif (decision.node_id, decision.round) != (evidence.node_id, evidence.round):
        problem = f"node {decision.node_id} in round {decision.round}, which was not asked"
    elif decision.verdict in ("keep", "merge"):
        problem = f"the verdict {decision.verdict!r}, which is for splits that are reviewed"
    elif decision.asks not in get_args(Asks):
        problem = f"asks {decision.asks!r}, not one of {get_args(Asks)}"
    elif (decision.verdict, decision.asks) not in EVENT_OF:
        problem = f"the verdict {decision.verdict!r} while it asks for {decision.asks}"
    elif (decision.verdict == "split" or decision.asks == "losses") != bool(decision.groups):
        problem = f"the verdict {decision.verdict!r} with {len(decision.groups)} groups"
    elif decision.groups and (len(decision.groups) < 2 or not all(decision.groups)):
        problem = f"groups of {[len(group) for group in decision.groups]} clients"
    else:
        named = [client_id for group in decision.groups for client_id in group]
        unknown = sorted(set(named) - set(evidence.client_ids))
        if unknown:
            problem = f"clients {unknown}, which are not in the evidence"
        elif len(set(named)) != len(named):
            problem = "a client in two groups"
        else:
            return
    raise ValueError(
        f"{rule!r} decided on {problem}; a split names at least two groups, none empty, of the "
        "evidence's clients, each client once"
    )
