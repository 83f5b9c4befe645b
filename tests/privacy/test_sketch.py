"""Sketches of hidden updates: the errors of their cosines, and what breaks them."""

import itertools
import math

import numpy as np
import pytest
from scipy.fft import dct

from fedbranch import cosine_similarity
from fedbranch.privacy import Permutation, Rotation, Secret, Sketch

NUM_PARAMS = 4000
NUM_SECRETS = 400


def secrets():
    return [Secret(bytes(32), run="test", epoch=epoch) for epoch in range(1, NUM_SECRETS + 1)]


def pair(cosine, kind):
    """Make two unit vectors with this cosine: full, or with two numbers that are not zero."""
    rng = np.random.default_rng(5)
    basis = np.zeros((2, NUM_PARAMS))
    if kind == "sparse":
        basis[[0, 1], [17, 1234]] = 1
    else:
        basis = np.linalg.qr(rng.standard_t(3, size=(NUM_PARAMS, 2)))[0].T
    return np.stack([basis[0], cosine * basis[0] + math.sqrt(1 - cosine**2) * basis[1]])


def sketched_cosines(plain, size):
    """Compute the cosine of the sketches for many secrets."""
    found = []
    for secret in secrets():
        rotation = Rotation(secret, NUM_PARAMS, "test")
        sketches = Sketch(rotation.num_hidden, size).of(rotation.hide(plain))
        found.append(cosine_similarity(sketches)[0, 1])
    return np.array(found)


def test_it_is_the_first_numbers_scaled():
    hidden = np.arange(128, dtype=np.float32).reshape(2, 64)

    np.testing.assert_array_equal(Sketch(64, 16).of(hidden), 2 * hidden[:, :16])
    assert Sketch(64, 16).of(hidden).dtype == np.float32
    np.testing.assert_array_equal(Sketch(64, 64).of(hidden[0]), hidden[0])


def test_inner_products_are_right_on_average():
    plain = pair(0.4, "full")
    products = []
    for secret in secrets():
        rotation = Rotation(secret, NUM_PARAMS, "test")
        sketches = Sketch(rotation.num_hidden, 50).of(rotation.hide(plain))
        products.append(sketches @ sketches.T)

    # An inner product of 50 numbers varies by at most sqrt(2 / 50) from secret to secret.
    np.testing.assert_allclose(
        np.mean(products, axis=0), plain @ plain.T, atol=4 * math.sqrt(2 / 50 / NUM_SECRETS)
    )


@pytest.mark.parametrize("size", [100, 1000])
@pytest.mark.parametrize("cosine", [-0.3, 0.0, 0.5, 0.9])
def test_errors_of_cosines_have_the_stated_deviation(cosine, size):
    errors = sketched_cosines(pair(cosine, "full"), size) - cosine

    typical = Sketch(NUM_PARAMS, size).typical_error(cosine)
    # The deviation of 400 numbers is known to 3.5 %.
    assert np.sqrt(np.mean(errors**2)) == pytest.approx(typical, rel=0.15)


@pytest.mark.parametrize(("size", "failure"), [(200, 0.25), (1000, 0.05), (3000, 0.01)])
@pytest.mark.parametrize("cosine", [-0.3, 0.0, 0.9])
@pytest.mark.parametrize("kind", ["full", "sparse"])
def test_errors_of_cosines_rarely_exceed_the_bound(kind, cosine, size, failure):
    errors = np.abs(sketched_cosines(pair(cosine, kind), size) - cosine)

    bound = Sketch(NUM_PARAMS, size).error_bound(cosine, failure=failure)
    assert np.quantile(errors, 1 - failure) <= bound < 1


def test_the_bound_is_useful_at_size_1000():
    # For a model of any size. Two groups that the paper's theorem separates differ by more.
    sketch = Sketch(10**8, 1000)

    assert sketch.error_bound(0.0, failure=0.05) < 0.4
    assert sketch.error_bound(0.9, failure=0.05) < 0.15
    assert Sketch(10**8, 10_000).error_bound(0.0, failure=0.05) < 0.1


def test_the_bound_shrinks_with_the_size_to_zero():
    bounds = [Sketch(5000, size).error_bound(0.2) for size in (16, 200, 1000, 4000, 5000)]

    assert bounds[0] == math.inf  # too few for any bound
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] == 0


# Why the bound holds


@pytest.mark.parametrize("num", [5, 8, 9])
def test_the_fourth_moments_of_the_cosine_transform(num):
    squares = dct(np.eye(num), norm="ortho", axis=0) ** 2
    expected = np.full((num, num), 1 - 1 / num)
    expected += np.eye(num) / 2 + np.eye(num)[::-1] / 2

    np.testing.assert_allclose(num * squares.T @ squares, expected, atol=1e-12)


def moments(u, v):
    """Variances of e, N and H times the size, for one number drawn: over all signs."""
    num, cosine = len(u), u @ v
    signs = np.array(list(itertools.product([1, -1], repeat=num)))
    z, y = (dct(signs * x, norm="ortho", axis=1) for x in (u, v))
    terms = {
        "e": z * y - cosine * (z**2 + y**2) / 2,
        "N": (z**2 + y**2) / 2 - 1 / num,
        "H": (z**2 - y**2) / 2,
    }
    return {name: num * np.mean(np.sum(term**2, axis=1)) for name, term in terms.items()}, cosine


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num", [7, 8])
def test_the_variances_are_within_their_bounds(num, seed):
    drawn = np.random.default_rng(seed).standard_t(1.5, size=(2, num))
    u, v = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)

    variances, cosine = moments(u, v)

    assert variances["e"] <= 1.5 * (1 - cosine**2) ** 2
    assert variances["N"] <= 1 + cosine**2
    assert variances["H"] <= 1.5 * (1 - cosine**2)


def test_places_that_mirror_each_other_reach_the_bound():
    u, v = np.eye(8)[[2, 5]]
    beside = np.eye(8)[4]

    assert moments(u, v)[0]["e"] == pytest.approx(1.5 - 1 / 8)
    assert moments(u, beside)[0]["e"] == pytest.approx(1 - 1 / 8)


# What breaks it


@pytest.mark.parametrize("hide", ["permutation", "nothing"])
def test_without_a_rotation_sparse_vectors_are_lost(hide):
    # Ten of 4000 numbers are not zero: 100 of the 4000 mostly miss them all.
    plain = np.zeros((2, NUM_PARAMS))
    plain[:, 3000:3010] = 1.0
    lost = kept = 0
    for secret in secrets()[:100]:
        rotation = Rotation(secret, NUM_PARAMS, "test")
        permutation = Permutation(secret, NUM_PARAMS, "test")
        hidden = permutation.hide(plain) if hide == "permutation" else plain
        lost += not Sketch(NUM_PARAMS, 100).of(hidden).any()
        kept += bool(Sketch(rotation.num_hidden, 100).of(rotation.hide(plain)).any())

    assert lost >= 60
    assert kept == 100


def test_without_a_rotation_a_rare_large_number_is_missed():
    # Two vectors that agree but for their only large number, which has opposite signs.
    plain = np.tile(np.random.default_rng(0).normal(size=NUM_PARAMS) / 20, (2, 1))
    plain[:, 3000] = 20.0, -20.0
    truth = cosine_similarity(plain)[0, 1]
    secret = Secret(bytes(32), run="test")

    right, wrong = (
        cosine_similarity(Sketch(NUM_PARAMS, 200).of(kind(secret, NUM_PARAMS, "test").hide(plain)))
        for kind in (Rotation, Permutation)
    )

    assert truth < -0.9
    assert right[0, 1] == pytest.approx(truth, abs=0.05)
    assert wrong[0, 1] == pytest.approx(1.0)


@pytest.mark.parametrize("size", [-5, 0, 1, 15, 101])
def test_senseless_sizes_are_refused(size):
    with pytest.raises(ValueError, match=f"size {size}; it must be at least 16 and at most 100"):
        Sketch(100, size)


def test_other_senseless_settings_are_refused():
    with pytest.raises(ValueError, match=r"shape \(99,\); the last axis must be 100 long"):
        Sketch(100, 50).of(np.zeros(99))
    with pytest.raises(ValueError, match=r"the cosine is 1\.5"):
        Sketch(100, 50).error_bound(1.5)
    with pytest.raises(ValueError, match="failure is 0"):
        Sketch(100, 50).error_bound(0.0, failure=0)
