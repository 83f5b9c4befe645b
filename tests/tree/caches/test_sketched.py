"""Edges that keep sketches."""

import numpy as np
import pytest

from fedbranch import InMemory, Sketched
from fedbranch.core.geometry import scaled_for_cosines
from fedbranch.core.projection import Projection
from fedbranch.tree import make_edge
from tree.made_edges import LONG, newcomers, planted


def test_an_update_is_kept_as_its_projection_and_a_short_one_whole():
    updates = planted(0)[0][0]
    matrix = np.stack(list(updates.values()))

    edge = make_edge(Sketched(size=256, seed=5), updates)
    whole = make_edge(Sketched(size=LONG, seed=5), updates)

    assert np.array_equal(
        edge.tensors["updates"], Projection(dim=LONG, size=256, seed=5).of(matrix)
    )
    assert np.array_equal(whole.tensors["updates"], matrix)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sketched(size=2), "size is 2; it must be at least 16"),
        (lambda: Sketched(seed=-1), "seed is -1; it must be at least 0"),
    ],
)
def test_impossible_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sketched_similarities_have_the_stated_error():
    off, bounds, typical = [], [], []
    for seed in range(20):
        groups, pulls, rng = planted(seed, noise=0.7)
        cache = Sketched(size=256, seed=seed)
        whole, sketched = make_edge(InMemory(), groups[0]), make_edge(cache, groups[0])
        _, updates = newcomers(pulls, rng, 9)
        exact = whole.similarities(scaled_for_cosines(updates))
        errors = np.abs(sketched.similarities(scaled_for_cosines(cache.compared(updates))) - exact)
        projection = Projection(dim=LONG, size=256, seed=seed)
        for error, cosine in zip(errors.ravel(), exact.ravel().tolist(), strict=True):
            off.append(error)
            bounds.append(projection.error_bound(cosine, failure=0.05))
            typical.append(projection.typical_error(cosine))

    assert np.mean(np.array(off) > bounds) <= 0.05
    assert np.sqrt(np.mean((np.array(off) / typical) ** 2)) < 1.1
