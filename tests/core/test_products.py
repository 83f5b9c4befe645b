"""Inner products: right, in short blocks, and the same on any number of threads."""

import threading
import tracemalloc

import numpy as np
import pytest
import torch

from fedbranch import bipartition, cosine_error_bound, cosine_similarity
from fedbranch.core import products
from fedbranch.core.products import (
    MOST_ROWS_IN_OUR_BLOCKS,
    for_each_strip,
    inner_products,
    mirror_scaled,
    upper_products,
)

LIBRARIES = {"numpy": lambda array: array, "torch": torch.from_numpy}


@pytest.fixture(params=LIBRARIES)
def convert(request):
    return LIBRARIES[request.param]


@pytest.mark.parametrize(
    "num_clients", [1, 7, MOST_ROWS_IN_OUR_BLOCKS, MOST_ROWS_IN_OUR_BLOCKS + 1, 700]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_upper_triangle_has_all_products(convert, num_clients, dtype):
    updates = np.random.default_rng(0).normal(size=(num_clients, 30)).astype(dtype)

    found = np.asarray(upper_products(convert(updates)))

    assert found.dtype == dtype
    np.testing.assert_allclose(
        np.triu(found), np.triu(updates.astype(float) @ updates.T), rtol=1e-4, atol=1e-4
    )


def test_rows_that_are_not_next_to_each_other_are_multiplied_as_well():
    wide = np.random.default_rng(0).normal(size=(1200, 40)).astype(np.float32)
    updates = wide[::2, 5:25]

    np.testing.assert_allclose(
        np.triu(upper_products(updates)), np.triu(updates @ updates.T), atol=1e-4
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fresh_memory_may_have_any_content(monkeypatch, dtype):
    updates = np.random.default_rng(0).normal(size=(MOST_ROWS_IN_OUR_BLOCKS + 1, 30)).astype(dtype)
    expected = np.triu(upper_products(updates))
    monkeypatch.setattr(np, "empty", lambda shape, dtype: np.full(shape, np.nan, dtype))

    np.testing.assert_array_equal(np.triu(upper_products(updates)), expected)


def test_products_sum_in_short_blocks(convert):
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(5, 50)), rng.normal(size=(6, 50))

    found = inner_products(convert(left), convert(right), block_columns=7)

    np.testing.assert_allclose(found, left @ right.T, rtol=1e-12)


@pytest.mark.parametrize("side", [1, 3, 4, 100])
@pytest.mark.parametrize("anything", [np.nan, np.inf, 1e300])
def test_mirroring_fills_the_lower_triangle(convert, side, anything):
    above, scale, expected = to_be_mirrored()
    matrix = convert(above + np.tril(np.full((10, 10), anything), -1))

    with np.errstate(all="raise"):
        mirror_scaled(matrix, convert(scale), tile_rows=side)

    np.testing.assert_allclose(matrix, expected, rtol=1e-12)


@pytest.mark.parametrize("side", [1, 3, 4, 100])
def test_mirroring_elsewhere_is_left_to_the_library(monkeypatch, side):
    monkeypatch.setattr(products, "is_on_host", lambda matrix: False)
    above, scale, expected = to_be_mirrored()
    matrix = torch.from_numpy(above + np.tril(np.full((10, 10), np.nan), -1))

    mirror_scaled(matrix, torch.from_numpy(scale), tile_rows=side)

    np.testing.assert_allclose(matrix, expected, rtol=1e-12)


def to_be_mirrored():
    """Draw an upper triangle and the scale of its rows; return both and the expected matrix."""
    rng = np.random.default_rng(0)
    above = np.triu(rng.normal(size=(10, 10)))
    scale = rng.uniform(0, 2, size=10) * (np.arange(10) != 4)  # one zero update
    expected = np.clip(above * np.outer(scale, scale), -1, 1)
    return above, scale, expected + np.triu(expected, 1).T


@pytest.mark.parametrize("num_cores", [2, 3, 100])
def test_the_number_of_threads_changes_no_bit(monkeypatch, num_cores):
    updates = np.random.default_rng(0).normal(size=(300, 20)).astype(np.float32)
    expected = cosine_similarity(updates)
    monkeypatch.setattr(products, "ROWS_PER_THREAD", 10)
    monkeypatch.setattr(products, "num_cores", lambda: num_cores)

    np.testing.assert_array_equal(cosine_similarity(updates), expected)


def test_strips_are_worked_on_at_once_and_come_back_in_their_order():
    both = threading.Barrier(2)

    def work(rows):
        both.wait(timeout=60)  # returns when two threads wait
        return rows.start, rows.stop

    assert for_each_strip(work, np.eye(7), 2, num_threads=2) == [(0, 2), (2, 4), (4, 6), (6, 7)]


def test_threads_treat_invalid_numbers_as_the_caller_does():
    endless = np.full((4, 4), np.inf)

    with np.errstate(invalid="raise"), pytest.raises(FloatingPointError):
        for_each_strip(lambda rows: endless[rows] * 0, endless, 1, num_threads=2)


@pytest.mark.parametrize("num_clients", [MOST_ROWS_IN_OUR_BLOCKS, 2 * MOST_ROWS_IN_OUR_BLOCKS])
def test_many_long_updates_stay_within_the_error_bound(num_clients):
    rng = np.random.default_rng(0)
    updates = 1 + rng.random((num_clients, 20_000), dtype=np.float32)  # errors do not cancel

    similarity = cosine_similarity(updates)

    wide = updates[:50].astype(np.float64)
    wide /= np.linalg.norm(wide, axis=1, keepdims=True)
    assert np.abs(similarity[:50, :50] - wide @ wide.T).max() <= cosine_error_bound(20_000)


def test_similarities_and_split_take_one_matrix_and_a_tenth():
    updates = np.random.default_rng(0).normal(size=(2000, 300)).astype(np.float32)

    tracemalloc.start()
    bipartition(cosine_similarity(updates))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak <= 1.1 * 4 * 2000**2
