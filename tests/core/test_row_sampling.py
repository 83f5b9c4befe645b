import numpy as np
import pytest

from fedbranch.core.row_sampling import some_rows


def test_each_row_is_drawn_at_most_once_and_in_order():
    rows = some_rows(10_000, 500, 7)

    assert len(rows) == 500
    assert (np.diff(rows) > 0).all()
    assert rows[0] >= 0
    assert rows[-1] < 10_000


@pytest.mark.parametrize("num_rows", [0, 1, 99, 100])
def test_all_rows_are_returned_if_there_are_no_more_than_wanted(num_rows):
    assert some_rows(num_rows, 100).tolist() == list(range(num_rows))


@pytest.mark.parametrize("num_rows", [199, 9_999, 10_000, 99_981])
def test_no_pattern_in_the_order_of_rows_decides_the_sample(num_rows):
    # Every n-th row would be: with 100 of 199 rows, only the even ones.
    rows = some_rows(num_rows, 100)

    for num_groups in range(2, 12):
        counts = np.bincount(rows % num_groups, minlength=num_groups)
        expected = 100 / num_groups
        assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()
        assert counts.min() > 0


def test_another_draw_gives_other_rows():
    draws = {some_rows(1000, 10, *where).tobytes() for where in [(), (0, 1), (0, 2), (1, 1)]}

    assert len(draws) == 4
