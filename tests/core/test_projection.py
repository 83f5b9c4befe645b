"""Random projections: their definition, the error of their cosines, and extreme updates."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbranch.core.geometry import cosine_similarity, norms
from fedbranch.core.projection import Projection, Variances, bound_from_variances

NUM_SEEDS = 400


def matrix_of(projection):
    """Compute the projection as a dense matrix, from the sketches of unit vectors."""
    return projection.of(np.eye(projection.dim, dtype=np.float32)).T


def pairs(cosine, dim, size):
    """Unit vectors with this cosine, of kinds that a bad projection would not bear."""
    rng = np.random.default_rng(5)
    kinds = {
        "full": rng.normal(size=(2, dim)),
        "heavy-tailed": rng.standard_t(1.5, size=(2, dim)),
        "two numbers": np.eye(dim)[[3, 3 + size]],
        "few large ones": np.eye(dim)[rng.choice(dim, 8)].reshape(2, 4, dim).sum(axis=1),
        "constant": np.stack([np.ones(dim), np.where(np.arange(dim) % (2 * size) < size, 1, -1)]),
        "equal modulo the size": np.stack(
            [np.arange(dim) % size == 1, np.arange(dim) % size == 2]
        ).astype(float),
    }
    for kind, vectors in kinds.items():
        p, q = np.linalg.qr(vectors.T)[0].T
        yield kind, np.stack([p, cosine * p + math.sqrt(1 - cosine**2) * q])


def sketched_over_seeds(kinds, size):
    """The sketches of every pair, shape (seeds, size) each, for many seeds."""
    kinds = dict(kinds)
    rows = np.concatenate(list(kinds.values())).astype(np.float32)
    sketches = np.stack(
        [Projection(dim=rows.shape[1], size=size, seed=s).of(rows) for s in range(NUM_SEEDS)]
    ).astype(np.float64)
    for number, kind in enumerate(kinds):
        yield kind, sketches[:, 2 * number], sketches[:, 2 * number + 1]


# What it is


@pytest.mark.parametrize(("dim", "size"), [(10, 16), (16, 16), (200, 16), (257, 16), (3000, 16)])
def test_every_coordinate_goes_to_one_bucket_with_a_sign(dim, size):
    matrix = matrix_of(Projection(dim=dim, size=size, seed=3))

    assert matrix.shape == (size, dim)
    assert ((matrix != 0).sum(axis=0) == 1).all()
    assert set(np.unique(matrix)) <= {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("dim", [10, 100, 3000])
def test_it_is_the_product_with_its_matrix(dim):
    projection = Projection(dim=dim, size=32, seed=1)
    whole = np.random.default_rng(0).integers(-1000, 1000, size=(7, dim)).astype(np.float32)

    np.testing.assert_array_equal(projection.of(whole), whole @ matrix_of(projection).T)


def test_a_short_update_is_only_permuted_with_signs():
    updates = np.random.default_rng(0).normal(size=(5, 60)).astype(np.float32)
    projection = Projection(dim=60, size=64)

    np.testing.assert_allclose(norms(projection.of(updates)), norms(updates), rtol=1e-7)
    assert projection.typical_error() == projection.error_bound(0.3) == 0


@pytest.mark.parametrize(("dim", "size", "folds"), [(1000, 64, 1), (2000, 64, 2)])
def test_coordinates_share_a_bucket_as_rarely_as_the_bound_assumes(dim, size, folds):
    rng = np.random.default_rng(0)
    pairs = rng.choice(dim, size=(4000, 2))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    shared = 0
    for seed in range(100):
        projection = Projection(dim=dim, size=size, seed=seed)
        bucket = np.abs(matrix_of(projection)).argmax(axis=0)
        shared += (bucket[pairs[:, 0]] == bucket[pairs[:, 1]]).mean() / 100

    assert len(projection.widths) == folds
    assert shared <= 1.03 * projection._collisions
    assert shared >= 0.8 / size


def test_a_row_does_not_depend_on_other_rows():
    updates = np.random.default_rng(0).normal(size=(90, 5000)).astype(np.float32)
    projection = Projection(dim=5000, size=64)

    together = projection.of(updates)

    assert together.dtype == np.float32
    alone = np.concatenate([projection.of(row[None, :]) for row in updates])
    assert together.tobytes() == alone.tobytes()
    assert projection.of(updates[::-1])[::-1].tobytes() == together.tobytes()


@pytest.mark.parametrize("dim", [50, 700, 20_000])
def test_torch_gives_the_same_bits(dim):
    updates = np.random.default_rng(0).normal(size=(20, dim)).astype(np.float32)
    projection = Projection(dim=dim, size=64)

    theirs = projection.of(torch.from_numpy(updates))

    assert isinstance(theirs, torch.Tensor)
    assert theirs.numpy().tobytes() == projection.of(updates).tobytes()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 900), st.integers(16, 40), st.integers(0, 2**40))
def test_it_is_linear(dim, size, seed):
    whole = np.random.default_rng(seed).integers(-99, 99, size=(2, dim)).astype(np.float32)
    projection = Projection(dim=dim, size=size, seed=seed)
    first, second = projection.of(whole)

    combined = projection.of((3 * whole[0] - 2 * whole[1])[None, :])

    np.testing.assert_array_equal(combined[0], 3 * first - 2 * second)


def test_seeds_give_other_projections_and_the_same_one_the_same():
    updates = np.random.default_rng(0).normal(size=(1, 500)).astype(np.float32)

    first, again, other = (
        Projection(dim=500, size=32, seed=seed).of(updates) for seed in (0, 0, 1)
    )

    assert first.tobytes() == again.tobytes() != other.tobytes()


def test_the_largest_numbers_do_not_overflow():
    updates = np.full((2, 300_000), 1e30, dtype=np.float32)
    updates[1] *= -1

    sketches = Projection(dim=300_000, size=64).of(updates)

    assert np.isfinite(sketches).all()
    assert cosine_similarity(sketches)[0, 1] == pytest.approx(-1)


def test_no_vectors_have_no_sketches():
    assert Projection(dim=50, size=16).of(np.zeros((0, 50), np.float32)).shape == (0, 16)


# How far it is off


@pytest.mark.parametrize(("dim", "size"), [(600, 64), (3000, 64)])
@pytest.mark.parametrize("cosine", [-0.3, 0.0, 0.9])
def test_it_is_right_on_average_and_varies_as_little_as_stated(cosine, dim, size):
    projection = Projection(dim=dim, size=size)
    share = projection._collisions
    limits = Variances(
        e=share * (1 - cosine**2) ** 2, n=share * (1 + cosine**2), h=share * (1 - cosine**2)
    )
    for kind, u, v in sketched_over_seeds(pairs(cosine, dim, size), size):
        a, b, product = (u**2).sum(axis=1), (v**2).sum(axis=1), (u * v).sum(axis=1)
        n, h = (a + b) / 2, (a - b) / 2
        found = {"e": product - cosine * n, "n": n - 1, "h": h}
        for name, values in found.items():
            most = getattr(limits, name)
            # Up to five standard deviations of these means.
            assert abs(values.mean()) <= 5 * math.sqrt(most / NUM_SEEDS), (kind, name)
            spread = (values**2).std() / math.sqrt(NUM_SEEDS)
            assert (values**2).mean() <= most + 5 * spread, (kind, name)


def test_a_sketch_that_is_sketched_again_with_the_same_seed_is_as_good_as_stated():
    vectors = np.zeros((2, 64), dtype=np.float32)
    vectors[0, :16] = vectors[1, 16:32] = 1 / 4  # which all share their signs if streams do
    products = []
    for seed in range(10_000):
        first, second = (
            Projection(dim=64, size=32, seed=seed),
            Projection(dim=32, size=16, seed=seed),
        )
        u, v = second.of(first.of(vectors))
        products.append(float(u @ v))

    most = first._collisions + second._collisions
    squares = np.square(products)
    assert abs(np.mean(products)) <= 5 * math.sqrt(most / len(products))
    assert squares.mean() <= most + 5 * squares.std() / math.sqrt(len(products))


@pytest.mark.parametrize(("dim", "size"), [(900, 64), (6000, 256)])
@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.9])
def test_cosines_are_typically_off_by_the_stated_deviation(cosine, dim, size):
    [(_, u, v)] = sketched_over_seeds([next(pairs(cosine, dim, size))], size)
    errors = (u * v).sum(axis=1) / np.linalg.norm(u, axis=1) / np.linalg.norm(v, axis=1) - cosine

    typical = Projection(dim=dim, size=size).typical_error(cosine)
    assert np.sqrt(np.mean(errors**2)) == pytest.approx(typical, rel=0.15)


def test_cosines_of_few_numbers_may_vary_more_than_typically():
    projection = Projection(dim=2000, size=64)
    vectors = np.zeros((2, 2000))
    vectors[:, [3, 1500]] = np.array([[1, 0.9], [0.9, 1]]) / math.sqrt(1.81)
    [(_, u, v)] = sketched_over_seeds([("close", vectors)], size=64)
    cosine = 1.8 / 1.81

    a, b, product = (u**2).sum(axis=1), (v**2).sum(axis=1), (u * v).sum(axis=1)
    found = (product / np.sqrt(a * b)).std()
    found_e = (product - cosine * (a + b) / 2).std()

    assert found > 50 * projection.typical_error(cosine)
    assert found_e == pytest.approx(projection.typical_error(cosine), rel=0.3)


@pytest.mark.parametrize(("size", "failure"), [(200, 0.25), (1000, 0.05), (4000, 0.01)])
@pytest.mark.parametrize("cosine", [-0.3, 0.0, 0.9])
def test_cosines_are_rarely_off_by_more_than_the_bound(cosine, size, failure):
    dim = 6000
    bound = Projection(dim=dim, size=size).error_bound(cosine, failure=failure)
    assert 0 < bound < 1
    for kind, u, v in sketched_over_seeds(pairs(cosine, dim, size), size):
        lengths = np.linalg.norm(u, axis=1) * np.linalg.norm(v, axis=1)
        errors = np.abs((u * v).sum(axis=1) / lengths - cosine)
        assert np.quantile(errors, 1 - failure) <= bound, kind


def test_the_bound_shrinks_with_the_size():
    bounds = [Projection(dim=10**6, size=size).error_bound(0.2) for size in (16, 300, 1024, 8192)]

    assert bounds[0] == math.inf  # too few to promise anything
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[2] < 0.35
    assert bounds[3] < 0.11


def test_opposite_vectors_stay_opposite():
    assert Projection(dim=10**6, size=1024).error_bound(-1.0) == pytest.approx(0, abs=0.02)
    assert Projection(dim=10**6, size=1024).typical_error(-1.0) == 0


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0, "size": 16}, "dim is 0"),
        ({"dim": 100, "size": 15}, "size is 15; it must be at least 16"),
        ({"dim": 100, "size": 16, "seed": -1}, "seed is -1"),
    ],
)
def test_senseless_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Projection(**arguments)


def test_other_vectors_are_refused():
    projection = Projection(dim=100, size=16)
    with pytest.raises(ValueError, match=r"shape \(2, 99\); this projection is for \(num_up"):
        projection.of(np.zeros((2, 99)))
    with pytest.raises(ValueError, match=r"shape \(100,\)"):
        projection.of(np.zeros(100))
    with pytest.raises(TypeError, match="updates are int64"):
        projection.of(np.zeros((2, 100), dtype=np.int64))


def test_senseless_questions_are_refused():
    projection = Projection(dim=100, size=50)
    with pytest.raises(ValueError, match=r"the cosine is 1\.5"):
        projection.error_bound(1.5)
    with pytest.raises(ValueError, match=r"the cosine is -2"):
        projection.typical_error(-2)
    with pytest.raises(ValueError, match="failure is 0"):
        projection.error_bound(0.0, failure=0)
    with pytest.raises(ValueError, match="failure is 1"):
        bound_from_variances(0.0, Variances(0.1, 0.1, 0.1), failure=1)
