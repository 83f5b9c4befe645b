"""A cluster is examined: from the replies collected at its parameters to what is to happen.

Nothing is changed here, so a rule or an aggregate that fails leaves the server as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from array_api_compat import array_namespace, device

from fedbranch.core.geometry import Array, to_numpy
from fedbranch.messages import Reply, stacked
from fedbranch.rules import Decision, Evidence, Rule, Verdict
from fedbranch.tree import Node, Vector

__all__ = ["Aggregate", "Outcome", "Weighting", "examine"]

Aggregate = Callable[[Array, Array], Array]
Weighting = Literal["examples", "equal"]


@dataclass(frozen=True, eq=False)
class Outcome:
    """A decision, and the steps to take if it is to train."""

    decision: Decision
    params_step: Vector | None = None
    buffers_step: Vector | None = None


def examine(
    node: Node,
    replies: Mapping[str, Reply],
    *,
    rule: Rule,
    aggregate: Aggregate,
    weighting: Weighting,
    round: int,  # noqa: A002  # the word that everybody uses
    num_members: int,
    rounds_held: int,
    rounds_since_hold: int | None,
) -> Outcome:
    """Ask the rule about a cluster.

    Parameters
    ----------
    node
        A leaf.
    replies
        Client id -> reply, all computed at the leaf's parameters.
    rule, aggregate, weighting
        As the server has them.
    round, num_members, rounds_held, rounds_since_hold
        As :class:`fedbranch.Evidence` wants them.

    Returns
    -------
    Outcome

    Raises
    ------
    ValueError
        If the rule or the aggregate returns something that cannot be.
    """
    if not replies:  # all that had answered have left since
        decision = Decision(
            node_id=node.id, round=round, verdict="train", reason="nobody has answered"
        )
        return Outcome(decision)
    client_ids = tuple(sorted(replies))
    ordered = [replies[client_id] for client_id in client_ids]
    compared = _frozen(stacked(ordered, "compared"))
    counts = [reply.weight if weighting == "examples" else 1.0 for reply in ordered]
    weights = _frozen(_beside(compared, np.array(counts)))
    evidence = Evidence(
        node_id=node.id,
        round=round,
        client_ids=client_ids,
        updates=compared,
        weights=weights,
        mean_update=_beside(compared, mean := _aggregated(aggregate, compared, weights)),
        num_members=num_members,
        rounds_trained=node.version,
        rounds_held=rounds_held,
        rounds_since_hold=rounds_since_hold,
    )
    decision = rule.examine(evidence)
    _check_decision(decision, evidence, rule)
    if decision.verdict != "train":
        return Outcome(decision)
    if any(reply.rows.vector is not reply.rows.compared for reply in ordered):
        mean = _aggregated(aggregate, _frozen(stacked(ordered, "vector")), weights)
    buffers_step = None
    if node.buffers.size:
        buffers_step = _aggregated(aggregate, _frozen(stacked(ordered, "buffers")), weights)
    return Outcome(decision, params_step=mean, buffers_step=buffers_step)


def _aggregated(aggregate: Aggregate, updates: Array, weights: Array) -> Vector:
    """Aggregate, and make sure that what comes back can be added to parameters."""
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
    elif (decision.verdict == "split") != bool(decision.groups):
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
