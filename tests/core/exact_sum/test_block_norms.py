"""Lengths of updates: right, and the same bits however they are measured."""

import math
import sys

import numpy as np
import pytest

from core.made_updates import some_updates
from fedbranch.core.exact_sum import machine_code as module
from fedbranch.core.exact_sum.block_norms import extents
from fedbranch.core.geometry import norms


@pytest.mark.parametrize("dim", [1, 1000, 1024, 5000])
def test_lengths_are_right_and_the_strongest_block_bounds_the_largest_entry(dim):
    updates = some_updates(40, dim, spread=15)
    found = extents(updates)

    np.testing.assert_allclose(found.lengths, norms(updates), rtol=1e-6)
    largest = np.abs(updates).max(axis=1)
    assert (largest <= found.strongest * (1 + 1e-6)).all()
    assert (largest >= found.strongest / 32.1).all()


def test_lengths_of_rows_do_not_depend_on_other_rows():
    updates = some_updates(9, 5000)

    alone = np.concatenate([extents(row[None, :]).lengths for row in updates])

    assert alone.tobytes() == extents(updates).lengths.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_has_no_length(bad):
    updates = np.ones((2, 3000), np.float32)
    updates[1, 2999] = bad

    found = extents(updates)

    assert math.isfinite(found.lengths[0])
    assert math.isnan(found.lengths[1])


@pytest.mark.parametrize("lay", [np.asfortranarray, lambda a: np.repeat(a, 2, axis=1)[:, ::2]])
def test_lengths_do_not_depend_on_the_memory_layout(lay):
    updates = np.random.default_rng(0).normal(size=(50, 1500)).astype(np.float32)

    found, expected = extents(lay(updates)), extents(updates)

    assert found.lengths.tobytes() == expected.lengths.tobytes()
    assert found.strongest.tobytes() == expected.strongest.tobytes()


@pytest.mark.parametrize("dim", [1, 700, 1024, 5000])
def test_machine_code_measures_the_same_bits(machine_code, dim):
    updates = some_updates(40, dim, spread=25)
    updates[7, dim // 2], updates[8, 0], updates[9] = np.nan, np.inf, 0
    found = []
    for is_used in (True, False):
        machine_code(is_used)
        found.append([array.tobytes() for array in extents(updates)])

    assert found[0] == found[1]


def test_without_numba_numpy_does_it(monkeypatch):
    monkeypatch.setitem(sys.modules, module.MODULE, None)
    monkeypatch.setattr(module, "LEAST_NUMBERS", 0)
    module.machine_code.cache_clear()
    try:
        assert extents(np.float32([[3.0, 4.0]])).lengths.tolist() == [5.0]
        assert module.machine_code() is None
    finally:
        module.machine_code.cache_clear()
