"""A run folder of schema 2, as version 0.1 wrote it, stopped after round 20 of 24."""

import shutil
from pathlib import Path

import pytest

from fedbranch import RunFolder
from fedbranch.cli.commands import app
from fedbranch.report.facts.run import read_run
from tests.reliability.small_run import ROUNDS, play

SCHEMA_2 = Path(__file__).parent / "older_runs" / "schema-2"


@pytest.fixture
def older(tmp_path):
    return RunFolder(shutil.copytree(SCHEMA_2, tmp_path / "older"))


def test_the_positions_of_an_older_run_are_those_of_its_saved_tree(older):
    tree, number = older.saved_tree()

    history = older.history(number)

    positions = {i: tree.position(i) for i in tree.client_ids}
    run = read_run(older)
    assert (len(run.history), number) == (20, 18)
    assert history[-1].record.cluster_sizes == {
        leaf.id: len(tree.members(leaf.id)) for leaf in tree.leaves
    }
    assert {i: run.growth.positions[i] for i in positions if i != "c6"} == {
        i: node_id for i, node_id in positions.items() if i != "c6"
    }
    assert "c6" not in run.growth.positions  # it left in round 19
    assert [decision.round for decision in run.splits] == [
        node.split_in_round for node in tree if node.child_ids
    ]


def test_an_older_run_goes_on_to_the_same_result(older, tmp_path):
    play(older.path, resume=True)
    new = play(tmp_path / "new")

    again, fresh = read_run(RunFolder(older.path)), read_run(RunFolder(tmp_path / "new"))

    assert again.about["schema"] == 2
    assert len(again.history) == ROUNDS
    assert again.clusters == fresh.clusters == new.clusters
    for older_round, new_round in zip(again.history, fresh.history, strict=True):
        for name in ("children", "vanished", "joined", "left", "cluster_sizes"):
            assert getattr(older_round.record, name) == getattr(new_round.record, name)
    assert b'"moved"' in (older.path / "history.jsonl").read_bytes().splitlines()[-1]
    assert b'"moved"' not in (older.path / "history.jsonl").read_bytes().splitlines()[0]


def test_an_older_run_is_shown(capsys):
    with pytest.raises(SystemExit) as ended:
        app(["show", str(SCHEMA_2)])

    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "split in round" in printed
    assert "Not complete (20 of 24 rounds); continue with: fedbranch resume" in printed
