"""A round is decided without changing anything, and committed as a whole or not at all."""

from dataclasses import dataclass

import numpy as np
import pytest

from fakes import fingerprint
from fedbranch import CannotWrite, Decision, NeverSplit, OnDisk, Server, Update
from fedbranch.core.geometry import weighted_mean
from fedbranch.server.round import commit, decide

DIM = 40
SETTINGS = {
    "kept": {},
    "sketched": {"sketch": 32},
    "summed": {"sketch": 32, "keep_updates": False},
    "summed signals": {"sketch": 16, "keep_updates": False, "compare": "signal", "num_signal": 20},
}
EARLY = [f"c{i:02}" for i in range(12)]
LATE = ["late-1", "late-2"]


class Script:
    """A rule that splits in round 1, holds in round 3, splits again in round 4, and merges in round 5."""

    review_after = (4,)

    def __init__(self):
        self.fails_at = None
        self.num_examined = 0

    def examine(self, evidence):
        self.num_examined += 1
        if self.num_examined == self.fails_at:
            raise RuntimeError("the rule failed")
        ids = evidence.client_ids
        splits = evidence.round == 1 or (evidence.round == 4 and evidence.node_id == 1)
        return Decision(
            node_id=evidence.node_id,
            round=evidence.round,
            verdict="split" if splits else "hold" if evidence.round == 3 else "train",
            reason=f"round {evidence.round}",
            measurements={"mean_length": evidence.mean_length},
            groups=(ids[: len(ids) // 2], ids[len(ids) // 2 :]) if splits else (),
        )

    def review(self, review):
        return Decision(
            node_id=review.node_id,
            round=review.round,
            verdict="merge",
            reason=f"losses of {sorted(review.losses)}",
        )


def replies(server, number):
    """Return the updates of a round, and losses for what was asked; newcomers come in round 2."""
    rng = np.random.default_rng(number)
    ids = EARLY if number < 2 else [*EARLY, *LATE]
    num_signal = server.num_signal
    updates = {}
    for client_id in server.plan(ids):
        vector = rng.normal(size=DIM) + (1 if client_id < "c06" else -1)
        updates[client_id] = Update(
            vector.astype(np.float32),
            num_examples=int(rng.integers(1, 9)),
            metrics={"loss": float(rng.random())},
            signal=vector[:num_signal].astype(np.float32) if num_signal else None,
        )
    updates["stranger"] = Update(np.ones(DIM, np.float32), 1)
    losses = {i: rng.random(len(own)).tolist() for i, own in server.trials(ids).items()}
    return updates, losses


def at_round(number, rule, **settings):
    """Return a server before a round, with the replies for it."""
    server = Server(DIM, rule=rule, **settings)
    for earlier in range(1, number):
        server.step(*replies(server, earlier))
    return server, *replies(server, number)


def described(plan, options):
    """Return everything that a plan is about to do, as plain values."""
    return {
        "round": plan.round,
        "outcomes": [
            (
                outcome.decision,
                None if outcome.steps is None else outcome.steps.params.tobytes(),
                outcome.past_round,
            )
            for outcome in plan.outcomes
        ],
        "splits": [(one.node_id, one.groups, sorted(one.store.replies)) for one in plan.splits],
        "leaves": {
            leaf_id: (
                leaf.phase,
                leaf.memory,
                leaf.store and leaf.store.averages(options).compared.tobytes(),
            )
            for leaf_id, leaf in plan.leaves.items()
        },
        "reviews": plan.reviews,
        "routed": plan.routed,
        "others": (plan.set_aside, plan.refused, plan.metrics),
    }


def as_values(plan, options):
    return repr(described(plan, options))


# Deciding


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("number", range(1, 7))
def test_deciding_changes_nothing_and_twice_decides_the_same(name, number):
    server, updates, losses = at_round(number, Script(), **SETTINGS[name])
    intake = server.intake()
    intake.add_all(updates)
    before = fingerprint(server)

    plans = [
        decide(server.state, server.options, server.projection, intake, losses) for _ in range(3)
    ]

    assert fingerprint(server) == before
    assert len({as_values(plan, server.options) for plan in plans}) == 1
    commit(server.state, plans[0])
    assert fingerprint(server) != before


@pytest.mark.parametrize("name", SETTINGS)
def test_the_rounds_of_these_tests_split_route_hold_and_review(name):
    server = Server(DIM, rule=Script(), **SETTINGS[name])

    records = [server.step(*replies(server, number)) for number in range(1, 7)]

    assert [[one.verdict for one in record.decisions] for record in records] == [
        ["split"],
        ["train", "train"],
        ["hold", "hold"],
        ["split", "train"],
        ["train", "train", "train", "merge"],
        ["train"],
    ]
    assert {move.client_id for move in records[1].routed} == set(LATE)
    assert all("stranger" in record.refused for record in records)
    assert records[4].decisions[-1].reason != "losses of []"


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("number", range(1, 7))
def test_a_plan_that_is_committed_is_the_round(name, number):
    server, updates, losses = at_round(number, Script(), **SETTINGS[name])
    other, _, _ = at_round(number, Script(), **SETTINGS[name])
    intake = server.intake()
    intake.add_all(updates)

    plan = decide(server.state, server.options, server.projection, intake, losses)
    record = commit(server.state, plan)

    assert record == other.step(updates, losses)
    assert fingerprint(server) == fingerprint(other)


# Failing


@pytest.mark.parametrize("name", SETTINGS)
def test_a_rule_that_fails_at_the_second_leaf_leaves_the_first_as_it_was(name):
    rule = Script()
    server, updates, losses = at_round(5, rule, **SETTINGS[name])
    undisturbed, _, _ = at_round(5, Script(), **SETTINGS[name])
    before = fingerprint(server)
    rule.fails_at = rule.num_examined + 2

    with pytest.raises(RuntimeError, match="the rule failed"):
        server.step(updates, losses)

    assert fingerprint(server) == before
    rule.fails_at = None
    assert server.step(updates, losses) == undisturbed.step(updates, losses)
    assert fingerprint(server) == fingerprint(undisturbed)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_review_that_fails_leaves_the_server_as_it_was(name):
    rule = Script()
    server, updates, losses = at_round(5, rule, **SETTINGS[name])
    before, review = fingerprint(server), rule.review
    rule.review = lambda seen: Decision(
        node_id=seen.node_id, round=seen.round, verdict="train", reason=""
    )

    with pytest.raises(ValueError, match="must keep or merge"):
        server.step(updates, losses)

    assert fingerprint(server) == before
    rule.review = review
    assert server.step(updates, losses).vanished


@pytest.mark.parametrize("name", ["kept", "sketched"])
def test_an_aggregate_that_fails_at_the_second_leaf_leaves_the_first_as_it_was(name):
    state = {"calls": 0, "fails_at": None}

    def aggregate(updates, weights):
        state["calls"] += 1
        if state["calls"] == state["fails_at"]:
            raise RuntimeError("the aggregate failed")
        return weighted_mean(updates, weights)

    server, updates, losses = at_round(2, Script(), aggregate=aggregate, **SETTINGS[name])
    before = fingerprint(server)
    state["fails_at"] = state["calls"] + 2

    with pytest.raises(RuntimeError, match="the aggregate failed"):
        server.step(updates, losses)

    assert fingerprint(server) == before
    state["fails_at"] = None
    server.step(updates, losses)
    assert [leaf.version for leaf in server.tree.leaves] == [1, 1]


@dataclass(frozen=True, kw_only=True)
class FillingDisk(OnDisk):
    """A disk with room for some edges only; ``room`` is a list so that it can change."""

    room: list[int]

    def keep(self, updates):
        self.room[0] -= 1
        if self.room[0] < 0:
            raise CannotWrite(28, "no space left on the device")
        return super().keep(updates)


class SplitsAll:
    """A rule that splits each leaf with at least two clients into two."""

    def examine(self, evidence):
        ids = evidence.client_ids
        half = len(ids) // 2
        return Decision(
            node_id=evidence.node_id,
            round=evidence.round,
            verdict="split" if half else "train",
            reason="",
            groups=(ids[:half], ids[half:]) if half else (),
        )


@pytest.mark.parametrize("num_edges", range(4))
@pytest.mark.parametrize("name", SETTINGS)
def test_a_disk_that_becomes_full_at_any_edge_leaves_the_server_as_it_was(
    name, num_edges, tmp_path
):
    cache = FillingDisk(folder=tmp_path, room=[2])
    server, updates, losses = at_round(2, SplitsAll(), cache=cache, **SETTINGS[name])
    before, files = fingerprint(server), sorted(tmp_path.iterdir())
    cache.room[0] = num_edges

    with pytest.raises(CannotWrite, match="no space left"):
        server.step(updates, losses)  # two leaves split, into two groups each

    assert fingerprint(server) == before
    assert sorted(tmp_path.iterdir()) == files
    cache.room[0] = 4
    record = server.step(updates, losses)
    assert [one.verdict for one in record.decisions] == ["split", "split"]
    assert len(server.clusters) == 4


def test_a_rule_that_fails_once_can_be_asked_again():
    class Moody:
        moods = iter(["bad", "good"])

        def examine(self, evidence):
            if next(self.moods) == "bad":
                raise RuntimeError("not today")
            return NeverSplit().examine(evidence)

    server = Server(1, rule=Moody())
    server.plan(["a"])
    with pytest.raises(RuntimeError, match="not today"):
        server.step({"a": Update(np.float32([1]), 1)})

    record = server.step({"a": Update(np.float32([1]), 1)})

    assert (record.round, record.refused) == (1, {})
    assert server.tree.root.params.tolist() == [1]
