import numpy as np
import pytest
import torch

from fedbranch import bipartition, cosine_similarity
from fedbranch.core.blocked_linkage import hierarchy_of
from fedbranch.core.exact_cut import (
    are_edges_right,
    cosines_of_pairs,
    likely_error,
    parts_of,
    refined,
)
from fedbranch.core.linkage import hierarchy
from fedbranch.core.projection import Projection


def planted(seed, num_clients, num_groups, dim, noise):
    rng = np.random.default_rng(seed)
    groups = np.arange(num_clients) % num_groups
    centres = rng.normal(size=(num_groups, dim))
    return (centres[groups] + noise * rng.normal(size=(num_clients, dim))).astype(np.float32)


def counted(updates):
    asked = []

    def exact(a_rows, b_rows):
        asked.extend(zip(a_rows.tolist(), b_rows.tolist(), strict=True))
        return cosines_of_pairs(updates, a_rows, b_rows)

    return exact, asked


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("num_groups", "noise"), [(1, 1.0), (2, 0.5), (2, 2.0), (5, 1.0)])
def test_the_cut_of_sketches_is_refined_to_the_exact_one(seed, num_groups, noise):
    updates = planted(seed, 60, num_groups, 4000, noise)
    projection = Projection(dim=4000, size=256, seed=seed)
    sketched = cosine_similarity(projection.of(updates))
    error = likely_error(projection, 60)
    exact, asked = counted(updates)

    parts = parts_of(hierarchy(sketched), error)
    split, num_asked = refined(sketched, parts, error, exact, largest_share=1)

    true = bipartition(cosine_similarity(updates))
    assert split.left_rows.tolist() == true.left_rows.tolist()
    assert split.right_rows.tolist() == true.right_rows.tolist()
    assert split.cross_similarity == pytest.approx(true.cross_similarity, abs=1e-6)
    assert num_asked == len(asked) == len({tuple(sorted(pair)) for pair in asked})


@pytest.mark.parametrize("seed", range(200))
def test_any_error_within_the_bound_is_made_good(seed):
    """Brute force: similarities that are wrong by as much as they may be, in the worst places."""
    rng = np.random.default_rng(seed)
    num_clients = int(rng.integers(2, 9))
    true = rng.uniform(-1, 1, size=(num_clients, num_clients))
    true = np.maximum(true, true.T)
    error = float(rng.choice([0.01, 0.1, 0.5]))
    wrong = true + error * rng.choice([-1, 1], size=true.shape)
    wrong = np.tril(wrong) + np.tril(wrong, -1).T

    parts = parts_of(hierarchy(wrong), error)
    split, _ = refined(wrong, parts, error, lambda a, b: true[a, b], largest_share=1)

    best = bipartition(true)
    assert split.cross_similarity == best.cross_similarity
    assert split.left_rows.tolist() == best.left_rows.tolist()


def test_if_groups_are_clear_the_cut_needs_no_exact_products():
    updates = planted(0, 100, 2, 20_000, 0.5)
    projection = Projection(dim=20_000, size=1024)

    parts = parts_of(hierarchy_of(projection.of(updates)), likely_error(projection, 100))

    assert parts.num_parts == 2
    assert parts.part.tolist() == [0, 1] * 50


def test_only_pairs_that_may_decide_are_asked_for():
    updates = planted(0, 200, 2, 20_000, 0.5)
    updates[0] += 0.6 * updates[1]  # the one pair that decides the cross-similarity is with it
    projection = Projection(dim=20_000, size=2048)
    sketched = cosine_similarity(projection.of(updates))
    error = likely_error(projection, 200)
    exact, asked = counted(updates)

    split, _ = refined(sketched, parts_of(hierarchy(sketched), error), error, exact)

    true = bipartition(cosine_similarity(updates))
    assert split.cross_similarity == pytest.approx(true.cross_similarity, abs=1e-6)
    assert 0 < len(asked) < 200  # of 19,900
    assert all(0 in pair for pair in asked)


@pytest.mark.parametrize(("num_groups", "noise"), [(1, 1.0), (30, 2.0)])
def test_no_pair_is_computed_if_too_many_may_decide(num_groups, noise):
    updates = planted(0, 60, num_groups, 4000, noise)
    projection = Projection(dim=4000, size=64)
    sketched = cosine_similarity(projection.of(updates))
    error = likely_error(projection, 60)
    exact, asked = counted(updates)

    assert refined(sketched, parts_of(hierarchy(sketched), error), error, exact) is None
    assert asked == []


def test_an_edge_that_exists_by_mistake_is_noticed():
    updates = planted(0, 100, 2, 20_000, 0.5)
    projection = Projection(dim=20_000, size=1024)
    error = likely_error(projection, 100)
    exact, asked = counted(updates)
    merges = hierarchy_of(projection.of(updates))

    assert are_edges_right(merges, error, exact)
    assert sorted(asked) == sorted(map(tuple, merges.edge_rows.tolist()))
    merges.similarities[50] += 1.1 * error
    assert not are_edges_right(merges, error, exact)


@pytest.mark.parametrize("kind", ["normal", "few coordinates", "one length"])
def test_no_pair_of_sketches_is_off_by_more_than_likely(kind):
    rng = np.random.default_rng(0)
    worst = []
    for seed in range(20):
        updates = rng.normal(size=(100, 5000))
        if kind == "few coordinates":
            updates *= rng.random(5000) < 0.1
        elif kind == "one length":
            updates = np.sign(updates) + rng.normal(size=5000)
        projection = Projection(dim=5000, size=512, seed=seed)
        off = cosine_similarity(projection.of(updates)) - cosine_similarity(updates)
        worst.append(np.abs(off).max() / likely_error(projection, 100))

    assert 0.4 < max(worst) < 1.05
    assert np.mean(worst) < 0.9


@pytest.mark.parametrize("convert", [lambda array: array, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("pair_cost", [0, 1000])  # one by one, or by products
@pytest.mark.parametrize("dim", [100, 9000])
def test_cosines_of_pairs_are_those_of_the_matrix(convert, pair_cost, dim):
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(30, dim)).astype(np.float32)
    updates[3], updates[4] = 0, updates[4] * 1e15
    a_rows, b_rows = rng.integers(30, size=(2, 77))

    found = cosines_of_pairs(
        convert(updates), a_rows, b_rows, numbers_at_once=50, pair_cost=pair_cost
    )

    np.testing.assert_allclose(found, cosine_similarity(updates)[a_rows, b_rows], atol=1e-6)


def test_no_pairs_have_no_cosines():
    assert cosines_of_pairs(np.ones((3, 2)), np.zeros(0, int), np.zeros(0, int)).shape == (0,)
