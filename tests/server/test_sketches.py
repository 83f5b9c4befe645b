"""By sketches, rules decide as they do by whole updates."""

import numpy as np
import pytest

from fedbranch import AutoRule, NeverSplit, Server, Thresholds, Update
from fedbranch.core.geometry import weighted_mean
from fedbranch.core.projection import Projection
from server.replies.made_replies import (
    DIM,
    SIZE,
    planted,
    updates_of,
)


@pytest.mark.parametrize("keep_updates", [True, False])
def test_what_a_rule_is_shown_has_exact_lengths(keep_updates):
    seen = []

    class Watching:
        def examine(self, evidence):
            seen.append(evidence)
            return NeverSplit().examine(evidence)

    updates = updates_of(20)
    server = Server(DIM, rule=Watching(), sketch=SIZE, keep_updates=keep_updates, guard=None)
    server.plan(sorted(updates))
    server.step(updates)

    (evidence,) = seen
    vectors = np.stack([updates[i].vector for i in evidence.client_ids])
    weights = np.array([updates[i].num_examples for i in evidence.client_ids])
    mean = weighted_mean(vectors, weights)
    assert evidence.projection == Projection(dim=DIM, size=SIZE)
    np.testing.assert_array_equal(evidence.updates, evidence.projection.of(vectors))
    np.testing.assert_allclose(evidence.lengths, np.linalg.norm(vectors, axis=1), rtol=1e-6)
    assert evidence.mean_length == pytest.approx(np.linalg.norm(mean), rel=1e-6)
    np.testing.assert_allclose(
        evidence.mean_update, evidence.projection.of(mean[None, :])[0], rtol=1e-3, atol=1e-5
    )
    if keep_updates:
        np.testing.assert_array_equal(evidence.whole, vectors)
    else:
        assert evidence.whole is None


def test_without_sketches_a_rule_is_shown_whole_updates():
    seen = []

    class Watching:
        def examine(self, evidence):
            seen.append(evidence)
            return NeverSplit().examine(evidence)

    updates = updates_of(5)
    server = Server(DIM, rule=Watching(), guard=None)
    server.plan(sorted(updates))
    server.step(updates)

    assert seen[0].projection is None
    assert seen[0].whole is None
    assert seen[0].updates.shape == (5, DIM)


def clusters_after(rule, ids, updates, num_rounds, dim, with_halves, **settings):
    server = Server(dim, rule=rule, **settings)
    for number in range(num_rounds):
        tasks = server.plan(ids)
        server.step(updates(tasks, number, with_halves))
    return sorted(tuple(members) for members in server.clusters.values())


@pytest.mark.parametrize("keep_updates", [True, False])
@pytest.mark.parametrize(
    ("num_clients", "num_groups", "dim", "noise"),
    [(30, 2, 10_000, 0.5), (60, 4, 20_000, 1.0), (200, 5, 10_000, 1.0), (24, 3, 50_000, 1.5)],
)
def test_the_default_rule_finds_the_same_groups_by_sketches(
    num_clients, num_groups, dim, noise, keep_updates
):
    ids, group, updates = planted(num_clients, num_groups, dim, noise, seed=num_clients)
    truth = sorted(
        tuple(i for i, own in zip(ids, group, strict=True) if own == g) for g in range(num_groups)
    )

    found = clusters_after(
        AutoRule(), ids, updates, 7, dim, True, sketch=1024, keep_updates=keep_updates
    )
    exact = clusters_after(AutoRule(), ids, updates, 7, dim, True)

    assert found == exact == truth


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_the_papers_rule_finds_the_same_groups_by_sketches(noise):
    dim = 10_000
    ids, _, updates = planted(40, 2, dim, noise, seed=1)
    rule = Thresholds(eps_mean=0.2, eps_max=0.3, gamma_max=0.3)

    found = clusters_after(rule, ids, updates, 8, dim, False, sketch=1024, keep_updates=False)
    exact = clusters_after(rule, ids, updates, 8, dim, False)

    assert found == exact
    assert len(found) == 2


@pytest.mark.parametrize("keep_updates", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_one_population_stays_one_by_sketches(seed, keep_updates):
    dim = 10_000
    ids, _, updates = planted(40, 1, dim, 1.0, seed)
    rng = np.random.default_rng(seed)
    centre = rng.normal(size=dim) / np.sqrt(dim)

    def moved(tasks, number, with_halves):
        answers = updates(tasks, number, with_halves)
        own = np.random.default_rng((seed, number)).normal(size=(len(answers), dim)) / np.sqrt(dim)
        return {
            i: Update(
                (answer.vector + 0.5 * (centre - tasks[i].params) + 0.5 * noise).astype(np.float32),
                num_examples=1,
                half_difference=(0.5 * noise[::-1]).astype(np.float32),
            )
            for (i, answer), noise in zip(answers.items(), own, strict=True)
        }

    found = clusters_after(
        AutoRule(), ids, moved, 6, dim, True, sketch=1024, keep_updates=keep_updates
    )

    assert found == [tuple(ids)]


@pytest.mark.parametrize("keep_updates", [True, False])
def test_newcomers_are_routed_by_sketches(keep_updates):
    dim = 10_000
    ids, group, updates = planted(40, 2, dim, 0.7, seed=2)
    server = Server(dim, sketch=1024, keep_updates=keep_updates)
    first = ids[:30]
    for number in range(6):
        server.step(updates(server.plan(first), number, True))
    assert len(server.clusters) == 2
    for number in range(6, 9):
        server.step(updates(server.plan(ids), number, True))

    for members in server.clusters.values():
        assert len({int(group[ids.index(i)]) for i in members}) == 1
    assert sum(map(len, server.clusters.values())) == 40
    assert all(
        update.shape == (1024,) for node in server.tree for update in node.cached_updates.values()
    )


@pytest.mark.parametrize(("size", "noise"), [(64, 1.5), (256, 2.5), (1024, 3.0)])
def test_the_default_rule_decides_as_by_whole_updates_if_they_are_kept(size, noise):
    dim = 4_000
    ids, _, updates = planted(40, 4, dim, noise, seed=1)

    found, exact = [], []
    for made, settings in ((found, {"sketch": size}), (exact, {})):
        server = Server(dim, rule=AutoRule(), **settings)
        for number in range(4):
            record = server.step(updates(server.plan(ids), number, True))
            made.append([(d.verdict, d.groups) for d in record.decisions])

    assert found == exact
    assert len(server.clusters) == 4


def test_sketches_as_long_as_updates_decide_without_comparing_these():
    ids, _, updates = planted(12, 2, 300, 0.3, seed=0)
    rule = Thresholds(eps_mean=1e9, eps_max=1e-9, gamma_max=0.7)
    server = Server(300, rule=rule, sketch=300)

    (decision,) = server.step(updates(server.plan(ids), 0, False)).decisions

    assert decision.verdict == "split"
    assert decision.measurements["num_compared_in_full"] < 12 * 11 / 2
