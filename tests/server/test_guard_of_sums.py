"""The guard where updates are summed: lengths by the round before, strangers by sketches."""

import numpy as np
import pytest

from fedbranch import Decision, Guard, NeverSplit, Server, Update
from server.replies.made_replies import DIM, SIZE, filled, similar_updates, updates_of


def test_lengths_are_judged_by_the_round_before():
    server = Server(DIM, rule=NeverSplit(), sketch=SIZE, keep_updates=False)
    free = Server(DIM, rule=NeverSplit(), sketch=SIZE, keep_updates=False, guard=None)
    for each in (server, free):
        each.plan(sorted(similar_updates(20, 0)))
        each.step(similar_updates(20, 0))
    before = server.tree.root.params.copy()
    updates = similar_updates(20, 1)
    usual = float(np.median([np.linalg.norm(u.vector) for u in similar_updates(20, 0).values()]))
    lengths = {"c000": 30.0, "c001": 8.0}
    for client_id, times in lengths.items():
        vector = updates[client_id].vector
        updates[client_id] = Update(vector * np.float32(times), num_examples=1)
    server.plan(sorted(updates))
    free.plan(sorted(updates))

    intake = filled(server, updates, seed=1)
    record = server.step(intake)
    free.step(updates)

    assert "30" in record.refused["c000"] or "times as long as usual" in record.refused["c000"]
    assert server.state.set_aside == {"c000"}
    counted = {i: u.vector.astype(np.float64) for i, u in updates.items() if i != "c000"}
    counted["c001"] *= 4 * usual / np.linalg.norm(counted["c001"])
    np.testing.assert_allclose(
        server.tree.root.params - before, np.mean(list(counted.values()), axis=0), atol=1e-5
    )
    assert np.linalg.norm(free.tree.root.params) > 1.5 * np.linalg.norm(server.tree.root.params)


def test_strangers_are_found_by_their_sketches():
    dim = 5000
    rng = np.random.default_rng(0)
    common = rng.normal(size=dim)
    updates = {
        f"c{i:03}": Update((common + 0.3 * rng.normal(size=dim)).astype(np.float32), 1)
        for i in range(20)
    }
    updates["c007"] = Update(rng.normal(size=dim).astype(np.float32), 1)
    server = Server(dim, rule=NeverSplit(), sketch=1024, keep_updates=False)
    server.plan(sorted(updates))

    record = server.step(updates)

    assert list(record.refused) == ["c007"]
    assert "resembles no other" in record.refused["c007"]
    assert record.decisions[0].measurements["num_answered"] == 19


@pytest.mark.parametrize("share", [0.5, 0.3, 0.05])
@pytest.mark.parametrize("seed", range(4))
def test_no_client_gets_more_than_its_share_in_any_order(share, seed):
    updates = updates_of(25, seed)
    heavy = {"c003": 50_000, "c011": 9_000, "c017": 700}
    updates = {i: Update(u.vector, heavy.get(i, u.num_examples)) for i, u in updates.items()}
    guard = Guard(max_share=share, max_length=None, clipped_length=None)
    kept = Server(DIM, rule=NeverSplit(), guard=guard)
    dropped = Server(DIM, rule=NeverSplit(), guard=guard, sketch=SIZE, keep_updates=False)
    for server in (kept, dropped):
        server.plan(sorted(updates))
        server.step(filled(server, updates, seed))

    np.testing.assert_allclose(
        dropped.tree.root.params, kept.tree.root.params, rtol=1e-6, atol=1e-8
    )


class SplitsInRoundTwo:
    def examine(self, evidence):
        ids = evidence.client_ids
        is_now = evidence.round == 2
        return Decision(
            node_id=evidence.node_id,
            round=evidence.round,
            verdict="split" if is_now else "train",
            reason="planned",
            groups=(ids[: len(ids) // 2], ids[len(ids) // 2 :]) if is_now else (),
        )


def test_lengths_are_judged_in_the_round_after_a_split_as_well():
    server = Server(DIM, rule=SplitsInRoundTwo(), sketch=SIZE, keep_updates=False)
    for number in (1, 2):
        updates = similar_updates(20, number)
        server.plan(updates)
        server.step(updates)
    updates = similar_updates(20, 3)
    server.plan(updates)

    record = server.step(updates | {"c000": Update(1e20 * updates["c001"].vector, num_examples=1)})

    assert "times as long as usual" in record.refused["c000"]
    assert np.abs(server.tree[1].params).max() < 100
