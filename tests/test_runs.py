import json

import pytest

from fedbranch import DamagedFile, NeverSplit, RoundRecord, RunFolder, Server, UnusableRun
from fedbranch.runs import Round, mean_by_metric, next_free_folder


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run", {"method": "cfl", "clients": []})


def entry(number, **evaluation):
    return Round(record=RoundRecord(round=number), evaluation=evaluation)


def test_the_history_is_what_was_appended(run):
    entries = [entry(1), entry(2, a={"accuracy": 0.5, "auc": None})]
    for item in entries:
        run.append(item)

    assert RunFolder(run.path).history() == entries
    assert run.final_evaluation() == {"a": {"accuracy": 0.5, "auc": None}}


def test_a_line_is_readable_by_any_tool(run):
    run.append(entry(1, a={"loss": 0.25}))

    line = json.loads((run.path / "history.jsonl").read_text())
    assert line["round"] == 1
    assert line["evaluation"] == {"a": {"loss": 0.25}}


def test_truncating_forgets_the_rounds_after(run):
    for number in range(1, 6):
        run.append(entry(number))

    run.truncate_history(3)

    assert [item.record.round for item in run.history()] == [1, 2, 3]
    with pytest.raises(DamagedFile, match="has 3 of the 4 rounds"):
        run.truncate_history(4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json\n", "line 1 cannot be read"),
        ("{}\n", "line 1 cannot be read"),
        ("null\n", "line 1 cannot be read"),
    ],
)
def test_a_damaged_history_is_named(run, text, message):
    (run.path / "history.jsonl").write_text(text)

    with pytest.raises(DamagedFile, match=message):
        run.history()


def test_a_missing_round_is_noticed(run):
    run.append(entry(1))
    run.append(entry(3))

    with pytest.raises(DamagedFile, match="line 2 is round 3"):
        run.history()


def test_a_half_written_last_line_does_not_count(run):
    run.append(entry(1))
    with (run.path / "history.jsonl").open("a") as file:
        file.write('{"round": 2')

    assert len(run.history()) == 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: None, UnusableRun, "not a run folder"),
        (lambda path: path.write_text("{"), DamagedFile, "cannot be read"),
        (lambda path: path.write_text("[]"), DamagedFile, "cannot be read"),
        (lambda path: path.write_text('{"schema": 9}'), UnusableRun, "schema 9"),
    ],
)
def test_what_is_not_a_run_folder_is_named(tmp_path, make, error, message):
    make(tmp_path / "run.json")

    with pytest.raises(error, match=message):
        RunFolder(tmp_path)


def test_a_taken_folder_is_not_used(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")

    with pytest.raises(UnusableRun, match="already holds something"):
        RunFolder.create(tmp_path, {})
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_a_run_is_complete_when_it_is_finished(run):
    assert not run.is_complete
    with pytest.raises(UnusableRun, match="fedbranch resume"):
        _ = run.summary

    run.finish({"rounds": 3})

    assert run.is_complete
    assert run.summary == {"rounds": 3}


def test_the_saved_tree_can_be_looked_at_without_the_rule(run):
    class Mine(NeverSplit):
        pass

    server = Server(3, rule=Mine())
    server.plan(["a"])
    assert not run.has_state
    run.save_server(server)

    assert run.has_state
    assert run.tree().client_ids == ["a"]


def test_baselines_are_found_inside(run):
    RunFolder.create(run.path / "baselines" / "fedavg", {"method": "fedavg"})

    assert list(run.baselines) == ["fedavg"]
    assert run.baselines["fedavg"].about["method"] == "fedavg"


def test_means_leave_out_what_is_missing():
    evaluation = {"a": {"accuracy": 0.5}, "b": {"accuracy": None, "loss": 2.0}, "c": {}}

    assert mean_by_metric(evaluation, ["a", "b", "c", "d"]) == {"accuracy": 0.5, "loss": 2.0}


def test_the_next_free_folder_counts_up(tmp_path):
    assert next_free_folder(tmp_path, "demo").name == "demo-1"
    (tmp_path / "demo-1").mkdir()
    assert next_free_folder(tmp_path, "demo").name == "demo-2"
