"""Memory for updates: used again, but never while something refers to it."""

import numpy as np

import fedbranch as fb
from fedbranch.flower.row_memory import RowMemory
from flower.federations import (
    make_grid,
    start,
)


def test_updates_that_a_rule_holds_on_to_are_not_written_over():
    kept = []

    class Keeping:
        def examine(self, evidence):
            kept.append((evidence.updates, evidence.updates.copy()))
            return fb.NeverSplit().examine(evidence)

    start(make_grid(), num_rounds=4, rule=Keeping())

    assert len(kept) == 4
    for updates, copied in kept:
        np.testing.assert_array_equal(updates, copied)


def test_memory_is_used_again_as_soon_as_nothing_refers_to_it():
    memory = RowMemory()
    rows = memory.rows(8, 3)
    address = rows.ctypes.data
    del rows

    rows = memory.rows(5, 3)

    assert rows.ctypes.data == address
    assert rows.shape == (5, 3)


def test_memory_in_use_is_not_handed_out():
    memory = RowMemory()
    first = memory.rows(4, 3)
    view = first[1:2]
    del first

    assert not np.shares_memory(memory.rows(4, 3), view)


def test_a_small_matrix_does_not_replace_a_large_one_in_use():
    memory = RowMemory()
    large = memory.rows(100, 3)
    address = large.ctypes.data

    small = memory.rows(2, 3)
    assert not np.shares_memory(small, large)
    del large

    assert memory.rows(100, 3).ctypes.data == address


def test_rows_of_another_length_or_number_are_new():
    memory = RowMemory()
    memory.rows(4, 3)

    assert memory.rows(4, 5).shape == (4, 5)
    assert memory.rows(9, 5).shape == (9, 5)


def test_a_rule_sees_the_updates_of_a_cluster_uncopied_in_the_same_memory_each_round():
    addresses = []

    class Watching:
        def examine(self, evidence):
            addresses.append(evidence.updates.ctypes.data)
            return fb.NeverSplit().examine(evidence)

    start(make_grid(), num_rounds=4, rule=Watching())

    assert len(set(addresses)) == 1
