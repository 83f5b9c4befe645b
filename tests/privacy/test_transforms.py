"""Secret transforms: what survives them, what they hide, and that they follow from the secret."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.fft import dct, idct

from fedbranch import cosine_similarity, weighted_mean
from fedbranch.privacy import Permutation, Rotation, Secret, Transform

SECRET = Secret(bytes(range(32)), run="test")
KINDS = [Permutation, Rotation]


def vectors(num_rows, size, seed=0):
    return np.random.default_rng(seed).normal(size=(num_rows, size)).astype(np.float32)


def matrix_of(transform):
    """The transform as a matrix, from what it does to the unit vectors."""
    return transform.hide(np.eye(transform.num_plain)).T


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 7, 31, 64, 97])
def test_it_is_orthonormal_and_linear(kind, size):
    transform = kind(SECRET, size, "test")
    matrix = matrix_of(transform)
    x = np.random.default_rng(1).normal(size=size)

    assert matrix.shape == (transform.num_hidden, size)
    np.testing.assert_allclose(matrix.T @ matrix, np.eye(size), atol=1e-12)
    np.testing.assert_allclose(transform.hide(x), matrix @ x, atol=1e-12)


@pytest.mark.parametrize("size", [5, 31, 64])
def test_a_rotation_is_signs_then_cosines_then_an_order(size):
    rotation = Rotation(SECRET, size, "test")
    x = np.random.default_rng(1).normal(size=size)
    padded = np.zeros(rotation.num_hidden)
    padded[:size] = rotation.signs * x

    np.testing.assert_allclose(
        rotation.hide(x), dct(padded, norm="ortho")[rotation.order], atol=1e-12
    )


@pytest.mark.parametrize("kind", KINDS)
@given(size=st.integers(0, 300), num_rows=st.integers(0, 3), seed=st.integers(0, 99))
def test_the_way_back(kind, size, num_rows, seed):
    transform = kind(SECRET, size, "test")
    plain = vectors(num_rows, size, seed)

    np.testing.assert_allclose(transform.reveal(transform.hide(plain)), plain, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_angles_survive(kind):
    plain = vectors(8, 1001)
    hidden = kind(SECRET, 1001, "test").hide(plain)

    np.testing.assert_allclose(
        np.linalg.norm(hidden, axis=1), np.linalg.norm(plain, axis=1), rtol=1e-6
    )
    np.testing.assert_allclose(cosine_similarity(hidden), cosine_similarity(plain), atol=1e-6)


def test_a_hidden_mean_is_the_mean_of_hidden_ones_to_the_bit():
    plain, weights = vectors(9, 1003), np.arange(1.0, 10.0)
    transform = Permutation(SECRET, 1003, "test")

    hidden = weighted_mean(transform.hide(plain), weights)

    np.testing.assert_array_equal(transform.reveal(hidden), weighted_mean(plain, weights))


@pytest.mark.parametrize(
    "other",
    [
        Secret(bytes(32), run="test"),
        Secret(SECRET.key, run="another"),
        Secret(SECRET.key, run="test", epoch=2),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_another_key_run_or_epoch_is_another_transform(kind, other):
    x = vectors(1, 1000)[0]
    ours, theirs = (kind(secret, 1000, "test").hide(x) for secret in (SECRET, other))

    # Two unrelated transforms leave a vector at a right angle, but for chance.
    assert abs(cosine_similarity(np.stack([ours, theirs]))[0, 1]) < 0.2


def test_parameters_and_buffers_are_hidden_separately():
    transform = Transform.of(SECRET, "permutation", num_params=50, num_buffers=50)

    assert (transform.params.order != transform.buffers.order).any()


def test_orders_are_uniform():
    # All 6 orders of three numbers are about equally frequent: chi-square with 5 degrees of
    # freedom is below 20.5 in 999 of 1000 cases, and what is drawn here never changes.
    counts = {}
    for number in range(3000):
        order = tuple(Permutation(SECRET, 3, str(number)).order)
        counts[order] = counts.get(order, 0) + 1

    assert len(counts) == 6
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 20.5


def test_signs_are_balanced():
    signs = Rotation(SECRET, 10_000, "test").signs

    assert set(signs) == {-1.0, 1.0}
    assert abs(signs.mean()) < 0.04  # four standard deviations


def test_secret_signs_alone_leave_the_values_in_place():
    # This is why a rotation has a secret order: the server can undo a cosine transform with
    # secret signs up to the signs. Rotation must not allow that.
    x = vectors(1, 4096)[0]
    rotation = Rotation(SECRET, 4096, "test")
    signs_alone = dct(rotation.signs * x, norm="ortho")

    np.testing.assert_allclose(np.abs(idct(signs_alone, norm="ortho")), np.abs(x), atol=1e-5)
    attacked = np.abs(idct(rotation.hide(x), norm="ortho"))
    assert abs(np.corrcoef(attacked, np.abs(x))[0, 1]) < 0.06


def test_a_wrong_length_is_refused():
    with pytest.raises(ValueError, match=r"shape \(4,\); the last axis must be 3 long"):
        Rotation(SECRET, 3, "test").hide(np.zeros(4))


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="'shuffle'; it must be one of"):
        Transform.of(SECRET, "shuffle", num_params=3)


def test_whole_numbers_cannot_be_mixed():
    with pytest.raises(TypeError, match="dtype int64"):
        Rotation(SECRET, 3, "test").hide(np.arange(3))
