"""When a leaf is examined, and how long it stands still for that."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedbranch.rules.draft import Draft
from fedbranch.rules.evidence import Decision

__all__ = ["ENOUGH_CLIENTS", "num_needed", "wait_for_replies", "wait_for_time"]

ENOUGH_CLIENTS = 50  # groups are found among this many clients; the others are routed to them
LONGEST_WAIT = 25  # rounds between two examinations
# An examination was a close call if its p-value was at most this many times the needed one, and at
# most the second constant.
CLOSE_CALL_FACTOR = 100
LARGEST_CLOSE_CALL = 0.01
ROUNDS_AFTER_CLOSE_CALL = 2
# A leaf trains at least this many times the rounds that it stood still for an examination.
TRAINED_PER_ROUND_HELD = 3


def num_needed(coverage: float, num_members: int) -> int:
    """Compute how many clients must have answered before groups are looked for."""
    share = math.ceil(coverage * num_members - 1e-9)
    return max(min(3, num_members), min(share, ENOUGH_CLIENTS))


def wait_for_time(draft: Draft) -> Decision:
    """Decide whether the next round asks for half updates, and so begins an examination."""
    evidence = draft.evidence
    since = evidence.rounds_since_examined
    if since is None:
        return draft.wait("trains; the next round begins an examination", asks="halves")
    longest = LONGEST_WAIT * 2**evidence.num_merged
    wait = min(longest, math.ceil(1.5 ** min(evidence.num_examined, 50)))
    if _was_close_call(evidence.last_measured):
        wait = min(wait, ROUNDS_AFTER_CLOSE_CALL)
    wait = max(wait, TRAINED_PER_ROUND_HELD * evidence.rounds_held_for_it)
    # The round that trains now counts.
    if since + 1 < wait:
        return draft.wait(f"trains; the next examination begins in {wait - since} rounds")
    return draft.wait("trains; the next round begins an examination", asks="halves")


def wait_for_replies(draft: Draft, *, coverage: float, max_hold_rounds: int) -> Decision | None:
    """Stand still for more replies, or give up; None if the examination can go on.

    Beyond the needed replies more are waited for as long as some arrive in every round: a client
    that is missing at a split has to find its group by a single update.
    """
    evidence = draft.evidence
    num_answered, rounds_held = len(evidence.client_ids), evidence.rounds_held
    needed = num_needed(coverage, evidence.num_members)
    is_complete = num_answered >= min(evidence.num_members, ENOUGH_CLIENTS)
    if num_answered < needed or not (is_complete or evidence.num_new == 0):
        answered = (
            f"{num_answered} of {evidence.num_members} clients have answered, {needed} are needed"
        )
        if rounds_held < max_hold_rounds:
            return draft.hold(f"stands still to be examined: {answered}")
        if num_answered < needed:
            return draft.train(
                f"trains on, because {rounds_held} rounds of standing still were not enough: "
                f"{answered}"
            )
    if rounds_held >= 2 * max_hold_rounds:  # proposed groups have left meanwhile
        return draft.train(
            f"trains on, because it stood still for {rounds_held} rounds without a decision"
        )
    return None


def _was_close_call(measured: Mapping[str, float]) -> bool:
    """Return whether an examination saw groups but was not sure of them."""
    needed = measured.get("p_structure_needed", 0.0)
    return measured.get("p_structure", 1.0) <= min(CLOSE_CALL_FACTOR * needed, LARGEST_CLOSE_CALL)
