"""Rounds and matrices that are too large for a page, and runs that are compared."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbranch.report.facts.folding import folded, thinned


@given(
    rounds=st.lists(st.integers(1, 500), unique=True, min_size=1).map(sorted),
    kept=st.sets(st.integers(1, 500), max_size=30),
    most=st.integers(2, 60),
)
def test_thinned_rounds_keep_both_ends_and_what_must_stay(rounds, kept, most):
    left = thinned(rounds, kept, most)

    assert left == sorted(set(left))
    assert set(left) <= set(rounds)
    assert len(left) == min(len(rounds), most)
    assert {rounds[0], rounds[-1]} <= set(left)
    must_stay = kept & set(rounds)
    if len(must_stay | {rounds[0], rounds[-1]}) <= most:
        assert must_stay <= set(left)


@pytest.mark.parametrize(("num_rows", "size"), [(7, 3), (9, 9), (10, 4), (5, 1)])
def test_folding_averages_neighbours(num_rows, size):
    matrix = np.random.default_rng(0).normal(size=(num_rows, num_rows))

    cells = folded(matrix, size)

    edges = [i * num_rows // size for i in range(size + 1)]
    for i, j in itertools.product(range(size), repeat=2):
        block = matrix[edges[i] : edges[i + 1], edges[j] : edges[j + 1]]
        assert cells[i, j] == pytest.approx(block.mean())
