"""A run folder that is read while a run writes into it."""

import warnings

import pytest

from fedbranch.errors import DamagedFile, UsingPreviousState
from fedbranch.report.load import read
from report.folders import split_run


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    folder = split_run(tmp_path / "small")
    whole, outcomes = folder.saved_tree, [DamagedFile("it is missing"), UsingPreviousState("old")]

    def saved_tree():
        if outcomes:
            failure = outcomes.pop()
            if isinstance(failure, Warning):
                warnings.warn(failure, stacklevel=1)
            else:
                raise failure
        return whole()

    monkeypatch.setattr(folder, "saved_tree", saved_tree)

    reading = read(folder, pause_s=0)

    assert not outcomes
    assert reading.saved.round == 2
    assert len(reading.saved.tree) == 3
    assert reading.history == folder.history()


def test_damage_that_stays_is_our_own_error(tmp_path):
    folder = split_run(tmp_path / "small")
    (folder.path / "history.jsonl").write_bytes(b"{}\n")

    with pytest.raises(DamagedFile, match=r"history\.jsonl"):
        read(folder, pause_s=0)
