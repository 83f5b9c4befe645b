"""Noise for each client: what is sent, and which privacy it gives."""

import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import kstest, norm

from fedbranch import Update
from fedbranch.privacy import Noise
from fedbranch.privacy.noise import _secure_normal


def vector(size=1000, length=1.0, seed=0):
    drawn = np.random.default_rng(seed).normal(size=size)
    return (length * drawn / np.linalg.norm(drawn)).astype(np.float32)


def sent(noise, update, seed=0):
    return noise.applied(update, np.random.default_rng(seed))


# What is sent


@pytest.mark.parametrize(("length", "expected"), [(0.5, 0.5), (2.0, 2.0), (6.0, 2.0)])
def test_long_updates_are_shortened_and_others_left(length, expected):
    clipped = sent(Noise(clip=2.0, multiplier=0.0), Update(vector(length=length), 1)).vector

    np.testing.assert_allclose(clipped, vector(length=expected), rtol=1e-6)
    assert clipped.dtype == np.float32


@given(
    numbers=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=5),
    clip=st.floats(1e-3, 1e3),
)
def test_no_update_stays_longer_than_the_clip(numbers, clip):
    clipped = sent(Noise(clip=clip, multiplier=0.0), Update(np.float32(numbers), 1)).vector

    assert np.linalg.norm(clipped.astype(np.float64)) <= clip * (1 + 1e-6)


@pytest.mark.parametrize("rng", [np.random.default_rng(0), None], ids=["given", "from the system"])
def test_the_noise_is_normal_with_the_stated_deviation(rng):
    update = vector(size=100_000, length=5.0)

    noisy = Noise(clip=2.0, multiplier=0.7).applied(Update(update, 1), rng).vector

    drawn = (noisy - 0.4 * update) / 1.4
    # Without a seed it may fail once in a million times.
    assert kstest(drawn, norm.cdf).pvalue > 1e-6


def test_numbers_from_the_system_are_never_the_same():
    assert not set(_secure_normal(1000)) & set(_secure_normal(1000))


def test_the_same_generator_gives_the_same_noise():
    noise, update = Noise(clip=1.0, multiplier=1.0), Update(vector(), 1)

    np.testing.assert_array_equal(sent(noise, update, 3).vector, sent(noise, update, 3).vector)
    assert (sent(noise, update, 3).vector != sent(noise, update, 4).vector).all()


def on_halves(first, second):
    return Update((first + second) / 2, 10, half_difference=(first - second) / 2)


def test_the_updates_of_both_halves_are_clipped_each_by_itself():
    first, second = vector(length=8.0, seed=1), vector(length=1.0, seed=2)

    reply = sent(Noise(clip=2.0, multiplier=0.0), on_halves(first, second))

    np.testing.assert_allclose(reply.vector + reply.half_difference, first / 4, atol=1e-6)
    np.testing.assert_allclose(reply.vector - reply.half_difference, second, atol=1e-6)


def test_the_updates_of_both_halves_get_noise_of_their_own():
    first, second = vector(size=50_000, seed=1), vector(size=50_000, seed=2)

    reply = sent(Noise(clip=2.0, multiplier=0.5), on_halves(first, second))

    of_first = reply.vector + reply.half_difference - first
    of_second = reply.vector - reply.half_difference - second
    assert np.std(of_first) == pytest.approx(1.0, rel=0.02)
    assert np.std(of_second) == pytest.approx(1.0, rel=0.02)
    assert abs(np.corrcoef(of_first, of_second)[0, 1]) < 0.02  # more than four deviations


def test_metrics_and_buffers_are_not_sent():
    update = Update(vector(), 20, metrics={"loss": 0.3}, base="3.1", buffers=np.zeros(0))

    reply = sent(Noise(clip=1.0, multiplier=1.0), update)

    assert reply.metrics == {}
    assert reply.buffers is None
    assert (reply.num_examples, reply.base) == (20, "3.1")
    assert update.metrics == {"loss": 0.3}  # the client's own update is unchanged


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"buffers": np.zeros(4, np.float32)}, "has 4 buffers.*GroupNorm"),
        ({"signal": np.ones(1000, np.float32)}, "send_gradient=False"),
    ],
)
def test_buffers_and_signals_are_refused(extra, message):
    with pytest.raises(ValueError, match=message):
        sent(Noise(clip=1.0, multiplier=1.0), replace(Update(vector(), 1), **extra))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_that_training_diverged_is_not_seen_from_outside(value):
    broken = vector()
    broken[7] = value
    noise = Noise(clip=1.0, multiplier=1.0)

    with pytest.warns(RuntimeWarning, match="counts as zero; lower the learning rate"):
        reply = sent(noise, Update(broken, 1))

    np.testing.assert_array_equal(
        reply.vector, sent(noise, Update(np.zeros(1000, np.float32), 1)).vector
    )


def test_one_half_that_diverged_counts_as_zero_too():
    first, second = vector(seed=1), np.full(1000, np.inf, np.float32)

    with pytest.warns(RuntimeWarning, match="counts as zero"):
        reply = sent(
            Noise(clip=1.0, multiplier=1.0),
            Update(first + second, 1, half_difference=first - second),
        )

    assert np.isfinite(reply.vector).all()
    assert np.isfinite(reply.half_difference).all()


# The privacy it gives


def delta_of(deviation, epsilon):
    """The formula of Balle and Wang (2018), for sensitivity 1."""
    return norm.cdf(0.5 / deviation - epsilon * deviation) - math.exp(epsilon) * norm.cdf(
        -0.5 / deviation - epsilon * deviation
    )


@pytest.mark.parametrize("num_releases", [1, 7, 40])
@pytest.mark.parametrize("multiplier", [2.0, 8.0, 30.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_epsilon_is_that_of_the_exact_formula(multiplier, num_releases, delta):
    epsilon = Noise(clip=0.3, multiplier=multiplier).epsilon(num_releases, delta)

    # One release with less noise, at a sensitivity of twice the clip.
    assert delta_of(multiplier / 2 / math.sqrt(num_releases), epsilon) == pytest.approx(
        delta, rel=1e-6
    )


@pytest.mark.parametrize(("multiplier", "num_releases"), [(4.0, 1), (6.0, 10), (20.0, 30)])
def test_epsilon_is_that_of_an_accountant_that_composes_numerically(multiplier, num_releases):
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(multiplier / 2), num_releases)

    assert Noise(clip=1.0, multiplier=multiplier).epsilon(num_releases, 1e-5) == pytest.approx(
        accountant.get_epsilon(1e-5), rel=1e-3
    )


def test_epsilon_covers_the_two_updates_that_differ_most():
    # Opposite ends of the ball: how much more likely one makes what is sent, integrated.
    noise = Noise(clip=1.5, multiplier=2.5)
    epsilon = noise.epsilon(1, 1e-3)
    ends = [
        sent(replace(noise, multiplier=0.0), Update(np.float32([end]), 1)).vector[0]
        for end in (9.0, -9.0)
    ]
    one, other = (norm(end, 2.5 * 1.5).pdf for end in ends)

    excess, _ = quad(lambda x: max(0.0, one(x) - math.exp(epsilon) * other(x)), -40, 40, limit=500)

    assert excess == pytest.approx(1e-3, rel=1e-4)


def test_a_reply_on_halves_counts_twice():
    assert Noise.num_releases(Update(vector(), 1)) == 1
    assert Noise.num_releases(on_halves(vector(), vector(seed=1))) == 2


@given(multiplier=st.floats(0.01, 50), num_releases=st.integers(1, 500), clip=st.floats(1e-3, 1e3))
def test_more_noise_or_fewer_releases_protect_better(multiplier, num_releases, clip):
    noise = Noise(clip=clip, multiplier=multiplier)
    epsilon = noise.epsilon(num_releases, 1e-5)

    assert Noise(clip=clip, multiplier=1.1 * multiplier).epsilon(num_releases, 1e-5) < epsilon
    assert noise.epsilon(num_releases + 1, 1e-5) > epsilon
    assert Noise(clip=2 * clip, multiplier=multiplier).epsilon(num_releases, 1e-5) == epsilon


def test_nothing_sent_tells_nothing_and_no_noise_protects_nothing():
    assert Noise(clip=1.0, multiplier=1.0).epsilon(0, 1e-5) == 0
    assert Noise(clip=1.0, multiplier=0.0).epsilon(1, 1e-5) == math.inf


@pytest.mark.parametrize("epsilon", [0.5, 4.0, 200.0])
def test_noise_for_an_epsilon_has_that_epsilon(epsilon):
    noise = Noise.for_epsilon(epsilon, delta=1e-6, num_releases=25, clip=0.1)

    assert noise.clip == 0.1
    assert noise.epsilon(25, 1e-6) == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Noise(clip=0.0, multiplier=1.0), r"clip is 0\.0"),
        (lambda: Noise(clip=math.inf, multiplier=1.0), "clip is inf"),
        (lambda: Noise(clip=1.0, multiplier=-1.0), r"multiplier is -1\.0"),
        (lambda: Noise(clip=1.0, multiplier=math.nan), "multiplier is nan"),
        (lambda: Noise(clip=1.0, multiplier=1.0).epsilon(-1, 1e-5), "num_releases is -1"),
        (lambda: Noise(clip=1.0, multiplier=1.0).epsilon(1, 0.0), r"delta is 0\.0"),
        (
            lambda: Noise.for_epsilon(0.0, delta=1e-5, num_releases=1, clip=1.0),
            r"epsilon is 0\.0",
        ),
        (
            lambda: Noise.for_epsilon(1.0, delta=2.0, num_releases=1, clip=1.0),
            r"delta is 2\.0",
        ),
        (
            lambda: Noise.for_epsilon(1.0, delta=1e-5, num_releases=0, clip=1.0),
            "num_releases is 0",
        ),
    ],
)
def test_senseless_settings_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
