"""The attacks work where nothing is hidden: without that, "chance" would mean nothing."""

import numpy as np
import pytest

from studies.privacy_audit import candidates, inversion, known_clients, labels, zero_patterns
from studies.privacy_audit.victims import Network, split_digits
from studies.privacy_audit.views import seen_together

ORTHONORMAL = ["none", "permutation", "rotation", "signs"]


def test_without_a_transform_images_and_labels_come_back(scene, by_key):
    assert by_key["dense"].attempt(scene, "none").value >= 60
    assert by_key["signs"].attempt(scene, "none").value == 1
    assert by_key["signs-8"].attempt(scene, "none").value == 1
    assert by_key["matching"].attempt(scene, "none").value >= 25
    assert by_key["words"].attempt(scene, "none").value == 1


@pytest.mark.parametrize("key", ["dense", "signs", "values", "cosines", "words", "pairs-1"])
def test_one_colluding_client_ends_all_protection(scene, by_key, key):
    assert by_key[key].attempt(scene, "collusion").word == "all"


@pytest.mark.parametrize("key", ["cosines", "cosines-label"])
def test_secret_signs_alone_hide_nothing(scene, by_key, key):
    # This is why that transform is not shipped.
    assert by_key[key].attempt(scene, "signs").word == "all"
    assert by_key[key].attempt(scene, "rotation").word == "chance"


@pytest.mark.parametrize("key", ["dense", "signs", "values", "pixel-counts"])
def test_one_update_under_a_rotation_shows_neither_image_nor_label(scene, by_key, key):
    assert by_key[key].attempt(scene, "rotation").word == "chance"


@pytest.mark.parametrize("key", ["statistics", "values", "pixel-counts", "pixels", "known-texts"])
def test_the_values_of_a_permuted_update_leak(scene, by_key, key):
    assert by_key[key].attempt(scene, "permutation").word in {"leaks", "all"}


@pytest.mark.parametrize("key", ["norm", "norm-8", "angles", "angles-noise", "known-labels"])
@pytest.mark.parametrize("view", ORTHONORMAL)
def test_lengths_and_angles_identify_under_each_transform(scene, by_key, view, key):
    assert by_key[key].attempt(scene, view).value >= 0.8


def test_pairs_reveal_a_permutation_at_once_and_a_rotation_only_within_their_span():
    plain = np.random.default_rng(0).normal(size=(12, 60)).astype(np.float32)
    in_the_span = plain[:10].T @ np.arange(10, dtype=np.float32)
    plain = np.vstack([plain, in_the_span])
    for view, num_pairs, found in [("permutation", 1, True), ("rotation", 10, False)]:
        seen = seen_together(view, plain, seed=3)
        revealed = known_clients.revealed(seen[10:], seen[:num_pairs], plain[:num_pairs])
        errors = np.linalg.norm(revealed - plain[10:], axis=1) / np.linalg.norm(plain[10:], axis=1)
        assert (errors[:2] < 1e-4).all() == found
        assert errors[2] < 1e-4


def test_a_dense_layer_of_known_numbers_is_inverted():
    image = np.linspace(0, 1, 64, dtype=np.float32)
    deltas = np.linspace(-1, 1, 32, dtype=np.float32)
    update = np.concatenate([np.outer(deltas, image).ravel(), deltas, np.zeros(330, np.float32)])

    np.testing.assert_allclose(inversion.inverted(update[None])[0, 0], image, atol=1e-6)


def test_pixels_are_counted_from_values_in_any_order():
    held, _ = split_digits(0)
    gradients = Network.drawn(1).gradients_of(held[:3])
    shuffled = np.random.default_rng(0).permuted(gradients, axis=1)

    counted = candidates.pixel_counts(shuffled)

    for counts, image in zip(counted, held.images[:3], strict=True):
        true = np.bincount(np.rint(image * 16).astype(int), minlength=17)[1:]
        assert np.abs(counts - true).sum() <= 4  # a few values are near others by chance


def test_zero_groups_are_places_that_are_zero_together():
    used = np.array([[1, 1, 0, 0, 1], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1.0]])

    groups = zero_patterns.zero_groups(used, least=2)

    assert sorted(map(tuple, groups)) == [(0, 1), (2, 3)]  # the last is never zero


def test_statistics_do_not_depend_on_the_order():
    rows = np.random.default_rng(0).normal(size=(3, 500))
    shuffled = np.random.default_rng(1).permuted(rows, axis=1)

    np.testing.assert_allclose(labels.value_statistics(shuffled), labels.value_statistics(rows))
