"""Units of updates."""

import numpy as np
import pytest

from fedbranch.core.exact_sum import (
    CLASS_WIDTH,
    NO_UNIT,
    UNIT_BITS,
    most_units,
    plain_units_of,
    units_of,
    usual_unit,
)


@pytest.mark.parametrize("length", [1e-30, 0.9, 1.0, 15.99, 16.0, 1e20])
def test_a_unit_is_between_36_and_40_powers_of_two_below_the_strongest_block(length):
    (unit,) = units_of(np.array([length])).tolist()

    assert length < 2.0 ** (unit + UNIT_BITS) <= length * 2.0**CLASS_WIDTH
    assert unit % CLASS_WIDTH == 0


def test_updates_of_unusual_size_have_no_plain_unit():
    lengths = np.array([0.0, 1e-13, 1e-3, 1.0, 1e19, np.inf, np.nan])

    units = plain_units_of(lengths)

    assert (units == NO_UNIT).tolist() == [True, True, False, False, True, True, True]


def test_the_usual_unit_is_the_most_frequent_one():
    assert usual_unit(np.array([-40, -36, -40, -44], np.int32)) == -40


def test_no_entry_times_its_weight_has_more_units_than_the_bound():
    rng = np.random.default_rng(0)
    updates, weights = rng.normal(size=(20, 50)), rng.uniform(0, 9, 20)
    lengths = np.linalg.norm(updates, axis=1)

    units = np.abs(updates * weights[:, None]).max(axis=1) / 2.0**-30

    assert (units <= most_units(weights, lengths, -30)).all()
