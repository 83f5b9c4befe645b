import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbranch import cosine_error_bound, cosine_similarity, norms, weighted_mean
from fedbranch.core import geometry

LIBRARIES = {
    "numpy": lambda array: array,
    "torch": torch.from_numpy,
}


@pytest.fixture(params=LIBRARIES)
def convert(request):
    return LIBRARIES[request.param]


def exact_cosines(updates):
    wide = updates.astype(np.longdouble)
    lengths = np.sqrt((wide**2).sum(axis=1))
    return (wide @ wide.T) / np.outer(lengths, lengths)


def test_similarity_by_hand(convert):
    updates = convert(np.float32([[1, 0], [1, 1], [-2, 0]]))

    similarity = np.asarray(cosine_similarity(updates))

    half = np.sqrt(0.5)
    np.testing.assert_allclose(
        similarity, [[1, half, -1], [half, 1, -half], [-1, -half, 1]], atol=1e-7
    )


@pytest.mark.parametrize(
    "dim", [1, 3, 100, geometry.BLOCK_COLUMNS, geometry.BLOCK_COLUMNS + 1, 50_000]
)
@pytest.mark.parametrize("kind", ["normal", "all positive", "nearly parallel", "spread scales"])
def test_similarity_stays_within_its_error_bound(convert, dim, kind):
    rng = np.random.default_rng(dim)
    updates = rng.normal(size=(6, dim))
    if kind == "all positive":  # rounding errors do not cancel
        updates = np.abs(updates) + 1
    elif kind == "nearly parallel":
        updates = rng.normal(size=dim) + 1e-3 * updates
    elif kind == "spread scales":
        updates *= 10.0 ** rng.integers(-12, 12, size=(6, 1))
    updates = updates.astype(np.float32)

    similarity = np.asarray(cosine_similarity(convert(updates)))

    assert similarity.dtype == np.float32
    assert np.abs(similarity - exact_cosines(updates)).max() <= cosine_error_bound(dim)


def test_similarity_of_float64_is_as_exact_as_float64(convert):
    updates = np.random.default_rng(0).normal(size=(5, 9000))

    similarity = np.asarray(cosine_similarity(convert(updates)))

    bound = cosine_error_bound(9000, unit_roundoff=2.0**-53)
    assert np.abs(similarity - exact_cosines(updates)).max() <= bound


def test_libraries_agree():
    updates = np.random.default_rng(0).normal(size=(30, 10_000)).astype(np.float32)
    weights = np.arange(1.0, 31.0)
    tensors = torch.from_numpy(updates)

    bound = 2 * cosine_error_bound(10_000)
    np.testing.assert_allclose(cosine_similarity(updates), cosine_similarity(tensors), atol=bound)
    np.testing.assert_allclose(norms(updates), norms(tensors), rtol=1e-14)
    np.testing.assert_allclose(
        weighted_mean(updates, weights),
        weighted_mean(tensors, torch.from_numpy(weights)),
        rtol=1e-6,
        atol=1e-12,
    )


def test_a_zero_update_is_similar_to_nothing(convert):
    similarity = np.asarray(cosine_similarity(convert(np.float32([[0, 0], [1, 2]]))))

    assert similarity.tolist() == [[0, 0], [0, 1]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_update_that_is_not_finite_has_no_similarities(convert, dtype, value):
    updates = convert(np.array([[value, 1], [0, 0], [1, 2], [value, value]], dtype=dtype))

    among_all = np.asarray(cosine_similarity(updates))
    to_others = np.asarray(cosine_similarity(updates[1:3], updates))

    assert np.isnan(among_all[[0, 3]]).all()
    assert np.isnan(to_others[:, [0, 3]]).all()
    assert among_all[1:3, 1:3].tolist() == [[0, 0], [0, 1]]


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e30, 3e38])
def test_tiny_and_huge_updates_neither_vanish_nor_overflow(convert, scale):
    updates = (np.array([[0.6, 0.8], [0.8, -0.6], [0.6, 0.8]]) * scale).astype(np.float32)

    similarity = np.asarray(cosine_similarity(convert(updates)))

    np.testing.assert_allclose(similarity, [[1, 0, 1], [0, 1, 0], [1, 0, 1]], atol=1e-4)


@pytest.mark.parametrize("scale", [1e-310, 1e-163, 1e-160, 1e155, 1e300])
def test_float64_neither_vanishes_nor_overflows(convert, scale):
    updates = np.array([[0.6, 0.8], [0.8, -0.6], [0.6, 0.8]]) * scale

    similarity = np.asarray(cosine_similarity(convert(updates)))

    np.testing.assert_allclose(similarity, [[1, 0, 1], [0, 1, 0], [1, 0, 1]], atol=1e-12)
    np.testing.assert_allclose(np.asarray(norms(convert(updates))) / scale, [1, 1, 1])


def test_too_few_digits_have_no_bound():
    with pytest.raises(ValueError, match="unit_roundoff"):
        cosine_error_bound(4096, 2.0**-11)


def test_similarity_is_exactly_symmetric_with_ones_on_the_diagonal(convert):
    updates = np.random.default_rng(1).normal(size=(40, 5000)).astype(np.float32)

    similarity = np.asarray(cosine_similarity(convert(updates)))

    assert np.array_equal(similarity, similarity.T)
    assert (np.diag(similarity) == 1).all()


def test_similarity_to_others_is_the_same_as_within_one_matrix(convert):
    updates = np.random.default_rng(2).normal(size=(7, 6000)).astype(np.float32)

    between = np.asarray(cosine_similarity(convert(updates[:3]), convert(updates[3:])))

    assert between.shape == (3, 4)
    np.testing.assert_allclose(
        between, cosine_similarity(updates)[:3, 3:], atol=cosine_error_bound(6000)
    )


@given(st.integers(1, 6), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_mean_and_norms_equal_the_definition(num_clients, dim, seed):
    rng = np.random.default_rng(seed)
    updates, weights = rng.normal(size=(num_clients, dim)), rng.uniform(0.1, 9, num_clients)

    np.testing.assert_allclose(
        weighted_mean(updates, weights), np.average(updates, axis=0, weights=weights), atol=1e-12
    )
    np.testing.assert_allclose(norms(updates), np.linalg.norm(updates, axis=1), rtol=1e-12)


def test_the_mean_of_one_update_is_that_update(convert):
    update = np.random.default_rng(3).normal(size=(1, 5000)).astype(np.float32)

    assert np.array_equal(np.asarray(weighted_mean(convert(update), [7.0])), update[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cosine_similarity(np.zeros(3)), r"shape \(3,\)"),
        (lambda: cosine_similarity(np.zeros((2, 3)), np.zeros((2, 4))), "3 columns and others 4"),
        (lambda: weighted_mean(np.zeros((0, 3)), np.zeros(0)), "zero updates"),
        (lambda: weighted_mean(np.zeros((2, 3)), np.zeros(3)), r"weights have shape \(3,\)"),
    ],
)
def test_wrong_shapes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("shape", [(10, 3), (1, 200_000), (3, 70_000), (1000, 1000), (70_000, 1)])
@pytest.mark.parametrize("num_rows", [1, 512])
def test_tiles_cover_all_updates_once_and_are_small(shape, num_rows):
    count = np.zeros(shape, np.int8)
    tiles = list(geometry._tiles(count, num_rows))
    for rows, columns in tiles:
        count[rows, columns] += 1

    assert (count == 1).all()
    assert max((r.stop - r.start) * (c.stop - c.start) for r, c in tiles) <= 2**16
    assert tiles == list(geometry._tiles(torch.from_numpy(count), num_rows))


@pytest.mark.parametrize("num_clients", [511, 512, 513, 3000])
def test_a_mean_of_many_is_that_of_all(num_clients):
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(num_clients, 300))
    weights = rng.integers(1, 9, num_clients)

    mean = weighted_mean(updates, weights)

    np.testing.assert_allclose(mean, np.average(updates, axis=0, weights=weights), rtol=1e-12)


@pytest.mark.parametrize("num_others", [0, 1, 60, 5000])
def test_the_length_of_an_update_does_not_depend_on_the_others(num_others):
    rng = np.random.default_rng(0)
    update = rng.normal(size=(1, 700)).astype(np.float32)
    others = rng.normal(size=(num_others, 700)).astype(np.float32)

    together = norms(np.concatenate([others, update]))

    assert together[-1] == norms(update)[0]


def test_whole_numbers_are_refused():
    with pytest.raises(TypeError, match="int64"):
        norms(np.zeros((2, 3), dtype=np.int64))
