"""A cluster is examined: from what was collected at its parameters to what is to happen.

Examining changes nothing, so a rule or an aggregate that fails leaves the server as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from fedbranch.core.geometry import norms, to_numpy
from fedbranch.core.projection import Projection
from fedbranch.protocol.tasks import Trial, TrialRows
from fedbranch.rules import Asks, Decision, Evidence, PastRound, Rule, Verdict
from fedbranch.server.guard import Guard
from fedbranch.server.leaf import Case, Outcome
from fedbranch.server.replies.reply import Reply, stacked
from fedbranch.tree import Node, read_only
from fedbranch.types import Aggregate, Array, Vector, Weighting

__all__ = [
    "examine",
    "proposed_trials",
]

_CAN_ASK = [("train", "halves"), ("hold", "losses")]


def examine(
    node: Node,
    case: Case,
    *,
    rule: Rule,
    aggregate: Aggregate,
    weighting: Weighting,
    round: int,  # noqa: A002  # the word that everybody uses
    num_members: int,
    num_new: int,
    guard: Guard | None = None,
    most_groups: float = math.inf,
    projection: Projection | None = None,
) -> Outcome:
    """Ask the rule about a cluster.

    Parameters
    ----------
    node
        A leaf.
    case
        What was collected there, all of it computed at the leaf's parameters.
    rule, aggregate, weighting
        As the server has them.
    round, num_members, num_new
        As :class:`fedbranch.Evidence` wants them.
    guard
        Limits what a client counts for.
    most_groups
        Into how many groups the cluster may be split.
    projection
        What made sketches of that which is compared.

    Returns
    -------
    Outcome

    Raises
    ------
    ValueError
        If the rule or the aggregate returns something that cannot be.
    """
    if not case.replies:  # all that had answered have left since
        decision = Decision(
            node_id=node.id, round=round, verdict="train", reason="nobody has answered"
        )
        return Outcome(decision)
    client_ids = tuple(sorted(case.replies))
    ordered = [case.replies[client_id] for client_id in client_ids]
    compared = _frozen(stacked(ordered, "compared"))
    weights = _weights(ordered, weighting, guard, compared)
    halved_rows = tuple(
        row for row, reply in enumerate(ordered) if case.halves is not None and reply.has_halves
    )
    halved = [ordered[row] for row in halved_rows]
    proposal = case.present_proposal
    means = None if case.sums is None else case.sums.means(guard)
    whole = None
    if projection is None:
        lengths = to_numpy(norms(compared))
        mean = _aggregated(aggregate, compared, weights, guard, lengths)
        shown_mean = _beside(compared, mean)
    else:
        lengths = np.array(stacked(ordered, "lengths")[:, 1])  # of what is compared, in full
        if means is None:
            whole = _frozen(stacked(ordered, "whole"))
            mean = _aggregated(aggregate, whole, weights, guard, lengths)
        else:
            mean = means.compared
        shown_mean = _beside(compared, projection.of(mean[None, :])[0])
    evidence = Evidence(
        node_id=node.id,
        round=round,
        client_ids=client_ids,
        updates=compared,
        weights=weights,
        mean_update=shown_mean,
        num_members=num_members,
        rounds_trained=node.version,
        rounds_held=case.rounds_held,
        rounds_since_hold=None if case.hold_ended is None else node.version - case.hold_ended,
        num_new=num_new,
        asked_for_halves=case.halves is not None,
        halved_rows=halved_rows,
        half_differences=_frozen(stacked(halved, "half_difference")) if halved else None,
        proposal=proposal,
        losses=dict(sorted(case.losses.items())) if proposal else {},
        rounds_proposed=round - case.proposed_in if proposal else 0,
        can_measure=means is None,
        num_examined=case.num_examined,
        num_merged=case.num_merged,
        rounds_since_examined=None if case.examined_at is None else node.version - case.examined_at,
        rounds_held_for_it=case.rounds_held_for_it,
        last_measured=case.last_measured,
        past=tuple(case.past),
        projection=projection,
        whole=whole,
        whole_half_differences=(
            _frozen(stacked(halved, "whole_half")) if halved and whole is not None else None
        ),
    )
    evidence.__dict__["lengths"] = lengths  # or its cached property would measure them again
    if projection is not None:
        evidence.__dict__["mean_length"] = float(norms(mean[None, :])[0])
    decision = rule.examine(evidence)
    _check_decision(decision, evidence, rule)
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
    past_round = _past_round(evidence.lengths, ordered)
    if means is not None:
        return Outcome(decision, means.vector, means.buffers, past_round)
    if not all(reply.rows.compares_update for reply in ordered):
        mean = _aggregated(aggregate, _frozen(stacked(ordered, "vector")), weights, guard)
    buffers_step = None
    if node.buffers.size:
        buffers_step = _aggregated(aggregate, _frozen(stacked(ordered, "buffers")), weights)
    return Outcome(decision, mean, buffers_step, past_round)


def proposed_trials(
    node: Node,
    case: Case,
    *,
    aggregate: Aggregate,
    weighting: Weighting,
    guard: Guard | None = None,
) -> dict[str, tuple[Trial, ...]]:
    """Give what the clients of a proposal are to measure: a step together and one apart.

    Where all of them sent half updates, steps are made from one half of everybody's data and
    measured on the other half, both ways round; otherwise on held-out data. So also where
    signals are compared: then the halves are those of the signals, along which nobody steps.

    Returns
    -------
    dict
        Client id -> trials, in pairs.
    """
    groups = case.present_proposal
    everybody = [client_id for group in groups for client_id in group]
    replies = case.replies
    have_halves = case.halves is not None and all(
        replies[i].has_halves and replies[i].rows.compares_update for i in everybody
    )

    def after_step(client_ids: Iterable[str], sign: int) -> tuple[Vector, Vector]:
        """Give where the updates of these clients, or of one half of their data, lead."""
        ordered = [replies[client_id] for client_id in sorted(client_ids)]
        steps = stacked(ordered, "vector")
        if sign:
            steps = steps + sign * stacked(ordered, "whole_half")
        weights = _weights(ordered, weighting, guard, steps)
        buffers = node.buffers
        if buffers.size:
            buffers = buffers + _aggregated(aggregate, stacked(ordered, "buffers"), weights)
        step = _aggregated(aggregate, steps, weights, guard)
        return read_only(node.params + step), read_only(buffers)

    ways: list[tuple[int, TrialRows]] = [(0, "held-out")]
    if have_halves:  # a = v + h comes from the first half
        ways = [(+1, "second half"), (-1, "first half")]
    halves = case.halves if have_halves else None
    together = [after_step(everybody, sign) for sign, _ in ways]
    trials: dict[str, tuple[Trial, ...]] = {}
    for group in groups:
        own: list[Trial] = []
        for (sign, rows), all_together in zip(ways, together, strict=True):
            for params, buffers in (all_together, after_step(group, sign)):
                own.append(Trial(params=params, buffers=buffers, on=rows, halves=halves))
        trials |= dict.fromkeys(group, tuple(own))
    return trials


def _weights(
    replies: Sequence[Reply], weighting: Weighting, guard: Guard | None, updates: Array
) -> Array:
    counts = np.array([reply.weight if weighting == "examples" else 1.0 for reply in replies])
    return _frozen(_beside(updates, counts if guard is None else guard.weights(counts)))


def _past_round(lengths: NDArray[np.float64], replies: Sequence[Reply]) -> PastRound:
    """Remember how long the updates were, and what losses were reported, under any name."""
    losses = [
        value
        for reply in replies
        for name, value in sorted(reply.metrics.items())
        if "loss" in name.lower() and value is not None
    ]
    # Divided first: the sum of reported numbers may leave the range of floats.
    mean_loss = float(sum(loss / len(losses) for loss in losses)) if losses else None
    return PastRound(float(np.sqrt(np.mean(lengths**2))), mean_loss)


def _aggregated(
    aggregate: Aggregate,
    updates: Array,
    weights: Array,
    guard: Guard | None = None,
    lengths: NDArray[np.float64] | None = None,
) -> Vector:
    """Aggregate, and make sure that what comes back can be added to parameters."""
    if guard is not None:
        updates = _frozen(guard.clipped(updates, lengths))
    step = to_numpy(aggregate(updates, weights))
    if step.shape != updates.shape[1:] or not np.issubdtype(step.dtype, np.floating):
        raise ValueError(
            f"the aggregate returned shape {step.shape} and dtype {step.dtype} for updates of "
            f"shape {updates.shape}; it must return {updates.shape[1:]}, floating"
        )
    if not np.isfinite(step).all():
        raise ValueError("the aggregate returned NaN or infinity for finite updates")
    return np.array(step, dtype=np.float32)


def _beside(updates: Array, vector: Array) -> Array:
    """Bring a vector to where the updates are."""
    there: Array = array_namespace(updates).asarray(vector, device=device(updates))
    return there


def _check_decision(decision: Decision, evidence: Evidence, rule: Rule) -> None:
    """Refuse a decision that a user's rule cannot mean."""
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
    elif decision.asks != "nothing" and (decision.verdict, decision.asks) not in _CAN_ASK:
        problem = f"the verdict {decision.verdict!r} while it asks for {decision.asks}"
    elif (decision.verdict == "split" or decision.asks == "losses") != bool(decision.groups):
        problem = f"the verdict {decision.verdict!r} with {len(decision.groups)} groups"
    elif decision.groups and (len(decision.groups) < 2 or not all(decision.groups)):
        problem = f"groups of {[len(group) for group in decision.groups]} clients"
    else:
        named = [client_id for group in decision.groups for client_id in group]
        strangers = sorted(set(named) - set(evidence.client_ids))
        if strangers:
            problem = f"clients {strangers}, who are not in the evidence"
        elif len(set(named)) != len(named):
            problem = "a client in two groups"
        else:
            return
    raise ValueError(
        f"{rule!r} decided on {problem}; a split names at least two groups, none empty, of the "
        "evidence's clients, each client once"
    )


def _frozen(array: Array) -> Array:
    """Let users' functions read an array but not sort or scale it in place.

    Tensors of other libraries cannot be locked.
    """
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array
