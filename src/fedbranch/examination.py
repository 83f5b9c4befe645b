"""A cluster is examined: from what was collected at its parameters to what is to happen.

Examining changes nothing, so a rule or an aggregate that fails leaves the server as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from fedbranch.checkpoint import LastingTensors, Tensors
from fedbranch.core.geometry import Array, norms, to_numpy
from fedbranch.core.sketch import Projection
from fedbranch.files import JSON
from fedbranch.guard import REPLIES_TO_COMPARE, Guard
from fedbranch.messages import (
    Reply,
    Trial,
    TrialRows,
    replies_from_state,
    replies_to_state,
    replies_to_tensors,
    stacked,
)
from fedbranch.rules import Asks, Decision, Evidence, Groups, PastRound, Rule, Verdict
from fedbranch.sums import Sums
from fedbranch.tree import Node, Vector, read_only

__all__ = [
    "Aggregate",
    "Case",
    "Outcome",
    "Weighting",
    "examine",
    "proposed_trials",
    "usual_lengths",
]

_CAN_ASK = [("train", "halves"), ("hold", "losses")]

Aggregate = Callable[[Array, Array], Array]
Weighting = Literal["examples", "equal"]


@dataclass
class Case:
    """What the server has collected about a leaf, and remembers of its examinations."""

    replies: dict[str, Reply] = field(default_factory=dict)  # at the leaf's present parameters
    rounds_held: int = 0
    hold_ended: int | None = None  # the leaf's version after a hold without a split
    halves: int | None = None  # names the halves that its clients are asked for
    proposal: Groups = ()
    proposed_in: int = 0  # round
    losses: dict[str, tuple[float, ...]] = field(default_factory=dict)
    num_examined: int = 0
    num_merged: int = 0
    examined_at: int | None = None  # the leaf's version after the last examination
    rounds_held_for_it: int = 0
    last_measured: Mapping[str, float] = field(default_factory=dict)
    past: list[PastRound] = field(default_factory=list)
    sums: Sums | None = None  # of updates that were not kept, at the leaf's present parameters
    usual: Mapping[str, float] = field(default_factory=dict)  # median lengths when it last trained
    held_since: dict[str, int] = field(default_factory=dict)  # client id -> round of its reply
    # For checkpoints: round -> whose replies of that round are held, and these, which never change.
    _held: dict[int, tuple[list[str], LastingTensors]] = field(default_factory=dict, repr=False)

    def copy(self) -> Case:
        """Copy it, so that what comes in can be added to the copy."""
        return replace(
            self,
            replies=dict(self.replies),
            losses=dict(self.losses),
            held_since=dict(self.held_since),
            _held=dict(self._held),
        )

    def forget(self, client_id: str) -> None:
        """Drop what a client has sent."""
        self.replies.pop(client_id, None)
        self.held_since.pop(client_id, None)
        self.losses.pop(client_id, None)

    @property
    def present_proposal(self) -> Groups:
        """The proposed groups without clients that have left; empty if a group has."""
        groups = tuple(tuple(i for i in group if i in self.replies) for group in self.proposal)
        return groups if all(groups) else ()

    def lacking(self, client_ids: Iterable[str]) -> list[str]:
        """Give those of the clients who can still give what the examination waits for."""
        proposed = {client_id for group in self.present_proposal for client_id in group}
        if self.sums is not None:  # nobody can be asked for losses
            proposed = set()
        return [
            client_id
            for client_id in client_ids
            if client_id not in self.replies
            or (client_id in proposed and client_id not in self.losses)
        ]

    def close(self, outcome: Outcome, version: int, this_round: int) -> None:
        """Go on after a decision that did not split; the leaf's version is the one after it."""
        decision = outcome.decision
        if decision.verdict == "hold":
            self.rounds_held += 1
            for client_id in self.replies:
                self.held_since.setdefault(client_id, this_round)
            if decision.groups != self.present_proposal:  # also if a whole group has left
                self.proposal, self.proposed_in = decision.groups, this_round
                self.losses = {}
            return
        if self.halves is not None:
            self.num_examined += 1
            self.examined_at, self.rounds_held_for_it = version, self.rounds_held
            self.last_measured = decision.measurements
        if self.rounds_held:
            self.hold_ended = version
        if outcome.past_round is not None:
            self.past.append(outcome.past_round)
            self.usual = usual_lengths(self.replies.values())
        self.sums = None
        self.replies, self.losses, self.proposal, self.rounds_held = {}, {}, (), 0
        self.held_since, self._held = {}, {}
        self.halves = this_round if decision.asks == "halves" else None

    def to_state(self, name: str = "held") -> tuple[JSON, dict[str, Tensors]]:
        """Describe the case as JSON and files, whose names begin with this one, for a checkpoint.

        What was held before is in files of its own, one for each round, which last.
        """
        self._held = dict(self._grouped())
        files: dict[str, Tensors] = {f"{name}-{i}": held for i, (_, held) in self._held.items()}
        state: JSON = {
            "held": {
                str(round_): replies_to_state({i: self.replies[i] for i in client_ids})
                for round_, (client_ids, _) in self._held.items()
            },
            "rounds_held": self.rounds_held,
            "hold_ended": self.hold_ended,
            "halves": self.halves,
            "proposal": [list(group) for group in self.proposal],
            "proposed_in": self.proposed_in,
            "losses": {i: [repr(loss) for loss in own] for i, own in self.losses.items()},
            "num_examined": self.num_examined,
            "num_merged": self.num_merged,
            "examined_at": self.examined_at,
            "rounds_held_for_it": self.rounds_held_for_it,
            "last_measured": {name: repr(float(v)) for name, v in self.last_measured.items()},
            "past": [list(entry) for entry in self.past],
            "usual": {name: repr(float(length)) for name, length in self.usual.items()},
        }
        if self.sums is not None:
            state["sums"], files[name] = self.sums.to_state()
        return state, files

    def _grouped(self) -> Iterator[tuple[int, tuple[list[str], LastingTensors]]]:
        """Give the rounds from which replies are held, whose they are, and their tensors."""
        held: dict[int, list[str]] = {}
        for client_id in sorted(self.replies):
            held.setdefault(self.held_since[client_id], []).append(client_id)
        for round_, client_ids in sorted(held.items()):
            known = self._held.get(round_)
            if known is not None and known[0] == client_ids:
                yield round_, known
                continue
            replies = {client_id: self.replies[client_id] for client_id in client_ids}
            yield round_, (client_ids, LastingTensors(partial(replies_to_tensors, replies)))

    @classmethod
    def from_state(
        cls,
        state: JSON,
        files: Mapping[str, Tensors],
        name: str = "held",
        projection: Projection | None = None,
    ) -> Case:
        """Rebuild a case from what :meth:`to_state` gave."""
        replies: dict[str, Reply] = {}
        held_since: dict[str, int] = {}
        held: dict[int, tuple[list[str], LastingTensors]] = {}
        for key, of_round in state["held"].items():
            tensors = files[f"{name}-{int(key)}"]
            found = replies_from_state(of_round, tensors)
            if held_since.keys() & found.keys():
                raise ValueError("a client's reply is held twice")
            replies |= found
            held_since |= dict.fromkeys(found, int(key))
            same = LastingTensors(partial(dict, tensors), read=tensors)
            held[int(key)] = sorted(found), same
        sums = None
        if "sums" in state:
            if projection is None:
                raise ValueError("there are sums of updates, but no sketches of them")
            sums = Sums.from_state(state["sums"], files.get(name, {}), projection)
        return cls(
            replies=replies,
            rounds_held=state["rounds_held"],
            hold_ended=state["hold_ended"],
            halves=state["halves"],
            proposal=tuple(tuple(group) for group in state["proposal"]),
            proposed_in=state["proposed_in"],
            losses={i: tuple(map(float, own)) for i, own in state["losses"].items()},
            num_examined=state["num_examined"],
            num_merged=state["num_merged"],
            examined_at=state["examined_at"],
            rounds_held_for_it=state["rounds_held_for_it"],
            last_measured={which: float(v) for which, v in state["last_measured"].items()},
            past=[PastRound(*entry) for entry in state["past"]],
            sums=sums,
            # Not in states of older versions.
            usual={which: float(length) for which, length in state.get("usual", {}).items()},
            held_since=held_since,
            _held=held,
        )


@dataclass(frozen=True, eq=False)
class Outcome:
    """A decision, and the steps to take if it is to train."""

    decision: Decision
    params_step: Vector | None = None
    buffers_step: Vector | None = None
    past_round: PastRound | None = None


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
        lengths = np.array([_compared_length(reply) for reply in ordered])
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
        num_examined=case.num_examined,
        num_merged=case.num_merged,
        rounds_since_examined=None if case.examined_at is None else node.version - case.examined_at,
        rounds_held_for_it=case.rounds_held_for_it,
        last_measured=case.last_measured,
        past=tuple(case.past),
        projection=projection,
        whole=whole,
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


def _compared_length(reply: Reply) -> float:
    """Give how long what is compared of a reply is in full, where there are sketches."""
    assert reply.lengths is not None
    return float(reply.lengths[1])


def usual_lengths(replies: Collection[Reply]) -> dict[str, float]:
    """Give the median lengths of replies that were not kept, for those who come after them."""
    measured = [reply.lengths for reply in replies if reply.lengths is not None]
    if len(measured) < REPLIES_TO_COMPARE:
        return {}
    medians = np.median(np.stack(measured), axis=0)
    return dict(zip(("update", "signal", "buffers"), medians.tolist(), strict=True))


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
