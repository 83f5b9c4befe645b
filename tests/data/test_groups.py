import numpy as np
import pytest

from fedbranch.data import (
    AddNoise,
    Relabel,
    Rotate,
    feature_noise,
    label_permutations,
    label_swaps,
    rotations,
)

RNG = np.random.default_rng(0)
IMAGES = RNG.uniform(size=(5, 1, 8, 8)).astype(np.float32)
LABELS = np.arange(5)


def test_relabelling_by_hand():
    x, y = Relabel((0, 2, 1, 3, 4))(IMAGES, LABELS, RNG)

    assert y.tolist() == [0, 2, 1, 3, 4]
    assert x is IMAGES


@pytest.mark.parametrize("num_groups", [1, 2, 4, 5, 6, 45])
def test_every_group_swaps_two_labels_of_its_own(num_groups):
    swaps = [transform.new_labels for transform in label_swaps(num_groups, seed=3)]

    assert len(set(swaps)) == num_groups
    for new_labels in swaps:
        moved = [label for label in range(10) if new_labels[label] != label]
        assert len(moved) == 2
        assert [new_labels[label] for label in moved] == moved[::-1]


def test_up_to_five_swaps_of_ten_labels_are_disjoint():
    swaps = [transform.new_labels for transform in label_swaps(5, seed=1)]

    moved = [label for swap in swaps for label in range(10) if swap[label] != label]
    assert sorted(moved) == list(range(10))


def test_permutations_differ_and_are_permutations():
    found = [t.new_labels for t in label_permutations(6, num_classes=3, seed=0)]

    assert len(set(found)) == 6
    assert all(sorted(permutation) == [0, 1, 2] for permutation in found)


def test_the_seed_decides():
    assert label_swaps(4, seed=1) == label_swaps(4, seed=1) != label_swaps(4, seed=2)
    assert label_permutations(4, seed=1) == label_permutations(4, seed=1)


def test_quarter_turns_are_exact():
    for quarters in range(5):
        turned, _ = Rotate(90 * quarters)(IMAGES, LABELS, RNG)
        assert np.array_equal(turned, np.rot90(IMAGES, quarters, axes=(2, 3)))


def test_other_angles_turn_the_same_way():
    # A pixel right of the centre moves up when turned counter-clockwise.
    image = np.zeros((1, 1, 9, 9), dtype=np.float32)
    image[0, 0, 4, 7] = 1

    turned, _ = Rotate(45)(image, LABELS[:1], RNG)

    row, column = np.unravel_index(turned[0, 0].argmax(), (9, 9))
    assert (row, column) == (2, 6)
    assert turned.dtype == np.float32


def test_rotations_are_evenly_spaced():
    assert [transform.degrees for transform in rotations(4)] == [0, 90, 180, 270]


def test_noise_grows_from_group_to_group_and_follows_the_generator():
    levels = [t.standard_deviation for t in feature_noise(3, standard_deviation=0.3)]
    assert levels == pytest.approx([0.1, 0.2, 0.3])

    noisy = [AddNoise(0.5)(IMAGES, LABELS, np.random.default_rng(s))[0] for s in (1, 1, 2)]
    assert np.array_equal(noisy[0], noisy[1])
    assert not np.array_equal(noisy[0], noisy[2])
    assert (noisy[0] - IMAGES).std() == pytest.approx(0.5, rel=0.2)
    assert noisy[0].dtype == np.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: label_swaps(4, num_classes=3, seed=0), "3 labels have 3 pairs"),
        (lambda: label_permutations(7, num_classes=3, seed=0), "7 different permutations"),
        (lambda: label_permutations(2, num_classes=1, seed=0), "num_classes 1"),
        (lambda: rotations(0), "num_groups is 0"),
        (lambda: Relabel((1, 0))(IMAGES, np.array([0, -1]), RNG), "labels run from -1 to 0"),
        (lambda: Relabel((1, 0))(IMAGES, np.array([0, 2]), RNG), "labels run from 0 to 2"),
        (lambda: AddNoise(1.0)(np.zeros((2, 2), np.uint8), LABELS, RNG), "x is uint8"),
        (lambda: Rotate(90)(np.zeros((3, 4)), LABELS, RNG), r"shape \(3, 4\)"),
    ],
)
def test_impossible_structures_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
