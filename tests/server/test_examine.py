"""A rule of the user's own may decide anything that makes sense."""

import numpy as np
import pytest

from fakes import fingerprint
from fedbranch import Decision, Server, Update
from rules.bowls import Bowls


def test_a_users_rule_may_split_into_many():
    class EachClientAlone:
        def examine(self, evidence):
            return Decision(
                node_id=evidence.node_id,
                round=evidence.round,
                verdict="split" if len(evidence.client_ids) > 1 else "train",
                reason="as I like it",
                groups=tuple((i,) for i in evidence.client_ids),
            )

    server = Server(1, rule=EachClientAlone())
    server.plan(["a", "b", "c"])
    server.step({i: Update(np.float32([1]), 1) for i in "abc"})

    assert server.clusters == {1: ["a"], 2: ["b"], 3: ["c"]}


def decision(**changes):
    settings = {"node_id": 0, "round": 1, "verdict": "split", "reason": ""}
    return Decision(**{**settings, **changes})


BAD_DECISIONS = {
    "strangers": (decision(groups=(("a",), ("stranger",))), r"clients \['stranger'\]"),
    "one group": (decision(groups=(("a", "b"),)), r"groups of \[2\] clients"),
    "an empty group": (decision(groups=(("a", "b"), ())), r"groups of \[2, 0\] clients"),
    "no groups": (decision(), "the verdict 'split' with 0 groups"),
    "groups without a split": (
        decision(verdict="train", groups=(("a",), ("b",))),
        "the verdict 'train' with 2 groups",
    ),
    "a client in two groups": (decision(groups=(("a",), ("a", "b"))), "a client in two groups"),
    "an unknown verdict": (decision(verdict="Split"), "the verdict 'Split'"),
    "another node": (decision(node_id=77, verdict="train"), "node 77 in round 1"),
    "another round": (decision(round=99, verdict="train"), "node 0 in round 99"),
    "nothing": (None, "returned None"),
}


@pytest.mark.parametrize("name", BAD_DECISIONS)
def test_a_rule_that_decides_the_impossible_is_named_and_changes_nothing(name):
    returned, message = BAD_DECISIONS[name]

    class Confused:
        def examine(self, evidence):
            return returned

    server = Server(1, rule=Confused())
    tasks = server.plan(["a", "b"])
    before = fingerprint(server)

    with pytest.raises((ValueError, TypeError), match=message):
        server.step({"a": Update(np.float32([1]), 1), "b": Update(np.float32([1]), 1)})

    assert fingerprint(server) == before
    assert server.plan(["a", "b"])["a"].base == tasks["a"].base


class Asking:
    def __init__(self, **decision):
        self.decision = decision

    def examine(self, evidence):
        return Decision(node_id=evidence.node_id, round=evidence.round, **self.decision)


@pytest.mark.parametrize(
    "decision",
    [
        {"verdict": "keep", "reason": ""},
        {"verdict": "train", "reason": "", "asks": "losses", "groups": (("c00",), ("c01",))},
        {"verdict": "hold", "reason": "", "asks": "losses"},
        {"verdict": "hold", "reason": "", "asks": "halves"},
        {"verdict": "train", "reason": "", "asks": "money"},
    ],
)
def test_a_rule_cannot_ask_for_what_its_verdict_does_not_go_with(decision):
    with pytest.raises(ValueError, match="decided on"):
        Bowls("ab" * 3).run(1, rule=Asking(**decision))
