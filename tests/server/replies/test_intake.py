"""Replies come in in any order, at once or one by one: the same decisions and the same bytes."""

import numpy as np
import pytest

from fedbranch import AutoRule, NeverSplit, Server, Update
from fedbranch.protocol.tasks import UpdateBatch
from server.replies.made_replies import (
    DIM,
    SETTINGS,
    SIZE,
    filled,
    similar_updates,
    state_of,
    two_that_answered,
    updates_of,
)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_order_and_threads_change_no_byte_of_the_state(name, num_threads):
    settings = SETTINGS[name]
    states = []
    for seed in (None, 1, 2):
        server = Server(DIM, rule=AutoRule(), **settings)
        for number in range(3):
            updates = updates_of(
                40, number, num_buffers=settings.get("num_buffers", 0),
                num_signal=settings.get("num_signal"),
            )  # fmt: skip
            server.plan(sorted(updates))
            intake = filled(server, updates, seed, 1 if seed is None else num_threads)
            assert not intake.refused
            server.step(intake)
        states.append(state_of(server))

    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("name", SETTINGS)
def test_one_by_one_is_the_same_as_all_at_once(name):
    settings = SETTINGS[name]
    num_signal = settings.get("num_signal")
    num_buffers = settings.get("num_buffers", 0)
    updates = updates_of(30, num_buffers=num_buffers, num_signal=num_signal)
    one_by_one, mapping, batch = (Server(DIM, rule=NeverSplit(), **settings) for _ in range(3))
    for server in (one_by_one, mapping, batch):
        server.plan(sorted(updates))
    rows = list(updates.values())

    one_by_one.step(filled(one_by_one, updates, seed=3))
    mapping.step(updates)
    batch.step(
        UpdateBatch(
            client_ids=list(updates),
            vectors=np.stack([row.vector for row in rows]),
            buffers=np.stack([row.buffers for row in rows]) if num_buffers else None,
            signals=np.stack([row.signal for row in rows]) if num_signal else None,
            half_differences=np.stack([row.half_difference for row in rows]),
            num_examples=[row.num_examples for row in rows],
            bases=[batch.tree.root.base] * 30,
            metrics=[{}] * 30,
        )
    )

    assert state_of(one_by_one) == state_of(mapping) == state_of(batch)


def test_a_round_that_failed_can_be_tried_again_with_the_same_intake():
    class Failing:
        fails = True

        def examine(self, evidence):
            if self.fails:
                raise RuntimeError("no")
            return NeverSplit().examine(evidence)

    updates = updates_of(10)
    rule = Failing()
    server = Server(DIM, rule=rule, sketch=SIZE, keep_updates=False)
    other = Server(DIM, rule=NeverSplit(), sketch=SIZE, keep_updates=False)
    for each in (server, other):
        each.plan(sorted(updates))
    intake = filled(server, updates)
    with pytest.raises(RuntimeError):
        server.step(intake)
    rule.fails = False

    server.step(intake)
    other.step(updates)

    assert server.tree.root.params.tobytes() == other.tree.root.params.tobytes()


def test_a_reply_after_the_round_is_refused():
    updates = updates_of(10)
    server = Server(DIM, rule=NeverSplit(), sketch=SIZE, keep_updates=False)
    server.plan(sorted(updates))
    intake = server.intake()
    intake.add_all({i: update for i, update in updates.items() if i != "c009"})

    server.step(intake)
    (task,) = server.plan(["c009"]).values()
    state = state_of(server)

    for base in (None, task.base):  # whatever it was computed at
        late = Update(updates["c009"].vector, num_examples=1, base=base)
        assert intake.add("c009", late) == "came too late: the round is over"
    batch = UpdateBatch(
        client_ids=["c009"],
        vectors=updates["c009"].vector[None, :],
        num_examples=[1.0],
        bases=[task.base],
        metrics=[{}],
    )
    assert intake.add_batch(batch) == {"c009": "came too late: the round is over"}
    assert "closed: 9 taken" in repr(intake)
    assert state_of(server) == state


def test_metrics_are_those_of_all_replies_that_were_used():
    updates = updates_of(4)
    server = Server(DIM, rule=NeverSplit(), sketch=SIZE)
    server.plan(sorted(updates))
    intake = server.intake()
    nothing = Update(np.full(DIM, np.nan, np.float32), num_examples=1)
    assert intake.add("c001", nothing) is not None

    intake.add_all(updates)
    record = server.step(intake)

    assert set(record.metrics) == set(updates)
    assert set(record.refused) == {"c001"}  # its first reply


def test_an_entry_that_is_no_reply_is_named():
    server = Server(DIM)
    with pytest.raises(TypeError, match="updates contain 1; pass a mapping"):
        server.step([1, 2])


def test_a_client_that_leaves_between_reply_and_round_is_refused_alone():
    server, intake = two_that_answered()
    server.remove(["b"])

    record = server.step(intake)

    assert record.refused == {"b": "has left since it replied"}
    assert record.decisions[0].measurements["num_answered"] == 2
    assert server.tree.root.params.tolist() == [1, 1, 0, 1]


def test_a_client_that_leaves_after_a_too_long_reply_stops_no_round():
    server = Server(DIM, rule=NeverSplit(), sketch=SIZE, keep_updates=False)
    for number in (1, 2):
        updates = similar_updates(20, number)
        server.plan(updates)
        intake = server.intake()
        if number == 2:
            updates["c000"] = Update(1e20 * updates["c000"].vector, num_examples=1)
        intake.add_all(updates)
        if number == 2:
            server.remove(["c000"])
        record = server.step(intake)

    assert "times as long as usual" in record.refused["c000"]
    assert record.decisions[0].measurements["num_answered"] == 19


def test_an_intake_is_for_its_own_server_only():
    _, intake = two_that_answered()
    other, _ = two_that_answered()

    with pytest.raises(ValueError, match="of another server"):
        other.step(intake)


def test_an_intake_does_not_outlive_a_change_of_the_tree():
    server, intake = two_that_answered()
    server.tree.advance(0, np.ones(4, dtype=np.float32))

    with pytest.raises(ValueError, match="the tree has changed"):
        server.step(intake)


def test_bad_replies_are_refused_at_once_and_cost_the_others_nothing():
    updates = updates_of(8)
    bad = {
        "c000": Update(np.full(DIM, np.nan, np.float32), 1),
        "c001": Update(np.zeros(DIM, np.float32), 1),
        "c002": Update(np.ones(DIM - 1, np.float32), 1),
        "c003": Update(updates["c003"].vector, -1),
        "c004": Update(updates["c004"].vector, 1, base="another"),
        "stranger": updates["c005"],
        "c006": "nonsense",
    }
    server = Server(DIM, rule=NeverSplit(), sketch=SIZE, keep_updates=False)
    only_good = Server(DIM, rule=NeverSplit(), sketch=SIZE, keep_updates=False)
    for each in (server, only_good):
        each.plan(sorted(updates))
    intake = server.intake()

    reasons = {i: intake.add(i, update) for i, update in bad.items()}
    assert intake.add("c005", updates["c005"]) is None
    assert intake.add("c007", updates["c007"]) is None
    assert "already answered" in intake.add("c007", updates["c006"])
    record = server.step(intake)
    only_good.step({i: updates[i] for i in ("c005", "c007")})

    for client_id, word in {
        "c000": "NaN",
        "c001": "zero",
        "c002": "shape (299,)",
        "c003": "num_examples",
        "c004": "other parameters",
        "stranger": "unknown client",
        "c006": "send an Update",
    }.items():
        assert word in reasons[client_id]
        assert record.refused[client_id] == reasons[client_id]
    assert server.tree.root.params.tobytes() == only_good.tree.root.params.tobytes()


def test_one_by_one_and_in_a_batch_replies_are_refused_for_the_same_reasons():
    ones = np.ones(DIM, np.float32)
    vectors = {
        "a": ones * np.float32(1e30),
        "b": ones * np.nextafter(np.float32(1e30), np.float32(2e30)),
        "c": ones * np.float32(np.nan),
        "d": ones * np.float32(np.nan),
        "e": ones * np.float32(np.nan),
        "f": ones,
    }
    found = []
    for is_batch in (False, True):
        server = Server(DIM, rule=NeverSplit(), guard=None)
        bases = {i: task.base for i, task in server.plan(list("abcdf")).items()} | {
            "d": "no",
            "e": "0",
        }
        intake = server.intake()
        if is_batch:
            intake.add_batch(
                UpdateBatch(
                    client_ids=list(vectors),
                    vectors=np.stack(list(vectors.values())),
                    num_examples=[1.0] * 5 + [-1.0],
                    bases=[bases[i] for i in vectors],
                    metrics=[{}] * 6,
                )
            )
        else:
            for client_id, vector in vectors.items():
                weight = -1.0 if client_id == "f" else 1.0
                intake.add(client_id, Update(vector, weight, base=bases[client_id]))
        found.append(intake.refused)

    assert found[0] == found[1]
    assert found[0].keys() == {"b", "c", "d", "e", "f"}
    assert "other parameters" in found[0]["d"]
    assert "unknown client" in found[0]["e"]


def test_an_intake_of_an_earlier_round_is_refused():
    server = Server(DIM, rule=NeverSplit())
    old = server.intake()
    server.step({})

    with pytest.raises(ValueError, match="the intake is of round 1, and this is round 2"):
        server.step(old)
