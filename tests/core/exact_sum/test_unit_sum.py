"""Sums of one unit: exact beyond the whole numbers of float64."""

import numpy as np
import pytest

from fedbranch.core.exact_sum.unit_sum import CARRY, MOST_UNITS, UnitSum


def exact(unit_sum):
    low, high = unit_sum.carried()
    return [int(a) + int(CARRY) * int(b) for a, b in zip(low, high, strict=True)]


def test_a_sum_stays_exact_beyond_the_whole_numbers_of_float64():
    total, term, num_terms = UnitSum(2), np.array([2.0**51 + 1, -(2.0**51) - 3]), 1000
    for _ in range(num_terms):
        total.reserve(2.0**51 + 3)
        total.low += term

    assert exact(total) == [num_terms * (2**51 + 1), -num_terms * (2**51 + 3)]
    assert np.abs(total.low).max() <= CARRY / 2


def test_merged_sums_equal_one_sum():
    rng = np.random.default_rng(0)
    terms = rng.integers(-(2**50), 2**50, size=(40, 3)).astype(float)
    whole, parts = UnitSum(3), [UnitSum(3), UnitSum(3)]
    for number, term in enumerate(terms):
        for unit_sum in (whole, parts[number % 2]):
            unit_sum.reserve(2.0**50)
            unit_sum.low += term

    parts[0].merge(parts[1])

    assert exact(parts[0]) == exact(whole) == terms.astype(object).sum(axis=0).astype(int).tolist()


def test_released_units_can_be_reserved_again_without_a_carry():
    total = UnitSum(1)
    for _ in range(10):
        total.reserve(MOST_UNITS / 2)
        total.release(MOST_UNITS / 2)

    assert total.high is None


def test_more_units_than_an_accumulator_holds_are_an_error():
    with pytest.raises(AssertionError):
        UnitSum(1).reserve(MOST_UNITS)
