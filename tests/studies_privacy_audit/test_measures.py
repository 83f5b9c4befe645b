"""How well an attack did: decibels, rates, intervals and words."""

import numpy as np
import pytest
from scipy.stats import beta

from studies.privacy_audit.measures import Measured, judge_hits, judge_images, psnr


def test_psnr_by_hand():
    # Errors of 0.1 and 0.3 have the mean square 0.05: -10 log10(0.05) = 13.0103.
    assert psnr(np.array([0.1, 0.7]), np.array([0.0, 1.0])) == pytest.approx(13.0103, abs=1e-4)
    assert psnr(np.array([2.0]), np.array([1.0])) == 120  # brighter than white is white


def test_guesses_of_a_batch_may_come_in_any_order():
    images = np.random.default_rng(0).random((3, 4, 64))

    measured = judge_images(images[:, ::-1], images, images.mean((0, 1)))

    assert (measured.value, measured.trials, measured.word) == (120, 12, "all")


def test_the_mean_image_is_chance():
    images = np.random.default_rng(0).random((30, 1, 64))
    mean = images.mean((0, 1))

    measured = judge_images(np.broadcast_to(mean, images.shape), images, mean)

    assert measured.word == "chance"
    assert measured.value == measured.chance


@pytest.mark.parametrize("hits", [0, 3, 50, 100])
def test_intervals_are_those_of_clopper_and_pearson(hits):
    measured = judge_hits(np.arange(100) < hits, chance=0.1)

    low = beta.ppf(0.005, hits, 101 - hits) if hits else 0
    high = beta.ppf(0.995, hits + 1, 100 - hits) if hits < 100 else 1
    assert (measured.low, measured.high) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("value", "low", "chance", "word"),
    [
        (1.0, 0.9, 0.1, "all"),
        (0.5, 0.4, 0.1, "leaks"),
        (0.15, 0.11, 0.1, "hints"),
        (0.15, 0.09, 0.1, "chance"),
        (0.9, 0.8, 0.6, "leaks"),
        (0.7, 0.65, 0.6, "hints"),
    ],
)
def test_words_for_rates(value, low, chance, word):
    measured = Measured(unit="rate", value=value, low=low, high=1, chance=chance, trials=9)

    assert measured.word == word
