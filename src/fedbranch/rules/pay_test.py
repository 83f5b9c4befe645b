"""A proposed split must pay: clients measure a step together against one of their group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fedbranch.rules.credibility import opposed_groups
from fedbranch.rules.draft import Draft
from fedbranch.rules.evidence import Decision, Evidence, Groups
from fedbranch.rules.gap_test import best_hierarchy, gap_between, least_gap
from fedbranch.rules.group_search import sizes_in_words
from fedbranch.rules.paired_losses import gain, mean_gains, p_value, pairs

__all__ = ["split_if_it_pays", "split_without_losses"]

# If no loss has come in after these rounds, the clients cannot measure any.
ROUNDS_FOR_FIRST_LOSS = 2


def split_if_it_pays(
    draft: Draft, *, error_level: float, coverage: float, max_hold_rounds: int
) -> Decision:
    """Decide about the proposal by the losses that clients measured, or wait for more of them.

    Parameters
    ----------
    draft
        The decision in the making; its evidence has the proposal and the losses.
    error_level
        The largest p at which a gain counts.
    coverage
        The share of the proposal's clients that must have measured losses.
    max_hold_rounds
        The leaf stands still for losses for at most this many rounds.

    Returns
    -------
    Decision
        A split if one of two sets of conditions is met. Claims that were overruled do not count.

        1. The clients gain: p is at most ``error_level``, and the median client of every group
           gains.
        2. A minority gains: the largest group has more than half as many clients as those that
           count, and is not significantly worse off. All other clients gain in each pair of
           losses, and half updates or a sign test confirm it. The sum of all gains is above zero.

        Otherwise the leaf trains on. The reason says which condition of the first set failed.
        While losses are missing, the leaf is held. If none come in,
        :func:`split_without_losses` decides.
    """
    evidence = draft.evidence
    what = sizes_in_words(evidence.proposal)
    ends_early = _wait_for_losses(draft, what, coverage, max_hold_rounds)
    if ends_early is not None:
        return ends_early
    claimed = mean_gains(evidence.losses)
    overruled = _overruled(evidence, claimed)
    gains = {
        client_id: claimed[client_id]
        for group, is_overruled in zip(evidence.proposal, overruled, strict=True)
        for client_id in group
        if not is_overruled and client_id in claimed
    }
    by_group = [[gains[i] for i in group if i in gains] for group in evidence.proposal]
    worst = min((float(np.median(group)) for group in by_group if group), default=0.0)
    draft.measured |= {
        "p_pays": p_value(list(gains.values()), "greater"),
        "mean_gain": float(np.mean(list(gains.values()))),
        "share_better": float(np.mean([own > 0 for own in gains.values()])),
        "worst_group_gain": worst,
        "num_overruled": _num_clients(evidence.proposal, overruled),
    }
    measured = _in_words(draft.measured)
    if draft.measured["p_pays"] <= error_level and worst > 0:
        return draft.split(f"{what}: {measured}", evidence.proposal)
    if _minority_gains(evidence, gains, error_level):
        return draft.split(
            f"{what}: all clients outside the largest group are better off, and those in it are "
            f"not significantly worse off; {measured}",
            evidence.proposal,
        )
    not_met = []
    if draft.measured["p_pays"] > error_level:
        not_met.append(f"p of at most {error_level:.3g}")
    if worst <= 0:
        not_met.append("a gain of the median client in every group")
    return draft.train(
        f"{what}, but a split does not pay: {measured}; in the group that gains least, the median "
        f"client's loss is lower by {worst:.3g}; not met: {' and '.join(not_met)}"
    )


def split_without_losses(draft: Draft, what: str, groups: Groups) -> Decision:
    """Decide about groups when clients cannot measure losses."""
    evidence = draft.evidence
    if _come_from_halves(evidence, groups):
        return draft.split(
            f"{what}, confirmed by the other half of the data; no client could measure whether it "
            "pays",
            groups,
        )
    if len(evidence.client_ids) <= len(groups):
        return draft.train(f"{what}, but only {len(evidence.client_ids)} clients are left in them")
    gap = gap_between(best_hierarchy(evidence), len(groups))
    draft.measured |= {"num_groups": len(groups), "gap": gap}
    least = least_gap(evidence, has_losses=False)
    if gap < least:
        return draft.train(
            f"{what}, but neither half updates nor losses confirm it, and the gap of {gap:.2f} "
            f"between similarities is less than {least:.2g}"
        )
    return draft.split(
        f"{what}: a gap of {gap:.2f} between similarities; no client could measure whether it pays",
        groups,
    )


def _wait_for_losses(
    draft: Draft, what: str, coverage: float, max_hold_rounds: int
) -> Decision | None:
    """Stand still for losses, or decide without them; None if enough have come in."""
    evidence = draft.evidence
    num_losses = len(evidence.losses)
    num_needed = max(1, math.ceil(coverage * sum(map(len, evidence.proposal)) - 1e-9))
    if num_losses >= num_needed:
        return None
    is_hopeless = not num_losses and evidence.rounds_proposed >= ROUNDS_FOR_FIRST_LOSS
    if not is_hopeless and evidence.rounds_proposed < max_hold_rounds:
        return draft.hold(
            f"{what}; stands still for losses: {num_losses} of {num_needed} needed clients have "
            "measured theirs"
        )
    if num_losses:
        return draft.train(
            f"{what}, but only {num_losses} of {num_needed} needed clients have measured losses"
        )
    return split_without_losses(draft, what, evidence.proposal)


def _in_words(measured: Mapping[str, float]) -> str:
    """Describe what the clients gain by a step of their group."""
    told = (
        f"after a step in its group a client's loss is lower by {measured['mean_gain']:.3g} than "
        f"after one of all together; {measured['share_better']:.0%} of the clients are better off "
        f"(p = {measured['p_pays']:.1g})"
    )
    if measured["num_overruled"]:
        told += (
            f"; {measured['num_overruled']} clients claim that they would lose, but their "
            "updates contradict that, so the claim does not count"
        )
    return told


def _overruled(evidence: Evidence, gains: Mapping[str, float]) -> list[bool]:
    """Find the groups that claim to lose although their updates contradict that.

    Only a minority can be overruled: all such groups together, or none of them.
    """
    loses = [
        bool(own) and float(np.median(own)) <= 0
        for own in ([gains[i] for i in group if i in gains] for group in evidence.proposal)
    ]
    if not any(loses):
        return loses
    overruled = [
        claims and is_opposed
        for claims, is_opposed in zip(loses, opposed_groups(evidence), strict=True)
    ]
    is_minority = 2 * _num_clients(evidence.proposal, overruled) < sum(map(len, evidence.proposal))
    return overruled if is_minority else [False] * len(overruled)


def _minority_gains(evidence: Evidence, gains: Mapping[str, float], error_level: float) -> bool:
    """Return whether all clients outside the largest group gain, and that one hardly notices.

    A few clients among many change the mean of all gains too little for the test over all of
    them. Where half updates have confirmed the groups it is enough that each of the few gains on
    both halves; otherwise a sign test must confirm their gain.
    """
    largest = max(evidence.proposal, key=len)
    of_others = [
        pair
        for client_id, losses in evidence.losses.items()
        if client_id not in largest
        for pair in pairs(losses)
    ]
    of_largest = [gains[i] for i in largest if i in gains]
    is_confirmed = _come_from_halves(evidence, evidence.proposal)
    return (
        len(largest) > len(gains) / 2
        and bool(of_others)
        and (is_confirmed or 0.5 ** len(of_others) <= error_level)
        and all(gain(*pair) > 0 for pair in of_others)
        and p_value(of_largest, "less") > error_level
        and sum(gains.values()) > 0
    )


def _come_from_halves(evidence: Evidence, groups: Groups) -> bool:
    """Return whether all clients of the groups sent half updates."""
    halved = {evidence.client_ids[row] for row in evidence.halved_rows}
    return all(client_id in halved for group in groups for client_id in group)


def _num_clients(groups: Groups, is_chosen: Sequence[bool]) -> int:
    """Count the clients of the chosen groups."""
    return sum(len(group) for group, is_it in zip(groups, is_chosen, strict=True) if is_it)
