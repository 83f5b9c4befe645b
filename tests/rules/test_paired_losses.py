"""Gains of clients by hand, and the signed-rank test by brute force."""

import itertools
import math

import numpy as np
import pytest

from fedbranch.rules.paired_losses import LARGEST_LOSS, gain, mean_gains, p_value, pairs


def test_a_gain_is_the_loss_together_minus_the_loss_apart():
    assert gain(1.0, 0.25) == 0.75


@pytest.mark.parametrize("diverged", [math.nan, math.inf, -math.inf, 1e300])
def test_a_diverged_model_has_the_largest_loss(diverged):
    assert gain(1.0, diverged) == 1.0 - LARGEST_LOSS
    assert gain(diverged, 1.0) == LARGEST_LOSS - 1.0
    assert gain(diverged, diverged) == 0


def test_a_loss_beyond_the_smallest_counts_as_that_one():
    assert gain(-1e300, 0.0) == -LARGEST_LOSS


def test_losses_come_in_pairs_and_gains_are_their_mean():
    losses = (4.0, 1.0, 2.0, 1.0)

    assert pairs(losses) == [(4.0, 1.0), (2.0, 1.0)]
    assert mean_gains({"a": losses, "b": (1.0, 2.0)}) == {"a": 2.0, "b": -1.0}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("alternative", ["greater", "less"])
def test_the_p_value_is_the_share_of_sign_patterns_at_least_as_extreme(seed, alternative):
    gains = np.random.default_rng(seed).normal(0.3, 1, size=8)
    ranks = np.abs(gains).argsort().argsort() + 1
    seen = ranks[gains > 0].sum()
    sums = [
        ranks[list(signs)].sum()
        for signs in map(np.array, itertools.product([False, True], repeat=8))
    ]

    extreme = [total >= seen if alternative == "greater" else total <= seen for total in sums]

    assert p_value(gains.tolist(), alternative) == pytest.approx(np.mean(extreme))


def test_gains_of_zero_show_nothing():
    assert p_value([0.0, 0.0, 0.0], "greater") == p_value([], "less") == 1.0
