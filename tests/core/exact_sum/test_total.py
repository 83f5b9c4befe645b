"""Exact sums: the same bits in any order, and how little an update is rounded."""

import math
import threading
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.made_updates import some_updates
from fedbranch.core.exact_sum.block_norms import extents
from fedbranch.core.exact_sum.raw_updates import Differences
from fedbranch.core.exact_sum.total import ExactSum
from fedbranch.core.exact_sum.unit_sum import CARRY
from fedbranch.core.geometry import weighted_mean
from fedbranch.core.projection import Projection


def state_of(total):
    return {name: array.tobytes() for name, array in total.to_tensors().items()}


def exact_sum(updates, weights, column):
    terms = zip(updates[:, column].tolist(), np.asarray(weights).tolist(), strict=True)
    return sum((Fraction(x) * Fraction(w) for x, w in terms), Fraction(0))


# The same in any order


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 60), st.booleans(), st.booleans())
def test_order_and_batches_change_no_bit(seed, num, dim, is_whole, is_sketched):
    rng = np.random.default_rng(seed)
    updates = some_updates(num, dim, seed)
    weights = rng.integers(1, 2000, num) if is_whole else rng.uniform(0.01, 3000, num)
    projection = Projection(dim=dim, size=16) if is_sketched else None
    at_once, one_by_one = ExactSum(dim, projection), ExactSum(dim, projection)

    at_once.add(updates, weights)
    for row in rng.permutation(num):
        one_by_one.add(updates[row : row + 1], weights[row : row + 1])

    assert state_of(at_once) == state_of(one_by_one)
    assert at_once.total().tobytes() == one_by_one.total().tobytes()


def test_parts_of_several_threads_merge_to_the_same_bits():
    updates, weights = some_updates(120, 3000), np.random.default_rng(1).integers(1, 900, 120)
    alone = ExactSum(3000)
    alone.add(updates, weights)
    parts = [ExactSum(3000) for _ in range(3)]

    def add(number):
        for row in range(number, 120, 3):
            parts[number].add(updates[row : row + 1], weights[row : row + 1])

    threads = [threading.Thread(target=add, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    merged = ExactSum(3000)
    for part in reversed(parts):
        merged.merge(part)

    assert state_of(merged) == state_of(alone)


def test_many_large_terms_do_not_lose_what_is_small():
    # With this many terms, a single accumulator would have to round.
    dim, updates = 3, np.float32([[1.0, 1.0, 2.0**-30]])
    total = ExactSum(dim)
    for _ in range(40):
        total.add(np.repeat(updates, 8, axis=0), np.full(8, 1000.0))

    np.testing.assert_array_equal(total.total(), 40 * 8 * 1000 * updates[0].astype(np.float64))
    (tensors,) = total.to_tensors().values()
    assert np.abs(tensors[0]).max() <= CARRY / 2


@pytest.mark.parametrize("is_sketched", [False, True])
def test_a_sum_that_was_saved_goes_on_to_the_same_bits(is_sketched):
    updates, weights = some_updates(60, 500), np.random.default_rng(1).uniform(1, 9, 60)
    projection = Projection(dim=500, size=16) if is_sketched else None
    whole, first = ExactSum(500, projection), ExactSum(500, projection)
    whole.add(updates, weights)
    first.add(updates[:30], weights[:30])

    kept = {name: array.copy() for name, array in first.to_tensors("sum-").items()}
    again = ExactSum.from_tensors(kept, 500, projection, prefix="sum-")
    again.add(updates[30:], weights[30:])

    assert state_of(again) == state_of(whole)


def test_signs_of_a_projection_do_not_show():
    updates, weights = some_updates(50, 700), np.arange(1.0, 51.0)
    plain, sketching = ExactSum(700), ExactSum(700, Projection(dim=700, size=32, seed=4))

    plain.add(updates, weights)
    sketching.add(updates, weights)

    assert state_of(plain) == state_of(sketching)


# How little is rounded


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_every_update_is_rounded_by_less_than_its_largest_entry_shows(seed, whole):
    rng = np.random.default_rng(seed)
    updates = some_updates(30, 2500, seed)
    weights = rng.integers(1, 1000, 30) if whole else rng.uniform(1e-3, 1e5, 30)
    total = ExactSum(2500)

    total.add(updates, weights)

    found = total.total()
    allowed = sum(
        Fraction(float(np.abs(row).max())) * Fraction(float(weight)) / 2**32
        for row, weight in zip(updates, weights, strict=True)
    )
    for column in range(0, 2500, 7):
        exact = exact_sum(updates, weights, column)
        # Adding up the few units rounds once more, in float64.
        rounding = abs(exact) / 2**50 + allowed
        assert abs(Fraction(float(found[column])) - exact) <= rounding


def test_a_mean_equals_the_one_of_geometry_up_to_the_last_bit():
    updates, weights = some_updates(200, 2000, spread=0.5), np.arange(1.0, 201.0)
    total = ExactSum(2000)
    total.add(updates, weights)

    mean = total.total() / weights.sum()

    np.testing.assert_allclose(mean, weighted_mean(updates, weights), rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("value", [1e-38, 1e-30, 1e-20, 1.0, 1e20, 1e30])
@pytest.mark.parametrize("weight", [1.0, 0.3, 1e9])
def test_all_sizes_that_float32_has_can_be_added(value, weight):
    updates = np.float32([[value, -value / 2, 0.0]])
    total = ExactSum(3)

    total.add(updates, [weight])

    np.testing.assert_allclose(total.total(), updates[0].astype(np.float64) * weight, rtol=2**-31)


def test_an_empty_sum_is_zero():
    assert ExactSum(4).total().tolist() == [0.0] * 4
    assert ExactSum(4).to_tensors() == {}
    zero = ExactSum(4)
    zero.add(np.zeros((1, 4), np.float32), [1.0])
    assert zero.total().tolist() == [0.0] * 4


# Sketches and lengths on the way


@pytest.mark.parametrize("dim", [10, 500, 20_000])
@pytest.mark.parametrize("whole", [True, False])
def test_sketches_are_those_of_the_projection(dim, whole):
    updates = some_updates(21, dim)
    projection = Projection(dim=dim, size=64, seed=2)
    weights = np.full(21, 3.0 if whole else 3.5)

    sketches = ExactSum(dim, projection).add(updates, weights)

    assert sketches.tobytes() == projection.of(updates).tobytes()


# What is refused


def test_updates_and_weights_that_cannot_be_added_are_refused():
    total = ExactSum(3)
    with pytest.raises(ValueError, match=r"shape \(1, 2\) and dtype float32; add float32 of shape"):
        total.add(np.zeros((1, 2), np.float32), [1.0])
    with pytest.raises(ValueError, match="dtype float64"):
        total.add(np.zeros((1, 3)), [1.0])
    with pytest.raises(ValueError, match="2 weights for 1 updates"):
        total.add(np.zeros((1, 3), np.float32), [1.0, 2.0])
    with pytest.raises(ValueError, match="update 0 has weight nan"):
        total.add(np.ones((1, 3), np.float32), [math.nan])
    with pytest.raises(ValueError, match=r"update 0 has weight 1\.0 and a block of length nan"):
        total.add(np.float32([[1, np.nan, 1]]), [1.0])


def test_other_sums_are_not_merged():
    with pytest.raises(ValueError, match="a sum of 4 numbers"):
        ExactSum(3).merge(ExactSum(4))
    with pytest.raises(ValueError, match="must agree"):
        ExactSum(3, Projection(dim=4, size=16))


@pytest.mark.parametrize(
    "parts", [np.zeros((2, 4)), np.zeros((2, 3), np.float32), np.full((2, 3), 0.5)]
)
def test_damaged_sums_are_refused(parts):
    with pytest.raises(ValueError, match="the sum"):
        ExactSum.from_tensors({"unit-0040": parts}, 3)


@pytest.mark.parametrize("weight", [1e9, 1e-280, 1e-300, 1e-320])
def test_a_sum_of_any_weights_can_be_read_again(weight):
    exact = ExactSum(2)
    exact.add(np.float32([[1e-3, -2e-20]]), [weight])

    again = ExactSum.from_tensors(exact.to_tensors(), 2)

    assert again.total().tobytes() == exact.total().tobytes()


@pytest.mark.parametrize("seed", range(5))
def test_sketches_are_those_of_the_projection_also_of_very_different_numbers(seed):
    rng = np.random.default_rng(seed)
    projection = Projection(dim=40, size=32, seed=seed)
    updates = rng.normal(size=(3, 40)) * 10.0 ** rng.uniform(-37, 29, (3, 40))
    updates = updates.astype(np.float32)

    sketches = ExactSum(40, projection).add(updates, [1.0, 1.0, 1.0])

    assert sketches.tobytes() == projection.of(updates).tobytes()


# In machine code


@pytest.mark.parametrize("dim", [1, 15, 1023, 1024, 1025, 5000, 40_001])
@pytest.mark.parametrize("size", [None, 16, 700])
def test_machine_code_gives_the_same_bits(machine_code, dim, size):
    rng = np.random.default_rng(dim)
    updates = some_updates(21, dim, spread=0.6)
    weights = rng.integers(1, 1000, 21).astype(float)
    weights[3] = 2.5
    projection = None if size is None else Projection(dim=dim, size=size, seed=3)
    found = []
    for is_used in (True, False):
        machine_code(is_used)
        total = ExactSum(dim, projection)
        sketches = total.add(updates, weights)
        found.append((state_of(total), None if sketches is None else sketches.tobytes()))

    assert found[0] == found[1]


def test_machine_code_takes_read_only_arrays(machine_code):
    machine_code(True)
    updates = some_updates(10, 3000)
    plain, locked = ExactSum(3000), ExactSum(3000)
    plain.add(updates, np.ones(10))
    updates.flags.writeable = False

    locked.add(updates, np.ones(10))

    assert state_of(plain) == state_of(locked)


def test_updates_that_are_not_contiguous_give_the_same_bits(machine_code):
    machine_code(True)
    updates = some_updates(10, 3000)
    apart = np.zeros((10, 6000), np.float32)[:, ::2]
    apart[:] = updates
    plain, other = ExactSum(3000), ExactSum(3000)

    plain.add(updates, np.ones(10))
    other.add(apart, np.ones(10))

    assert state_of(plain) == state_of(other)


# Raw updates


def raw(updates, lengths, before):
    """Make replies of updates and cut them into pieces with a few bytes before each.

    Return the raw updates and the updates, which are rounded by this.
    """
    came_back = before + updates
    ends = np.cumsum(lengths)
    pieces = [
        b"head" + vector[end - length : end].tobytes()
        for vector in came_back
        for length, end in zip(lengths, ends, strict=True)
    ]
    return Differences(pieces, [4] * len(lengths), lengths, before), came_back - before


@pytest.mark.parametrize(
    ("lengths", "size"),
    [([7, 0, 293], 400), ([1025], 1024), ([0, 1000, 1, 3999], 16), ([13, 40_000, 29_988], 64)],
)
def test_raw_updates_give_the_same_bits_as_written_ones(machine_code, lengths, size):
    machine_code(True)
    dim, num = sum(lengths), 21
    rng = np.random.default_rng(dim)
    before = rng.normal(size=dim).astype(np.float32)
    sizes = 0.01 * 4.0 ** rng.integers(-2, 3, size=(num, 1))  # of several units
    odd = {9: np.nan, 10: np.inf, 11: -np.inf}
    updates = (sizes * rng.normal(size=(num, dim))).astype(np.float32)
    updates[5] = 0
    for row, number in odd.items():
        updates[row, dim // 2] = number
    there, updates = raw(updates, lengths, before)
    weights = rng.integers(1, 1000, num).astype(float)
    weights[2] = 0
    longest = float(np.sort(extents(updates).lengths)[-4])  # NaN are the last ones
    projection = Projection(dim=dim, size=size)
    whole, plain = ExactSum(dim, projection), ExactSum(dim, projection)

    found = plain.add_plain(there, weights, longest * 1.01)
    rows = np.flatnonzero(found.is_added)
    sketches = whole.add(updates[rows], weights[rows])

    assert sorted({2, 5, *odd}) == np.flatnonzero(~found.is_added).tolist()
    assert state_of(plain) == state_of(whole)
    assert found.sketches[rows].tobytes() == sketches.tobytes()
    assert found.lengths[rows].tobytes() == extents(updates).lengths[rows].tobytes()


def test_an_entry_that_is_longer_than_its_block_leaves_no_accumulator_too_small():
    # Rounding makes an entry longer than its block by 3e-8.
    update = np.float32([[0.70809627]])
    weights = np.full(8192, 22.595798406193353)
    weights[-1] = 22.595798406176254
    whole, merged = ExactSum(1), ExactSum(1)

    whole.add(np.repeat(update, 8192, axis=0), weights)
    for start in range(0, 8192, 1000):
        part = ExactSum(1)
        some = weights[start : start + 1000]
        part.add(np.repeat(update, len(some), axis=0), some)
        part.to_tensors()
        merged.merge(part)

    assert state_of(whole) == state_of(merged)


def test_raw_updates_have_the_same_lengths_as_written_ones(machine_code):
    machine_code(True)
    lengths = [0, 700, 1, 2500, 0, 4096, 3]
    updates, before = some_updates(9, sum(lengths), spread=2.0), np.zeros(7300, np.float32)
    updates[3, 5000] = np.nan
    there, updates = raw(updates, lengths, before)

    measured = there.squares

    np.testing.assert_array_equal(np.sqrt(measured.sum(axis=1)), extents(updates).lengths)
    np.testing.assert_array_equal(np.sqrt(measured.max(axis=1)), extents(updates).strongest)


def test_raw_updates_that_are_too_long_are_not_added(machine_code):
    machine_code(True)
    updates, before = some_updates(12, 3000, spread=0.3), np.zeros(3000, np.float32)
    there, updates = raw(updates, [3000], before)
    lengths = extents(updates).lengths
    longest = float(np.median(lengths))

    found = ExactSum(3000, Projection(dim=3000, size=16)).add_plain(there, np.ones(12), longest)

    assert found.is_added.tolist() == (lengths < longest).tolist()


def test_sums_of_many_raw_updates_carry(machine_code):
    machine_code(True)
    dim = 5
    updates = np.float32([[15.99, -15.99, 1e-4, 3, 0]])  # nearly the next unit
    there, updates = raw(np.repeat(updates, 32, axis=0), [dim], np.zeros(dim, np.float32))
    total = ExactSum(dim, Projection(dim=dim, size=16))
    for _ in range(50):
        assert total.add_plain(there, np.full(32, 1000.0)).is_added.all()

    exact = 50 * 32 * 1000 * updates[0].astype(np.float64)
    np.testing.assert_allclose(total.total(), exact, rtol=0, atol=50 * 32 * 1000 * 2.0**-33)
    (tensors,) = total.to_tensors().values()
    assert np.abs(tensors[0]).max() <= CARRY / 2
    whole = ExactSum(dim, total.projection)
    for _ in range(50):
        whole.add(updates, np.full(32, 1000.0))
    assert state_of(whole) == state_of(total)
