import tracemalloc

import numpy as np
import pytest
import torch

from fedbranch import bipartition, cosine_error_bound, cosine_similarity
from fedbranch.core import gram
from fedbranch.core.gram import mirror_scaled, products, upper_products

LIBRARIES = {"numpy": lambda array: array, "torch": torch.from_numpy}


@pytest.fixture(params=LIBRARIES)
def convert(request):
    return LIBRARIES[request.param]


@pytest.mark.parametrize("num_clients", [1, 7, gram.MANY_ROWS, gram.MANY_ROWS + 1, 700])
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


def test_products_sum_in_short_blocks(monkeypatch, convert):
    monkeypatch.setattr(gram, "BLOCK", 7)
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(5, 50)), rng.normal(size=(6, 50))

    np.testing.assert_allclose(products(convert(left), convert(right)), left @ right.T, rtol=1e-12)


@pytest.mark.parametrize("side", [1, 3, 4, 100])
def test_mirroring_fills_the_lower_triangle(monkeypatch, convert, side):
    monkeypatch.setattr(gram, "TILE_ON_HOST", side)
    rng = np.random.default_rng(0)
    above = np.triu(rng.normal(size=(10, 10)))
    scale = rng.uniform(0.1, 2, size=10)
    matrix = convert(above + np.tril(np.full((10, 10), np.nan), -1))

    mirror_scaled(matrix, convert(scale))

    expected = np.clip(above * np.outer(scale, scale), -1, 1)
    np.testing.assert_allclose(matrix, expected + np.triu(expected, 1).T, rtol=1e-12)


@pytest.mark.parametrize("num_clients", [gram.MANY_ROWS, 2 * gram.MANY_ROWS])
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
