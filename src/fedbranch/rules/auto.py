"""The rule without thresholds: groups that are real, and splits that pay."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.stats import wilcoxon

from fedbranch.core.geometry import take_rows
from fedbranch.core.groups import compared_halves, find_structure
from fedbranch.core.linkage import bipartition, separation_gap
from fedbranch.core.row_sampling import some_rows
from fedbranch.rules.credibility import opposed_groups
from fedbranch.rules.evidence import (
    Asks,
    Decision,
    Evidence,
    Groups,
    Review,
    Verdict,
    norm_measurements,
)
from fedbranch.rules.gap_test import best_hierarchy, gap_between, least_gap, widest_gap

__all__ = ["AutoRule"]

# Clients enough to see groups by; the others are routed to them.
CLIENTS_ENOUGH = 50
# Of more than these some are looked at, and the others are routed likewise: every two of them are
# compared.
MOST_COMPARED = 5000
# Rounds without any loss, after which nobody can measure them.
ROUNDS_FOR_LOSSES = 2
LONGEST_WAIT = 25  # rounds between two examinations
CLOSE_CALL = 100  # times the p-value that is needed, but at most:
LARGEST_CLOSE_CALL = 0.01
OUTLIER = 5  # standard deviations
LEAST_LENGTH_LEFT = 0.3  # of what clients' updates were at first; those of noise are shorter
# For only_conflicts: one model has converged if what the updates have in common is at most this
# share of them, and in the last third of the rounds norms and losses were hardly lower than in
# the third before.
MOST_IN_COMMON = 0.05
LEAST_NORM_LEFT = 0.97
LEAST_LOSS_LEFT = 0.97
ROUNDS_TO_CONVERGE = 30


@dataclass(frozen=True, kw_only=True)
class AutoRule:
    """Split where there are groups, more than noise, that gain by it. Nothing to tune.

    Parameters
    ----------
    only_conflicts
        Keep to the paper's meaning: split only what one model cannot fit, that is, where the
        clients' updates and losses do not vanish although the one model has converged. By
        default a split must pay for the clients, whatever the reason.
    error_level
        How probable it may be that a split which does not pay is taken for one that does, and
        that one which pays is merged back.
    coverage
        The share of the cluster's clients that must have answered at the same parameters
        before it is split, in (0, 1]; of large clusters 50 clients are enough. More are waited
        for as long as answers come in. The others find their group when they next take part.
    max_hold_rounds
        How many rounds a cluster may stand still for them.
    review_after
        How many rounds after a split it is looked at again.

    Notes
    -----
    An examination goes on in steps, each of which must succeed:

    1. The clients are asked for half updates. It is a round like any other, for twice the
       upload and computation: their means train the model. How groups are found, told from
       noise and confirmed in the other half: :func:`fedbranch.core.groups.find_structure`.
    2. The cluster stands still, and the clients measure, on the half of their data that a step
       was not made from, the loss after a step of all together and after one of their group.
       A one-sided Wilcoxon signed-rank test over the clients at ``error_level`` must find the
       group's step better, and in every group half of the clients must gain. A minority that
       says it would lose is not believed if its updates have nothing in common with the
       others'; see :mod:`fedbranch.rules.credibility`.
    3. The cluster splits into all groups at once.

    Some rounds later clients compare their leaf on held-out data with the mean of all leaves
    of the split, which is what training together would have come to. If that is significantly
    better the split is merged back to it. Otherwise clients that fare clearly better with
    another leaf of the split move there, unless their update at the split pointed away from it.

    Examinations begin after the first round. After one that ended without a split the cluster
    trains for 2, 3, 4, 6, 8, 12, ... rounds before the next, at most 25, or twice that for
    every split that was merged back; for 2 if it was a close call; and at least for thrice the
    rounds that it had to stand still.

    Clients that cannot make half updates or measure losses, such as unmodified Flower apps,
    are judged by less: by the gap between the heights at which single linkage joins the
    groups, and by held-out losses if they evaluate.

    Examples
    --------
    >>> AutoRule().only_conflicts
    False
    """

    only_conflicts: bool = False
    error_level: float = 0.05
    coverage: float = 0.8
    max_hold_rounds: int = 10
    review_after: tuple[int, ...] = (2, 5, 20)

    def __post_init__(self) -> None:
        if not isinstance(self.only_conflicts, bool):
            raise TypeError(f"only_conflicts is {self.only_conflicts!r}; it must be True or False")
        for name in ("error_level", "coverage"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "max_hold_rounds", operator.index(self.max_hold_rounds))
        object.__setattr__(self, "review_after", tuple(map(operator.index, self.review_after)))
        for name, allowed, is_allowed in [
            ("error_level", "a number in (0, 0.5)", 0 < self.error_level < 0.5),
            ("coverage", "a number in (0, 1]", 0 < self.coverage <= 1),
            ("max_hold_rounds", "at least 1", self.max_hold_rounds >= 1),
            (
                "review_after",
                "positive and ascending",
                all(
                    a < b for a, b in zip((0, *self.review_after), self.review_after, strict=False)
                ),
            ),
        ]:
            if not is_allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")

    def examine(self, evidence: Evidence) -> Decision:
        """Answer the questions in their order, and say at which one it ended."""
        about = _Answer(evidence)
        if evidence.num_members < 3:
            return about.train("fewer than three clients: groups cannot be told from noise")
        if evidence.proposal:
            return self._does_it_pay(about)
        if not evidence.asked_for_halves:
            return self._is_it_time(about)
        num_answered = len(evidence.client_ids)
        num_needed = self._num_needed(evidence.num_members)
        # The last ones are not needed, but as long as answers come in they are waited for:
        # whoever is missing at a split has to find its group by a single update.
        is_complete = num_answered >= min(evidence.num_members, CLIENTS_ENOUGH)
        if num_answered < num_needed or not (is_complete or evidence.num_new == 0):
            waiting = f"{num_answered} of {evidence.num_members} clients have answered, needed: {num_needed}"
            if evidence.rounds_held < self.max_hold_rounds:
                return about.hold(f"stands still to be examined: {waiting}")
            if num_answered < num_needed:
                return about.train(
                    f"stood still in vain for {evidence.rounds_held} rounds: {waiting}; trains on"
                )
        if evidence.rounds_held >= 2 * self.max_hold_rounds:  # and groups left while it was tried
            return about.train(f"stood still for {evidence.rounds_held} rounds; trains on")
        if len(evidence.halved_rows) < num_needed:
            return self._are_there_groups_without_halves(about)
        return self._are_there_groups(about)

    def _num_needed(self, num_members: int) -> int:
        share = math.ceil(self.coverage * num_members - 1e-9)
        return max(min(3, num_members), min(share, CLIENTS_ENOUGH))

    def _is_it_time(self, about: _Answer) -> Decision:
        evidence = about.evidence
        since = evidence.rounds_since_examined
        if since is None:
            return about.wait("trains, and is examined in the next round", asks="halves")
        longest = LONGEST_WAIT * 2**evidence.num_merged
        wait = min(longest, math.ceil(1.5 ** min(evidence.num_examined, 50)))
        if _was_close(evidence.last_measured):
            wait = min(wait, 2)
        wait = max(wait, 3 * evidence.rounds_held_for_it)
        # The round that trains now counts.
        if since + 1 < wait:
            num_rounds = wait - since
            return about.wait(f"trains; examined again in {num_rounds} rounds")
        return about.wait("trains, and is examined in the next round", asks="halves")

    def _are_there_groups(self, about: _Answer) -> Decision:
        evidence = about.evidence
        assert evidence.half_differences is not None
        # Whoever could not make halves is routed, like those who have not answered.
        places = some_rows(
            len(evidence.halved_rows), MOST_COMPARED, evidence.node_id, evidence.round
        )
        rows = [evidence.halved_rows[place] for place in places.tolist()]
        updates, half_differences = evidence.updates, evidence.half_differences
        if evidence.whole is not None and evidence.whole_half_differences is not None:
            # How clear groups are may hang on little, and sketches add an error of their own.
            updates, half_differences = evidence.whole, evidence.whole_half_differences
        halves = compared_halves(
            take_rows(updates, rows), take_rows(half_differences, places.tolist())
        )
        found = find_structure(halves)
        about.measured |= {"noise": halves.noise, "num_halved": len(rows)}
        if found is None:
            return about.train("no groups: all updates are equally similar")
        about.measured |= {
            "num_groups": found.num_groups,
            "scatter": found.scatter,
            "loosest_scatter": found.loosest_scatter,
            "p_structure": found.p_value,
            "p_structure_needed": found.level,
            "num_misplaced": found.num_misplaced,
            # Nothing is decided by these two, but they are what the paper draws.
            "cross_similarity": bipartition(halves.similarity).cross_similarity,
            "separation_gap": separation_gap(halves.similarity, found.groups.tolist()),
        }
        what = f"{found.num_groups} groups of {_sizes(found.groups)}"
        if not found.is_clear:
            return about.train(f"no groups: of the best cut, into {what}, {found.doubt}")
        return self._proposal(
            about,
            what,
            f"within them clients differ by {max(found.scatter, 0):.0%} of what groups differ by, and "
            f"the other half of the data confirms them (p = {found.p_value:.1g})",
            {
                evidence.client_ids[row]: int(group)
                for row, group, is_misplaced in zip(
                    rows, found.groups, found.misplaced, strict=True
                )
                if not is_misplaced
            },
        )

    def _are_there_groups_without_halves(self, about: _Answer) -> Decision:
        evidence = about.evidence
        num_clients = len(evidence.client_ids)
        merges, num_groups, gap = widest_gap(evidence)
        groups = merges.groups(num_groups)
        about.measured |= {"num_groups": num_groups, "gap": gap}
        what = f"{num_groups} groups of {_sizes(groups)}"
        halves = f"{len(evidence.halved_rows)} of {num_clients} sent half updates"
        lengths = [entry.norm for entry in evidence.past] or [1.0]
        about.measured["length_left"] = lengths[-1] / lengths[0] if lengths[0] else 1.0
        if about.measured["length_left"] < LEAST_LENGTH_LEFT:
            return about.train(
                f"converged: updates have {about.measured['length_left']:.0%} of their first length, "
                f"what is left may be noise ({halves})"
            )
        least = least_gap(evidence)
        if gap < least:
            return about.train(
                f"no groups: the widest gap between similarities, for {what}, is {gap:.2f}, less "
                f"than {least:.2g} ({halves})"
            )
        return self._proposal(
            about,
            what,
            f"a gap of {gap:.2f} between similarities ({halves})",
            dict(zip(evidence.client_ids, map(int, groups), strict=True)),
        )

    def _proposal(
        self, about: _Answer, what: str, why: str, group_of: Mapping[str, int]
    ) -> Decision:
        doubt = _still_converging(about) if self.only_conflicts else ""
        if doubt:
            return about.train(f"{what}, but perhaps no conflict: {doubt}")
        members: dict[int, list[str]] = {}
        for client_id, group in group_of.items():
            members.setdefault(group, []).append(client_id)
        groups = tuple(tuple(members[group]) for group in sorted(members))
        if not about.evidence.can_measure:
            return self._split_without_losses(about, f"{what}: {why}", groups)
        return about.propose(f"{what}: {why}; asks whether a split would pay", groups)

    def _does_it_pay(self, about: _Answer) -> Decision:
        evidence = about.evidence
        proposed = [client_id for group in evidence.proposal for client_id in group]
        num_needed = max(1, math.ceil(self.coverage * len(proposed) - 1e-9))
        what = f"{len(evidence.proposal)} groups of {_counts(evidence.proposal)}"
        if len(evidence.losses) < num_needed:
            waits_in_vain = not evidence.losses and evidence.rounds_proposed >= ROUNDS_FOR_LOSSES
            if not waits_in_vain and evidence.rounds_proposed < self.max_hold_rounds:
                return about.hold(
                    f"{what}; stands still for losses: {len(evidence.losses)} of {num_needed} are in"
                )
            if evidence.losses:
                return about.train(
                    f"{what}, but only {len(evidence.losses)} of {num_needed} needed losses came in"
                )
            return self._split_without_losses(about, what, evidence.proposal)
        told_gains = _gains(evidence.losses)
        overruled = self._overruled(evidence, told_gains)
        gains = {
            client_id: told_gains[client_id]
            for group, is_overruled in zip(evidence.proposal, overruled, strict=True)
            for client_id in group
            if not is_overruled and client_id in told_gains
        }
        by_group = [[gains[i] for i in group if i in gains] for group in evidence.proposal]
        worst = min((float(np.median(group)) for group in by_group if group), default=0.0)
        about.measured |= {
            "p_pays": _p_value(list(gains.values()), "greater"),
            "mean_gain": float(np.mean(list(gains.values()))),
            "share_better": float(np.mean([gain > 0 for gain in gains.values()])),
            "worst_group_gain": worst,
            "num_overruled": sum(map(len, _chosen(evidence.proposal, overruled))),
        }
        p_value, mean = about.measured["p_pays"], about.measured["mean_gain"]
        told = (
            f"after a step in its group a client's loss is lower by {mean:.3g} than after one of all "
            f"together; {about.measured['share_better']:.0%} of the clients are better off "
            f"(p = {p_value:.1g})"
        )
        if any(overruled):
            told += (
                f"; {about.measured['num_overruled']} clients say that they would lose, but their "
                "updates point elsewhere"
            )
        if p_value <= self.error_level and worst > 0:
            return about.split(f"{what}: {told}", evidence.proposal)
        if self._others_pay(evidence, gains):
            return about.split(
                f"{what}: all clients outside the largest group are better off, and it does not "
                f"mind; {told}",
                evidence.proposal,
            )
        return about.train(f"{what}, but a split does not pay: {told}, worst group {worst:.3g}")

    def _overruled(self, evidence: Evidence, gains: Mapping[str, float]) -> list[bool]:
        """Find the groups that say they would lose although their updates contradict them.

        Only a minority can be overruled: all such groups together, or none of them.
        """
        loses = [
            bool(own) and float(np.median(own)) <= 0
            for own in ([gains[i] for i in group if i in gains] for group in evidence.proposal)
        ]
        if not any(loses):
            return loses
        overruled = [
            said and is_opposed
            for said, is_opposed in zip(loses, opposed_groups(evidence), strict=True)
        ]
        num_overruled = sum(map(len, _chosen(evidence.proposal, overruled)))
        is_minority = 2 * num_overruled < sum(map(len, evidence.proposal))
        return overruled if is_minority else [False] * len(overruled)

    def _others_pay(self, evidence: Evidence, gains: Mapping[str, float]) -> bool:
        """Whether a few leave the others, who hardly notice.

        A handful of clients among many changes nobody's mean, so the test over all of them
        would find nothing. That all of the few gain on both halves is enough where the halves
        have confirmed the groups; otherwise a sign test must confirm them.
        """
        largest = max(evidence.proposal, key=len)
        pairs = [
            pair
            for client_id, losses in evidence.losses.items()
            if client_id not in largest
            for pair in _pairs(losses)
        ]
        remaining = [gains[i] for i in largest if i in gains]
        is_confirmed = _confirmed_by_halves(evidence, evidence.proposal)
        return (
            len(largest) > len(gains) / 2
            and bool(pairs)
            and (is_confirmed or 0.5 ** len(pairs) <= self.error_level)
            and all(_gain(*pair) > 0 for pair in pairs)
            and _p_value(remaining, "less") > self.error_level
            and sum(gains.values()) > 0
        )

    def _split_without_losses(self, about: _Answer, what: str, groups: Groups) -> Decision:
        evidence = about.evidence
        if _confirmed_by_halves(evidence, groups):
            return about.split(
                f"{what}, confirmed by the other half of the data; nobody could measure whether it "
                "pays",
                groups,
            )
        if len(evidence.client_ids) <= len(groups):
            return about.train(f"{what}, but too few clients are left to tell")
        gap = gap_between(best_hierarchy(evidence), len(groups))
        about.measured |= {"num_groups": len(groups), "gap": gap}
        least = least_gap(evidence, has_losses=False)
        if gap < least:
            return about.train(
                f"{what}, but neither half updates nor losses confirm it, and the gap of {gap:.2f} "
                f"between similarities is less than {least:.2g}"
            )
        return about.split(
            f"{what}: a gap of {gap:.2f} between similarities; nobody could measure whether it pays",
            groups,
        )

    def review(self, review: Review) -> Decision:
        """Look at a split again: merge it back if the clients are worse off, or move some."""
        measured: dict[str, float] = {"num_answered": len(review.losses)}

        def decide(
            verdict: Verdict, reason: str, moves: Mapping[str, int] | None = None
        ) -> Decision:
            return Decision(
                node_id=review.node_id,
                round=review.round,
                verdict=verdict,
                reason=f"looked at again {review.rounds_since_split} rounds after the split: {reason}",
                measurements=measured,
                moves=moves or {},
            )

        if not review.losses:
            return decide("keep", "nobody could compare")
        place = review.leaf_of
        position = {leaf: number for number, leaf in enumerate(review.clusters, start=1)}
        gains = {i: _gain(own[0], own[position[place[i]]]) for i, own in review.losses.items()}
        p_worse = _p_value(list(gains.values()), "less")
        measured |= {
            "p_worse": p_worse,
            "mean_gain": float(np.mean(list(gains.values()))),
            "share_better": float(np.mean([gain > 0 for gain in gains.values()])),
        }
        told = (
            f"{measured['share_better']:.0%} of {len(gains)} clients are better off with their own "
            f"cluster than with the mean of all, their loss is lower by {measured['mean_gain']:.3g}"
        )
        if p_worse <= self.error_level:
            return decide("merge", f"{told} (p = {p_worse:.1g} for worse): it did not pay")
        moves = {
            client_id: leaf
            for client_id, leaf in _better_elsewhere(review.losses, place, position).items()
            if leaf not in review.opposed.get(client_id, ())
        }
        if moves:
            told += f"; {', '.join(moves)} would be better off elsewhere and move"
        return decide("keep", told, moves)


@dataclass
class _Answer:
    """A decision in the making."""

    evidence: Evidence
    measured: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.measured |= norm_measurements(self.evidence)

    def wait(self, reason: str, asks: Asks = "nothing") -> Decision:
        return replace(self._decision("train", reason, (), asks), is_examination=False)

    def train(self, reason: str) -> Decision:
        return self._decision("train", reason, (), "nothing")

    def hold(self, reason: str) -> Decision:
        asks: Asks = "losses" if self.evidence.proposal else "nothing"
        return self._decision("hold", reason, self.evidence.proposal, asks)

    def propose(self, reason: str, groups: Groups) -> Decision:
        return self._decision("hold", reason, groups, "losses")

    def split(self, reason: str, groups: Groups) -> Decision:
        return self._decision("split", reason, groups, "nothing")

    def _decision(self, verdict: Verdict, reason: str, groups: Groups, asks: Asks) -> Decision:
        return Decision(
            node_id=self.evidence.node_id,
            round=self.evidence.round,
            verdict=verdict,
            reason=reason,
            measurements={n: v for n, v in self.measured.items() if math.isfinite(v)},
            groups=groups,
            asks=asks,
        )


def _still_converging(about: _Answer) -> str:
    """Say what speaks against a conflict that one model can never resolve; empty if nothing."""
    measured, past = about.measured, about.evidence.past
    length = math.sqrt(sum(entry.norm**2 for entry in past[-1:]))
    in_common = (measured["mean_norm"] / length) ** 2 if length else 1.0
    measured["in_common"] = in_common
    if len(past) < ROUNDS_TO_CONVERGE:
        return f"after {len(past)} rounds nobody can tell"
    third = len(past) // 3
    before, after = past[-2 * third : -third], past[-third:]
    norm_left = sum(e.norm for e in after) / max(sum(e.norm for e in before), 1e-300)
    measured["norm_left"] = norm_left
    losses = [[e.loss for e in part if e.loss is not None] for part in (before, after)]
    if all(losses):
        measured["loss_left"] = float(np.mean(losses[1]) / max(float(np.mean(losses[0])), 1e-300))
    if in_common > MOST_IN_COMMON:
        return f"the updates still have {in_common:.0%} in common"
    if norm_left < LEAST_NORM_LEFT:
        return f"the updates still shrink (to {norm_left:.0%} over the last third of the rounds)"
    if measured.get("loss_left", 1.0) < LEAST_LOSS_LEFT:
        return f"the losses still fall (to {measured['loss_left']:.0%} over the last third of the rounds)"
    return ""


def _confirmed_by_halves(evidence: Evidence, groups: Groups) -> bool:
    """Whether groups come from half updates."""
    halved = {evidence.client_ids[row] for row in evidence.halved_rows}
    return all(client_id in halved for group in groups for client_id in group)


def _was_close(measured: Mapping[str, float]) -> bool:
    """Whether an examination saw groups but could not yet be sure of them."""
    needed = measured.get("p_structure_needed", 0.0)
    return measured.get("p_structure", 1.0) <= min(CLOSE_CALL * needed, LARGEST_CLOSE_CALL)


def _better_elsewhere(
    losses: Mapping[str, Sequence[float]], place: Mapping[str, int], position: Mapping[int, int]
) -> dict[str, int]:
    """Find the clients that are in the wrong group: client id -> leaf.

    The others say what being in the right one is worth: by how much their own cluster's model
    is better for them than the second best, and how much that varies. A client for which
    another one is better by more than half of that, and which so is no outlier by chance,
    belongs there.
    """
    best, by_how_much = {}, {}
    for client_id, own in losses.items():
        others = [leaf for leaf in position if leaf != place[client_id]]
        best[client_id] = min(others, key=lambda leaf: own[position[leaf]])
        by_how_much[client_id] = _gain(
            own[position[place[client_id]]], own[position[best[client_id]]]
        )
    values = np.array(list(by_how_much.values()))
    worth = -float(np.median(values))
    deviation = 1.4826 * float(np.median(np.abs(values + worth)))  # a normal one's standard
    enough = max(worth / 2, OUTLIER * deviation - worth)
    return {
        client_id: best[client_id]
        for client_id, better in by_how_much.items()
        if worth > 0 and better > enough
    }


def _pairs(losses: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(losses[::2], losses[1::2], strict=True))


def _gain(together: float, apart: float) -> float:
    """By how much a loss is lower apart. A model that has diverged is as bad as can be."""
    worst = 1e6
    first, second = (
        min(max(loss, -worst), worst) if math.isfinite(loss) else worst
        for loss in (together, apart)
    )
    return first - second


def _gains(losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {i: float(np.mean([_gain(*pair) for pair in _pairs(own)])) for i, own in losses.items()}


def _p_value(gains: Sequence[float], alternative: str) -> float:
    """Test by Wilcoxon's signed ranks whether gains are above ("greater") or below zero."""
    if not any(gains):
        return 1.0
    return float(wilcoxon(gains, alternative=alternative).pvalue)


def _chosen(groups: Groups, is_chosen: Sequence[bool]) -> list[tuple[str, ...]]:
    return [group for group, is_it in zip(groups, is_chosen, strict=True) if is_it]


def _sizes(groups: np.ndarray) -> str:
    return " + ".join(str(count) for count in sorted(np.bincount(groups).tolist(), reverse=True))


def _counts(groups: Groups) -> str:
    return " + ".join(str(count) for count in sorted(map(len, groups), reverse=True))
