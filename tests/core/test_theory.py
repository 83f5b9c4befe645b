import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedbranch import bipartition, cosine_similarity, separation_gap, theory

GUARANTEED = {
    2: 0.7071, 3: 0.3827, 4: 0.2588, 5: 0.1951, 6: 0.1564,
    7: 0.1305, 8: 0.1120, 9: 0.0980, 10: 0.0872,
}  # fmt: skip


@pytest.mark.parametrize(("num_groups", "gamma"), GUARANTEED.items())
def test_the_closed_form_of_the_guaranteed_region(num_groups, gamma):
    assert theory.guaranteed_noise(num_groups) == pytest.approx(gamma, abs=5e-5)


@pytest.mark.parametrize("num_groups", GUARANTEED)
def test_the_closed_form_is_where_the_two_bounds_meet(num_groups):
    edge = theory.guaranteed_noise(num_groups)

    assert theory.is_split_guaranteed(num_groups, [edge - 1e-6] * 3)
    assert not theory.is_split_guaranteed(num_groups, [edge + 1e-6] * 3)


def test_without_noise_two_groups_have_similarities_of_exactly_one():
    assert theory.intra_similarity_bound(0, 0) == 1
    assert theory.cross_similarity_bound(2, 0, 0) == -1
    gradients = np.float32([[3, 4], [3, 4], [-6, -8], [-6, -8]])

    similarity = cosine_similarity(gradients)

    assert np.abs(similarity).tolist() == np.ones((4, 4)).tolist()
    assert separation_gap(similarity, [0, 0, 1, 1]) == 2


def test_two_groups_bound_each_other_by_minus_h():
    # The remark below the theorem: for k = 2, α_cross ≤ −H.
    noise, other = 0.3, 0.1

    assert theory.cross_similarity_bound(2, noise, other) == pytest.approx(
        -theory.intra_similarity_bound(noise, other)
    )


noises = st.floats(0, 0.95)


def noisy(rng, vector, noise):
    """Move a vector by exactly noise times its length, in a random direction."""
    direction = rng.normal(size=len(vector))
    return vector + noise * np.linalg.norm(vector) * direction / np.linalg.norm(direction)


@given(noises, noises, st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_no_two_clients_of_one_group_fall_below_the_bound(noise, other, dim, seed):
    rng = np.random.default_rng(seed)
    gradient = rng.normal(size=dim)
    clients = np.stack([noisy(rng, gradient, noise), noisy(rng, gradient, other)])
    assume(np.linalg.norm(clients, axis=1).min() > 1e-6)

    similarity = cosine_similarity(clients)[0, 1]

    assert similarity >= theory.intra_similarity_bound(noise, other) - 1e-9


def test_the_intra_bound_is_reached():
    # Both clients tangential to the noise circle, on opposite sides.
    noise = 0.6
    angle = np.arcsin(noise)
    reach = np.cos(angle)
    clients = reach * np.array([[np.cos(angle), np.sin(angle)], [np.cos(angle), -np.sin(angle)]])
    assert np.linalg.norm(clients - [1, 0], axis=1) == pytest.approx([noise, noise])

    assert cosine_similarity(clients)[0, 1] == pytest.approx(1 - 2 * noise**2)
    assert theory.intra_similarity_bound(noise, noise) == pytest.approx(1 - 2 * noise**2)


@given(st.integers(2, 7), st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_vectors_that_sum_to_zero_split_at_least_as_well_as_the_lemma_says(k, dim, seed):
    # Also for dim > 2, where the paper's proof is wrong.
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(k, dim))
    vectors[-1] = -vectors[:-1].sum(axis=0)

    split = bipartition(cosine_similarity(vectors))

    assert split.cross_similarity <= theory.true_cross_similarity_bound(k) + 1e-9


@given(st.integers(2, 5), st.integers(2, 5), st.floats(0, 0.999), st.integers(0, 2**32 - 1))
def test_below_the_guaranteed_noise_every_split_is_correct(k, dim, share, seed):
    rng = np.random.default_rng(seed)
    true_gradients = rng.normal(size=(k, dim))
    true_gradients[-1] = -true_gradients[:-1].sum(axis=0)
    noise = share * theory.guaranteed_noise(k)
    groups = [group for group in range(k) for _ in range(3)]
    clients = np.stack([noisy(rng, true_gradients[group], noise) for group in groups])

    similarity = cosine_similarity(clients)
    split = bipartition(similarity)

    left = {groups[row] for row in split.left_rows}
    assert left.isdisjoint(groups[row] for row in split.right_rows)
    bound = theory.cross_similarity_bound(k, noise, noise)
    assert split.cross_similarity <= bound + 1e-9


@given(st.floats(0, 0.99))
def test_the_tolerated_noise_inverts_the_worst_case(noise):
    assert theory.tolerated_noise(1 - 2 * noise**2) == pytest.approx(noise, abs=1e-8)


def test_the_typical_similarity_is_that_of_independent_noise():
    rng = np.random.default_rng(0)
    gradient = rng.normal(size=20_000)
    clients = np.stack([noisy(rng, gradient, 1.5) for _ in range(8)])

    similarity = cosine_similarity(clients)[np.triu_indices(8, 1)]

    assert similarity == pytest.approx(float(theory.typical_intra_similarity(1.5)), abs=0.03)


def share_of_positive_gaps(k, gamma, *, sums_to_zero):
    rng = np.random.default_rng(k)
    groups = np.repeat(np.arange(k), 3)
    gaps = []
    for _ in range(300):
        true_gradients = rng.normal(size=(k, 100))
        if sums_to_zero:
            true_gradients -= true_gradients.mean(axis=0)
        clients = np.stack([noisy(rng, true_gradients[group], gamma) for group in groups])
        gaps.append(separation_gap(cosine_similarity(clients), groups))
    return np.mean(np.array(gaps) > 0)


@pytest.mark.parametrize(
    ("k", "gamma", "reported"),
    [(5, 1.5, 0.98), (10, 1.25, 0.98), (20, 1.0, 1.0), (20, 1.25, 0.73)],
)
def test_at_a_stationary_point_groups_separate_far_beyond_the_guarantee(k, gamma, reported):
    share = share_of_positive_gaps(k, gamma, sums_to_zero=True)

    assert share == pytest.approx(reported, abs=0.08)
    assert gamma > 2 * theory.guaranteed_noise(k)


def test_gradients_that_do_not_sum_to_zero_separate_less():
    free = share_of_positive_gaps(5, 1.5, sums_to_zero=False)

    assert free < share_of_positive_gaps(5, 1.5, sums_to_zero=True) - 0.1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.guaranteed_noise(1), "num_groups is 1"),
        (lambda: theory.true_cross_similarity_bound(1), "num_groups is 1"),
        (lambda: theory.intra_similarity_bound(1.0, 0), "noise is 1.0"),
        (lambda: theory.tolerated_noise(1.5), "cross_similarity is 1.5"),
    ],
)
def test_values_outside_the_theorem_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
