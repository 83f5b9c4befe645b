"""The check of rules: ours pass, and broken ones are caught."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from fedbranch import AutoRule, Decision, NeverSplit, Thresholds
from fedbranch.testing import check_rule

THRESHOLDS = Thresholds(eps_mean=0.5, eps_max=1.0, gamma_max=0.5)


@pytest.mark.parametrize(
    "rule", [AutoRule(), AutoRule(only_conflicts=True), THRESHOLDS, NeverSplit()], ids=repr
)
def test_our_rules_keep_their_contract(rule):
    check_rule(rule)


class Counting:
    """A rule around another one that counts its answers."""

    def __init__(self, rule):
        self.rule = rule
        self.review_after = rule.review_after
        self.answers = Counter()

    def examine(self, evidence):
        decision = self.rule.examine(evidence)
        self.answers[decision.verdict, decision.asks] += 1
        return decision

    def review(self, review):
        decision = self.rule.review(review)
        self.answers[decision.verdict, decision.asks] += 1
        return decision


def test_the_evidence_leads_a_rule_to_all_of_its_answers():
    rule = Counting(AutoRule())

    check_rule(rule)

    assert set(rule.answers) == {
        ("train", "nothing"),
        ("train", "halves"),
        ("hold", "nothing"),
        ("hold", "losses"),
        ("split", "nothing"),
        ("keep", "nothing"),
        ("merge", "nothing"),
    }


class Changed:
    """A rule that is right but for one thing."""

    def examine(self, evidence):
        return NeverSplit().examine(evidence)


class NoDecision(Changed):
    def examine(self, evidence):
        return "train"


class AnotherNode(Changed):
    def examine(self, evidence):
        return replace(super().examine(evidence), node_id=evidence.node_id + 1)


class LastRound(Changed):
    def examine(self, evidence):
        return replace(super().examine(evidence), round=evidence.round - 1)


class Failing(Changed):
    def examine(self, evidence):
        evidence.updates / np.linalg.norm(evidence.half_differences, axis=1)
        return super().examine(evidence)


class OnlyNumPy(Changed):
    def examine(self, evidence):
        np.linalg.norm(evidence.updates, axis=1).astype(np.float64)
        return evidence.updates.copy() is None or super().examine(evidence)


class Normalising(Changed):
    def examine(self, evidence):
        evidence.updates[:] = evidence.updates / 2
        return super().examine(evidence)


class Remembering(Changed):
    def examine(self, evidence):
        evidence.__dict__["last_measured"] = {"seen": 1.0}
        return super().examine(evidence)


class Drawing(Changed):
    def examine(self, evidence):
        drawn = np.random.default_rng().random()
        return replace(super().examine(evidence), measurements={"drawn": drawn})


class DrawingGlobally(Changed):
    def examine(self, evidence):
        drawn = np.random.random()  # noqa: NPY002 -- what a rule must not do
        return replace(super().examine(evidence), measurements={"drawn": drawn})


class Numbering(Changed):
    num_calls = 0

    def examine(self, evidence):
        self.num_calls += 1
        return replace(super().examine(evidence), reason=f"call {self.num_calls}")


class HoldingForHalves(Changed):
    def examine(self, evidence):
        return replace(super().examine(evidence), verdict="hold", asks="halves")


class SplittingIntoOne(Changed):
    def examine(self, evidence):
        groups = (evidence.client_ids,)
        return replace(super().examine(evidence), verdict="split", groups=groups)


class EmptyGroup(Changed):
    def examine(self, evidence):
        groups = (evidence.client_ids, ())
        return replace(super().examine(evidence), verdict="split", groups=groups)


class Overlapping(Changed):
    def examine(self, evidence):
        groups = (evidence.client_ids, evidence.client_ids[:1])
        return replace(super().examine(evidence), verdict="split", groups=groups)


class InventingClients(Changed):
    def examine(self, evidence):
        groups = (evidence.client_ids, ("somewhere",))
        return replace(super().examine(evidence), verdict="split", groups=groups)


class Wordless(Changed):
    def examine(self, evidence):
        return replace(super().examine(evidence), reason="")


class Telling(Changed):
    def examine(self, evidence):
        return replace(super().examine(evidence), measurements={"what": "two groups"})


class KeepingMembers(Changed):
    """Splits by the clients of an earlier round, some of which have left."""

    seen = ()

    def examine(self, evidence):
        self.seen = self.seen if len(self.seen) > 12 else evidence.client_ids
        if evidence.node_id or evidence.round < 14:
            return super().examine(evidence)
        groups = (self.seen[::2], self.seen[1::2])
        return replace(super().examine(evidence), verdict="split", groups=groups)


class WithoutDates(Changed):
    def review(self, review):
        return Decision(node_id=review.node_id, round=review.round, verdict="keep", reason="-")


class Reviewing(WithoutDates):
    review_after = (2,)


class BackwardDates(Reviewing):
    review_after = (5, 2)


class TrainingAfterwards(Reviewing):
    def review(self, review):
        return replace(super().review(review), verdict="train")


class MovingAway(Reviewing):
    def review(self, review):
        return replace(super().review(review), moves=dict.fromkeys(review.losses, 99))


class FailingWithoutLosses(Reviewing):
    def review(self, review):
        assert np.mean([list(own) for own in review.losses.values()]) is not None
        first = next(iter(review.losses))
        return replace(super().review(review), reason=f"{first} decides")


@pytest.mark.parametrize(
    ("rule", "clause"),
    [
        (NeverSplit, r"a rule is an object with examine\(evidence\)"),
        (NoDecision(), "the server accepts every decision.*must return a Decision"),
        (AnotherNode(), "about the asked node and round.*node 4 in round 12, which was not asked"),
        (LastRound(), "about the asked node and round.*node 3 in round 11, which was not asked"),
        (Failing(), "examine, for evidence 'one client', returns"),
        (OnlyNumPy(), "examine, for evidence 'tensors of PyTorch', returns"),
        (Normalising(), r"a rule never changes what it is shown.*\['updates'\]"),
        (Remembering(), r"a rule never changes what it is shown.*\['last_measured'\]"),
        (Drawing(), "the same evidence leads to the same decision"),
        (DrawingGlobally(), "the same evidence leads to the same decision"),
        (Numbering(), "the same evidence leads to the same decision.*call 1.*call 2"),
        (HoldingForHalves(), "a question that go together.*'hold' while it asks for halves"),
        (SplittingIntoOne(), "disjoint groups of known clients.*groups of \\[1\\] clients"),
        (EmptyGroup(), "disjoint groups of known clients.*groups of \\[1, 0\\] clients"),
        (Overlapping(), "disjoint groups of known clients.*a client in two groups"),
        (InventingClients(), r"known clients.*clients \['somewhere'\]"),
        (Wordless(), "a decision has a reason of one line"),
        (Telling(), "measurements are numbers, by name.*two groups"),
        (KeepingMembers(), "known clients.*round 1. 'of a server that keeps updates'"),
        (WithoutDates(), "a rule with review has review_after.*None"),
        (BackwardDates(), r"ascending and positive.*\(5, 2\)"),
        (TrainingAfterwards(), "the server accepts every decision.*must keep or merge"),
        (MovingAway(), "the server accepts every decision.*can move clients of that split to"),
        (FailingWithoutLosses(), "review, for evidence '2 groups: no losses', returns"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value")
def test_a_broken_rule_is_caught(rule, clause):
    with pytest.raises(AssertionError, match=f"(?s)clause: .*{clause}"):
        check_rule(rule)
