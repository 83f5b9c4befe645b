"""The registry; tests/population/test_positions.py compares it with a dict."""

import numpy as np
import pytest

from fedbranch.population.registry import Registry
from population.crowds import ids_of, make_small


def test_an_id_in_two_runs_is_refused(monkeypatch):
    make_small(monkeypatch)
    registry = Registry()
    registry.add(ids_of(30))
    other = Registry()
    other.add([*ids_of(5)[4:], *(f"other-{i}" for i in range(29))])
    _, files, _ = registry.to_state()
    _, of_other, _ = other.to_state()
    (run,), (other_run,) = files.values(), of_other.values()

    twice = {"clients-0": run, "clients-30": other_run}
    with pytest.raises(ValueError, match="client 'client-0000004' is there twice"):
        Registry.from_state({"runs": [0, 30], "num_newest": 0}, twice, {})


def test_rows_are_numbered_anew_when_ids_are_dropped(monkeypatch):
    make_small(monkeypatch)
    registry = Registry()
    registry.add(ids_of(30))

    registry.drop_all_but(np.arange(1, 30, 3, dtype=np.int32))

    kept = ids_of(30)[1::3]
    assert registry.ids(np.arange(10)) == kept
    assert registry.rows(kept).tolist() == list(range(10))
    assert registry.row("client-0000000") == -1
    assert registry.num_renumberings == 1
