"""Gaps between similarities, by whole updates and by sketches of them."""

from dataclasses import replace

import numpy as np
import pytest

from fedbranch import Evidence
from fedbranch.core.projection import Projection
from fedbranch.rules.gap_test import best_hierarchy, gap_between, least_gap, widest_gap


def evidence(updates):
    updates = np.array(updates, np.float32)
    return Evidence(
        node_id=0,
        round=3,
        client_ids=tuple(f"c{i}" for i in range(len(updates))),
        updates=updates,
        weights=np.ones(len(updates)),
        mean_update=updates.mean(axis=0),
        num_members=len(updates),
        rounds_trained=2,
        rounds_held=0,
        rounds_since_hold=None,
    )


def sketched(whole, *, size, seed=0, is_kept):
    projection = Projection(dim=whole.updates.shape[1], size=size, seed=seed)
    return replace(
        whole,
        updates=projection.of(whole.updates),
        projection=projection,
        whole=whole.updates if is_kept else None,
    )


def one_population(seed, num_clients=4, dim=2000):
    rng = np.random.default_rng(seed)
    return evidence(rng.normal(size=dim) + rng.normal(size=(num_clients, dim)))


def test_the_widest_gap_is_below_the_true_groups():
    centres = np.eye(3)[[0, 0, 0, 1, 1, 1, 2, 2, 2]]
    found = evidence(np.hstack([centres, 0.1 * np.eye(9)]))

    merges, num_groups, gap = widest_gap(found)

    assert num_groups == 3
    assert merges.groups(3).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert gap == pytest.approx(1 / 1.01, abs=1e-6)  # within 1 / 1.01, between 0
    assert gap == gap_between(best_hierarchy(found), 3)


@pytest.mark.parametrize("is_kept", [True, False])
def test_coarse_sketches_of_one_population_show_no_gap_that_is_wide_enough(is_kept):
    for seed in range(40):
        found = sketched(one_population(seed), size=16, seed=seed, is_kept=is_kept)

        assert widest_gap(found)[2] < least_gap(found)


def test_updates_that_are_there_have_the_last_word():
    for seed in range(40):
        whole = one_population(seed)
        found = sketched(whole, size=16, seed=seed, is_kept=True)
        gap = widest_gap(found)[2]

        if gap >= least_gap(found) - 0.1:  # or sketches alone said no
            assert gap == widest_gap(whole)[2]


def test_sketches_alone_need_a_wider_gap():
    whole = one_population(0)

    assert least_gap(whole) == least_gap(sketched(whole, size=256, is_kept=True)) == 0.2
    assert least_gap(sketched(whole, size=256, is_kept=False)) == pytest.approx(0.2 + 2 / 16)
    assert least_gap(whole, has_losses=False) == 0.4


def many_small_groups(seed, num_groups=100, num_clients=200, dim=4000, noise=1.5):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(num_groups, dim))
    groups = np.arange(num_clients) % num_groups
    return evidence(centres[groups] + noise * rng.normal(size=(num_clients, dim)))


def with_heavy_coordinates(seed, num_clients=40, dim=20_000):
    rng = np.random.default_rng(seed)
    pulls = rng.normal(size=(2, dim))
    updates = (pulls / np.linalg.norm(pulls, axis=1)[:, None])[np.arange(num_clients) % 2]
    updates[np.arange(num_clients), rng.choice(dim, num_clients, replace=False)] += 1
    return evidence(updates)


@pytest.mark.parametrize("size", [64, 256, 1024, 4096])
@pytest.mark.parametrize("make", [many_small_groups, with_heavy_coordinates])
def test_a_gap_that_sketches_hide_is_seen_in_full(make, size):
    for seed in range(6):
        whole = make(seed)
        merges, num_groups, gap = widest_gap(whole)
        found, num_found, gap_found = widest_gap(sketched(whole, size=size, is_kept=True))

        assert (gap_found >= least_gap(whole)) == (gap >= least_gap(whole))
        if gap >= least_gap(whole):
            assert num_found == num_groups
            assert np.array_equal(found.groups(num_groups), merges.groups(num_groups))
