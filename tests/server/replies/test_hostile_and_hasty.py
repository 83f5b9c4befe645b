"""Replies that are bad, clients that go, and rounds that begin while replies come in."""

import threading

import numpy as np
import pytest

from fedbranch import Decision, Guard, NeverSplit, Server, Update, UpdateBatch
from fedbranch.core import Differences

DIM = 5000


def raw_batch(server, tasks, weights, rows):
    """A batch of updates that lie in their messages."""
    ids = sorted(weights)
    pieces = [rows[client_id].tobytes() for client_id in ids]
    return UpdateBatch(
        client_ids=ids,
        vectors=Differences(pieces, [0], [DIM], np.zeros(DIM, np.float32)),
        num_examples=[weights[client_id] for client_id in ids],
        bases=[tasks[client_id].base for client_id in ids],
        metrics=[{}] * len(ids),
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, 1e35])
@pytest.mark.parametrize("share", [0.5, 0.2, 0.05])
def test_heavy_replies_that_cannot_be_used_do_not_lift_the_cap_of_others(bad, share):
    if not Differences.can_be_read():
        pytest.skip("updates in messages are read by machine code, which needs Numba")
    weights = dict(zip("abcdefg", [1000.0, 1000.0, 100.0, 1.0, 1.0, 1.0, 1.0], strict=True))
    rng = np.random.default_rng(0)
    rows = {i: rng.normal(size=DIM).astype(np.float32) for i in weights}
    rows["a"], rows["b"] = np.full((2, DIM), bad, np.float32)
    options = {"rule": NeverSplit(), "guard": Guard(max_share=share)}
    kept = Server(DIM, **options)
    summed = Server(DIM, **options, sketch=64, keep_updates=False)

    tasks = summed.plan(weights)
    intake = summed.intake()
    intake.add_batch(raw_batch(summed, tasks, weights, rows))
    record = summed.step(intake)
    tasks = kept.plan(weights)
    kept.step({i: Update(rows[i], weights[i], base=tasks[i].base) for i in weights})

    assert set(record.refused) == {"a", "b"}
    np.testing.assert_allclose(summed.tree.root.params, kept.tree.root.params, rtol=1e-5, atol=1e-6)


class HoldsThenSplits:
    def examine(self, evidence):
        ids = evidence.client_ids
        about = {"node_id": evidence.node_id, "round": evidence.round, "reason": "as written"}
        if evidence.round == 1:
            return Decision(**about, verdict="hold")
        return Decision(
            **about, verdict="split", groups=(ids[: len(ids) // 2], ids[len(ids) // 2 :])
        )


@pytest.mark.parametrize("keep_updates", [True, False])
@pytest.mark.parametrize("goes", ["leaves", "is routed anew"])
def test_a_client_that_goes_while_replies_come_in_is_not_split_off(keep_updates, goes):
    server = Server(20, rule=HoldsThenSplits(), guard=None, sketch=16, keep_updates=keep_updates)
    rng = np.random.default_rng(0)

    def update():
        return Update(rng.normal(size=20).astype(np.float32), 1)

    server.plan(list("abcde"))
    server.step({i: update() for i in "abcde"})
    server.plan(["f"])
    intake = server.intake()
    server.remove(["a"]) if goes == "leaves" else server.reroute(["a"])
    intake.add("f", update())
    record = server.step(intake)

    (split,) = record.splits
    assert sorted(i for group in split.groups for i in group) == list("bcdef")
    assert ("a" in server.tree) == (goes != "leaves")


@pytest.mark.parametrize("keep_updates", [True, False])
def test_a_round_waits_for_replies_that_are_being_taken_in(keep_updates):
    server = Server(DIM, rule=NeverSplit(), sketch=32, keep_updates=keep_updates)
    rng = np.random.default_rng(0)
    for _ in range(30):
        ids = [f"c{number:02d}" for number in range(40)]
        tasks = server.plan(ids)
        updates = {i: rng.normal(size=DIM).astype(np.float32) for i in ids}
        intake = server.intake()

        def add(own, tasks=tasks, updates=updates, intake=intake):
            for i in own:
                intake.add(i, Update(updates[i], 1, base=tasks[i].base))

        threads = [threading.Thread(target=add, args=(ids[n::4],)) for n in range(4)]
        for thread in threads:
            thread.start()
        record = server.step(intake)
        for thread in threads:
            thread.join()

        used = set(record.metrics)
        late = {i for i in ids if i not in used}
        assert all("came too late" in intake.refused[i] for i in late)


def test_a_client_that_is_placed_elsewhere_is_not_split_off_where_it_answered():
    server = Server(20, rule=HoldsThenSplits(), guard=None)
    leaves = server.partition({"x": list("abcd"), "y": ["e"]})
    rng = np.random.default_rng(0)
    tasks = server.plan(list("abcd"))
    server.step({i: Update(rng.normal(size=20).astype(np.float32), 1) for i in tasks})

    server.place({"a": leaves["y"]})
    record = server.step({})

    assert server.tree.position("a") == leaves["y"]
    (split,) = record.splits
    assert sorted(i for group in split.groups for i in group) == list("bcd")
    with pytest.raises(ValueError, match="no node 99"):
        server.place({"b": leaves["y"], "c": 99})
    assert server.tree.position("b") != leaves["y"]
