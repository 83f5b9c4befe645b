"""A column of numbers; tests/population/test_positions.py compares it with a dict."""

import numpy as np
import pytest

from fedbranch.population.int_column import IntColumn
from population.crowds import make_small


def test_a_base_that_is_written_too_late_is_an_error_and_not_wrong(monkeypatch):
    make_small(monkeypatch)
    column = IntColumn(0)
    column.grow(20)
    column.set_many(np.arange(20, dtype=np.int32), 7)
    base, _ = column.to_state()
    column.set(3, 8)
    assert base["numbers"].tolist() == [7] * 20

    column.set_many(np.arange(20, dtype=np.int32), 9)

    with pytest.raises(AssertionError, match="changed before it was written"):
        base["numbers"]
