"""Robust aggregates: against slow twins, and against hostile clients."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch

import fedbranch as fb
from fedbranch.core.geometry import to_numpy, weighted_mean
from fedbranch.core.robust import median, multi_krum, trimmed_mean

AGGREGATES = {
    "median": median,
    "trimmed mean": trimmed_mean(0.3),
    "multi-krum": multi_krum(2),
    "krum": multi_krum(2, num_kept=1),
}


def random_updates(seed, num_clients=9, dim=23):
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, 5, num_clients).astype(np.float64)
    return rng.normal(size=(num_clients, dim)).astype(np.float32), weights


def slow_trimmed_mean(updates, weights, share):
    num_cut = math.floor(share * len(updates) + 1e-9)
    mean = []
    for column in updates.astype(np.float64).T:
        pairs = sorted(zip(column, weights, strict=True))[num_cut : len(updates) - num_cut]
        mean.append(sum(v * w for v, w in pairs) / sum(w for _, w in pairs))
    return np.array(mean)


def slow_multi_krum(updates, weights, num_attackers, num_kept=None):
    rows = [row.astype(np.float64) for row in updates]
    num_clients = len(rows)
    num_neighbours = min(max(1, num_clients - num_attackers - 2), num_clients - 1)
    scores = []
    for i, row in enumerate(rows):
        distances = [((row - other) ** 2).sum() for j, other in enumerate(rows) if j != i]
        score = sum(sorted(distances)[:num_neighbours])
        scores.append((round(score, 9), np.linalg.norm(row)))  # two may be each other's nearest
    wanted = num_clients - num_attackers if num_kept is None else num_kept
    kept = sorted(range(num_clients), key=scores.__getitem__)[: max(1, wanted)]
    return np.average([rows[i] for i in kept], axis=0, weights=[weights[i] for i in kept])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_clients", [1, 2, 3, 8, 9])
def test_median_is_numpys(seed, num_clients):
    updates, weights = random_updates(seed, num_clients)

    middle = median(updates, weights)

    np.testing.assert_allclose(middle, np.median(updates, axis=0), rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0, 0.1, 0.25, 1 / 3, 0.49])
def test_trimmed_mean_is_its_slow_twin(seed, share):
    updates, weights = random_updates(seed)
    updates = np.round(updates, 1)  # so that some are equal

    mean = trimmed_mean(share)(updates, weights)

    np.testing.assert_allclose(
        mean, slow_trimmed_mean(updates, weights, share), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_clients", [1, 2, 4, 7, 12])
@pytest.mark.parametrize(("num_attackers", "num_kept"), [(0, None), (2, None), (3, 1), (2, 5)])
def test_multi_krum_is_its_slow_twin(seed, num_clients, num_attackers, num_kept):
    updates, weights = random_updates(seed, num_clients)

    mean = multi_krum(num_attackers, num_kept)(updates, weights)

    expected = slow_multi_krum(updates, weights, num_attackers, num_kept)
    np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-6)


def test_nothing_trimmed_and_no_client_hostile_is_the_weighted_mean():
    updates, weights = random_updates(0)

    np.testing.assert_allclose(
        trimmed_mean(0)(updates, weights), weighted_mean(updates, weights), rtol=1e-6, atol=1e-7
    )
    np.testing.assert_array_equal(multi_krum(0)(updates, weights), weighted_mean(updates, weights))


@pytest.mark.parametrize("name", AGGREGATES)
def test_a_few_hostile_updates_hardly_count(name):
    updates, weights = random_updates(0, num_clients=20, dim=50)
    updates += 3
    hostile = np.concatenate([updates, np.full((2, 50), -1e30, dtype=np.float32)])
    weights = np.append(weights, [4.0, 4.0])

    with_them = AGGREGATES[name](hostile, weights)

    assert np.abs(with_them - 3).max() < 4  # no honest coordinate is farther out
    assert with_them.mean() == pytest.approx(3, abs=0.5)


@pytest.mark.parametrize("name", AGGREGATES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_torch_gives_what_numpy_gives(name, dtype):
    updates, weights = random_updates(1)
    updates = updates.astype(dtype)

    by_numpy = AGGREGATES[name](updates, weights)
    by_torch = AGGREGATES[name](torch.from_numpy(updates), torch.from_numpy(weights))

    assert by_numpy.dtype == dtype
    assert by_torch.dtype == getattr(torch, dtype)
    np.testing.assert_allclose(to_numpy(by_torch), by_numpy, rtol=1e-6)


@pytest.mark.parametrize("name", AGGREGATES)
def test_weights_may_be_numpys_where_updates_are_tensors(name):
    updates, weights = random_updates(1)

    mixed = AGGREGATES[name](torch.from_numpy(updates), weights)

    np.testing.assert_allclose(to_numpy(mixed), AGGREGATES[name](updates, weights), rtol=1e-6)


@pytest.mark.parametrize("name", AGGREGATES)
def test_a_server_takes_it_in_place_of_the_mean(name):
    updates, weights = random_updates(3)
    server = fb.Server(updates.shape[1], rule=fb.NeverSplit(), aggregate=AGGREGATES[name])
    ids = [f"c{row}" for row in range(len(updates))]
    server.plan(ids)

    server.step(
        {i: fb.Update(u, num_examples=w) for i, u, w in zip(ids, updates, weights, strict=True)}
    )

    assert server.tree.root.params.dtype == np.float32
    np.testing.assert_array_equal(server.tree.root.params, AGGREGATES[name](updates, weights))


@pytest.mark.parametrize("name", AGGREGATES)
@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_clients_changes_nothing(name, seed):
    updates, weights = random_updates(seed)
    updates = np.round(updates)  # many values are equal
    order = np.random.default_rng(seed).permutation(len(updates))

    one = AGGREGATES[name](updates, weights)
    other = AGGREGATES[name](updates[order], weights[order])

    np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-7)


def test_ties_of_krum_do_not_depend_on_the_order():
    updates = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]], dtype=np.float32)
    weights = np.array([1.0, 2.0, 3.0, 4.0])

    chosen = {
        tuple(multi_krum(1, num_kept=1)(updates[list(order)], weights[list(order)]).tolist())
        for order in permutations(range(4))
    }

    assert len(chosen) == 1


def test_krum_keeps_the_shorter_of_two():
    updates = np.array([[1.0, 0.0], [0.0, 3.0]])

    np.testing.assert_array_equal(multi_krum(1)(updates, np.ones(2)), [1, 0])


@pytest.mark.parametrize("name", AGGREGATES)
def test_a_single_client_is_believed(name):
    updates, weights = random_updates(0, num_clients=1)

    np.testing.assert_array_equal(AGGREGATES[name](updates, weights), updates[0])


def test_a_share_rounds_down():
    updates = np.arange(9, dtype=np.float64)[:, None] ** 2
    weights = np.ones(9)

    assert trimmed_mean(0.11)(updates, weights)[0] == np.mean(updates)
    assert trimmed_mean(0.12)(updates, weights)[0] == np.mean(updates[1:-1])


def test_a_share_that_floats_cannot_hold_is_not_one_less():
    updates = np.arange(100, dtype=np.float64)[:, None] ** 2

    assert 0.29 * 100 < 29
    assert trimmed_mean(0.29)(updates, np.ones(100))[0] == pytest.approx(np.mean(updates[29:-29]))


def test_distances_do_not_drown_in_a_common_part():
    rng = np.random.default_rng(0)
    common = 1000 * rng.normal(size=200)
    updates = (common + rng.normal(size=(8, 200))).astype(np.float32)
    updates[5] = (common + 3 * rng.normal(size=200)).astype(np.float32)

    kept = multi_krum(1)(updates, np.ones(8))

    np.testing.assert_allclose(kept, np.delete(updates, 5, axis=0).mean(axis=0), rtol=1e-5)


@pytest.mark.parametrize("name", AGGREGATES)
def test_long_updates_are_walked_over_in_blocks(name, monkeypatch):
    updates, weights = random_updates(2, dim=100)
    whole = AGGREGATES[name](updates, weights)
    monkeypatch.setattr("fedbranch.core.robust.ENTRIES_AT_ONCE", 63)

    in_blocks = AGGREGATES[name](updates, weights)

    np.testing.assert_allclose(in_blocks, whole, rtol=1e-6)


@pytest.mark.parametrize("share", [-0.1, 0.5, 1, math.nan])
def test_impossible_shares_are_refused(share):
    with pytest.raises(ValueError, match=r"share is .*; it must be at least 0"):
        trimmed_mean(share)


def test_impossible_numbers_are_refused():
    with pytest.raises(ValueError, match="num_attackers is -1; it must be at least 0"):
        multi_krum(-1)
    with pytest.raises(ValueError, match="num_kept is 0; it must be at least 1"):
        multi_krum(1, 0)
    with pytest.raises(TypeError):
        multi_krum(0.2)


@pytest.mark.parametrize("name", AGGREGATES)
def test_impossible_updates_and_weights_are_refused(name):
    aggregate = AGGREGATES[name]

    with pytest.raises(ValueError, match=r"updates have shape \(0, 3\); stack at least one"):
        aggregate(np.zeros((0, 3)), np.zeros(0))
    with pytest.raises(ValueError, match=r"weights have shape \(3,\); pass one weight for each"):
        aggregate(np.zeros((2, 3)), np.ones(3))
    with pytest.raises(TypeError, match="updates are int64; convert them to float32"):
        aggregate(np.zeros((2, 3), dtype=np.int64), np.ones(2))
