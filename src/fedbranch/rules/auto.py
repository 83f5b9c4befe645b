"""The rule without thresholds: groups that are real, and splits that pay."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from fedbranch.rules.convergence import doubt_about_conflict
from fedbranch.rules.draft import Draft
from fedbranch.rules.evidence import Decision, Evidence, Review
from fedbranch.rules.group_search import groups_by_gap, groups_by_halves
from fedbranch.rules.pay_test import split_if_it_pays, split_without_losses
from fedbranch.rules.reviews import review_split
from fedbranch.rules.timing import num_needed, wait_for_replies, wait_for_time

__all__ = ["AutoRule"]


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
        for as long as replies arrive. The others find their group when they next take part.
    max_hold_rounds
        How many rounds a cluster may stand still for them.
    review_after
        How many rounds after a split it is reviewed.

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
       claims to lose does not count if its updates have nothing in common with the others'; see :mod:`fedbranch.rules.credibility`.
    3. The cluster splits into all groups at once.

    Some rounds later clients compare their leaf on held-out data with the mean of all leaves
    of the split, which is what training together would have come to. If that is significantly
    better the split is merged back to it. Otherwise clients that are clearly better off with
    another leaf of the split move there, unless their update at the split pointed away from it.

    Examinations begin after the first round. After one without a split the cluster trains on:

    - for 2, 3, 4, 6, 8, 12, ... rounds before the next, at most 25;
    - for at most twice as long for every split that was merged back;
    - for 2 rounds if it was a close call;
    - at least for thrice the rounds that it stood still.

    There is less evidence about clients that cannot make half updates or measure losses, such
    as unmodified Flower apps. Then the gap between the heights at which single linkage joins
    the groups decides, with held-out losses if the clients evaluate.

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
        """Ask the questions in their order, and decide at the first that is answered with no."""
        draft = Draft(evidence)
        if evidence.num_members < 3:
            return draft.train("fewer than three clients: groups cannot be told from noise")
        if evidence.proposal:
            return split_if_it_pays(
                draft,
                error_level=self.error_level,
                coverage=self.coverage,
                max_hold_rounds=self.max_hold_rounds,
            )
        if not evidence.asked_for_halves:
            return wait_for_time(draft)
        ends_early = wait_for_replies(
            draft, coverage=self.coverage, max_hold_rounds=self.max_hold_rounds
        )
        if ends_early is not None:
            return ends_early
        needed = num_needed(self.coverage, evidence.num_members)
        has_halves = len(evidence.halved_rows) >= needed
        found = groups_by_halves(draft) if has_halves else groups_by_gap(draft)
        if isinstance(found, Decision):
            return found
        doubt = doubt_about_conflict(draft) if self.only_conflicts else ""
        if doubt:
            return draft.train(f"{found.what}, but perhaps no conflict: {doubt}")
        told = f"{found.what}: {found.why}"
        if not evidence.can_measure:
            return split_without_losses(draft, told, found.groups)
        return draft.propose(f"{told}; clients measure whether a split pays", found.groups)

    def review(self, review: Review) -> Decision:
        """Review a split: merge it back if the clients are worse off, or move some of them."""
        return review_split(review, error_level=self.error_level)
