import json
import os

import pytest

from fedbranch import DamagedFile, NeverSplit, RoundRecord, RunFolder, Server, UnusableRun
from fedbranch.errors import CannotWrite, UsingPreviousState
from fedbranch.runs import Round, mean_by_metric, next_free_folder
from fedbranch.storage.sealed_json import seal


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run", {"method": "cfl", "clients": []})


def entry(number, **evaluation):
    return Round(record=RoundRecord(round=number), evaluation=evaluation)


def line(**changes):
    return seal({**Round(record=RoundRecord(round=1)).to_json(), **changes}).decode()


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
        ("\xff\n", "line 1 cannot be read"),
        ("[" * 100_000 + "\n", "line 1 cannot be read"),
        (line(refused=5), "line 1 cannot be read"),
        (line(evaluation={"a": 5}), "line 1 cannot be read"),
        (
            line() + line(round=2).replace("refused", "refusee"),
            "line 2 cannot be read.*was changed",
        ),
    ],
)
def test_a_damaged_history_is_named(run, text, message):
    (run.path / "history.jsonl").write_text(text, encoding="latin-1")

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


def write_run(path, **about):
    path.write_bytes(seal({"kind": "run", **about}))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: None, UnusableRun, "not a run folder"),
        (lambda path: path.write_text("{"), DamagedFile, "cannot be read"),
        (lambda path: path.write_text("[]"), DamagedFile, "cannot be read"),
        (lambda path: write_run(path, schema=9), UnusableRun, "schema 9.*reads 2 and 3"),
        (lambda path: write_run(path, schema=3, method="x"), DamagedFile, "clients"),
        (lambda path: write_run(path, schema=3, kind="summary"), DamagedFile, "another file"),
        (lambda path: path.write_text("[" * 100_000), DamagedFile, "cannot be read"),
    ],
)
def test_what_is_not_a_run_folder_is_named(tmp_path, make, error, message):
    make(tmp_path / "run.json")

    with pytest.raises(error, match=message):
        RunFolder(tmp_path)


def test_what_a_crash_left_before_the_run_began_is_no_obstacle(tmp_path):
    (tmp_path / "run.json.tmp").write_text("{")

    run = RunFolder.create(tmp_path, {"method": "cfl", "clients": []})

    assert run.history() == []


def test_leftovers_are_cleared_away_and_nothing_else(run):
    server = Server(3, rule=NeverSplit())
    run.save_server(server)
    for name in (
        "history.jsonl.tmp",
        "state/state.json.tmp",
        f"state/leaves-{'0' * 16}.safetensors",
    ):
        (run.path / name).write_text("")
    (run.path / "notes.tmp").write_text("mine")

    run.clear_leftovers()

    names = {str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file()}
    kept = {name for name in names if not name.startswith("state/leaves-")}
    assert kept == {"run.json", "notes.tmp", "state/state.json"}
    assert len(names - kept) == 1
    assert run.tree().num_params == 3


def test_a_run_without_a_saved_server_says_how_to_go_on(run):
    with pytest.raises(UnusableRun, match="has saved nothing yet; continue with"):
        run.tree()


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
    RunFolder.create(run.path / "baselines" / "fedavg", {"method": "fedavg", "clients": []})

    assert list(run.baselines) == ["fedavg"]
    assert run.baselines["fedavg"].about["method"] == "fedavg"


def test_means_leave_out_what_is_missing():
    evaluation = {"a": {"accuracy": 0.5}, "b": {"accuracy": None, "loss": 2.0}, "c": {}}

    assert mean_by_metric(evaluation, ["a", "b", "c", "d"]) == {"accuracy": 0.5, "loss": 2.0}


def test_the_next_free_folder_counts_up(tmp_path):
    assert next_free_folder(tmp_path, "demo").name == "demo-1"
    (tmp_path / "demo-1").mkdir()
    assert next_free_folder(tmp_path, "demo").name == "demo-2"


def test_what_people_call_the_clients_is_kept(run):
    run.save_names({"key-1": "hospital A"})

    assert RunFolder(run.path).names == {"key-1": "hospital A"}
    (run.path / "names.json").write_text("[]")
    with pytest.raises(DamagedFile, match=r"names\.json cannot be read"):
        run.names  # noqa: B018 -- reading it is the test


@pytest.mark.parametrize(
    ("rounds", "num_done", "is_complete"), [(3, 3, True), (5, 3, False), (2, 3, True)]
)
def test_a_run_is_complete_when_its_rounds_are_done(tmp_path, rounds, num_done, is_complete):
    run = RunFolder.create(tmp_path, {"method": "cfl", "clients": [], "rounds": 3})
    run.finish({})

    run.set_rounds(rounds, num_done=num_done)

    assert RunFolder(tmp_path).is_complete == is_complete
    assert RunFolder(tmp_path).about["rounds"] == rounds


def test_a_mean_of_numbers_at_the_edge_of_floats_is_one():
    evaluation = {"a": {"loss": 1.7e308}, "b": {"loss": 1.7e308}}

    assert mean_by_metric(evaluation, ["a", "b"])["loss"] == pytest.approx(1.7e308)


def test_a_federation_goes_on_by_its_server_app(tmp_path):
    run = RunFolder.create(tmp_path, {"method": "cfl", "clients": [], "driver": "flower"})

    with pytest.raises(UnusableRun, match="start its server app again, with resume=True"):
        run.summary  # noqa: B018 -- reading it is the test


def test_aggregated_metrics_come_back(run):
    written = Round(
        record=RoundRecord(round=1),
        aggregated={"train": {"loss": 0.5, "curve": [1.0, None], "odd": None}},
    )
    run.append(written)

    assert run.history() == [written]


@pytest.fixture
def saved(run):
    """Four rounds, the server saved after the second and the fourth."""
    server = Server(3, rule=NeverSplit())
    for number in range(1, 5):
        server.plan(["a"])
        run.append(Round(record=server.step({})))
        if number % 2 == 0:
            run.save_server(server)
    return run


def damage_line(run, number):
    path = run.path / "history.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = lines[number - 1].replace(b"refused", b"refusee")
    path.write_bytes(b"".join(lines))


def open_again(run):
    again = RunFolder.open(run.path, {"method": "cfl", "clients": []}, resume=True)
    again.close()
    return again


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda run: (run.path / "state/state.json").unlink(), "state.json does not exist"),
        (lambda run: (run.path / "state/state.json").write_text("{"), "state.json cannot be read"),
        (lambda run: damage_line(run, 3), "history.jsonl line 3 cannot be read"),
        (lambda run: damage_line(run, 4), "history.jsonl line 4 cannot be read"),
    ],
)
def test_a_run_goes_back_to_what_was_saved_before_if_what_it_needs_is_damaged(saved, damage, named):
    saved.finish({"rounds": 4})
    damage(saved)

    with pytest.warns(UsingPreviousState, match=rf"{named}.*after round 2,") as warned:
        again = open_again(saved)

    assert len(warned) == 1
    assert Server.load(again.path / "state").round == 2
    again.truncate_history(2)
    assert len(again.history()) == 2
    assert not again.is_complete


@pytest.mark.parametrize("number", [1, 2])
def test_a_run_without_its_first_rounds_cannot_go_on(saved, number):
    damage_line(saved, number)

    with pytest.raises(DamagedFile, match=rf"line {number} .* and of the state before it: .*line"):
        open_again(saved)


def test_what_was_abandoned_never_becomes_the_state_to_go_back_to(saved):
    damage_line(saved, 4)
    with pytest.warns(UsingPreviousState):
        again = open_again(saved)
    server = Server.load(again.path / "state")
    again.truncate_history(2)
    server.plan(["b"])
    again.append(Round(record=server.step({})))
    again.save_server(server)
    (again.path / "state/state.json").unlink()

    with pytest.warns(UsingPreviousState, match="after round 2,"):
        open_again(again)


def test_a_saved_tree_can_be_looked_at_if_only_the_one_before_it_is_whole(saved):
    (saved.path / "state/state.json").write_text("{")

    with pytest.warns(UsingPreviousState, match=r"state\.json .*after round 2,"):
        tree = RunFolder(saved.path).tree()

    assert tree.client_ids == ["a"]


@pytest.mark.parametrize("num_bytes_lost", [1, 300])
def test_rounds_that_the_saved_server_has_done_cannot_be_missing(saved, num_bytes_lost):
    path = saved.path / "history.jsonl"
    path.write_bytes(path.read_bytes()[:-num_bytes_lost])

    with pytest.raises(DamagedFile, match="of the 4 rounds that the saved server has done"):
        saved.history()


def test_a_complete_run_without_its_state_is_damaged(run):
    run.finish({})

    with pytest.raises(DamagedFile, match="state is missing, but rounds have been done"):
        open_again(run)


def test_a_line_that_could_not_be_written_leaves_no_trace(run, monkeypatch):
    run.append(entry(1))
    before = (run.path / "history.jsonl").read_bytes()

    calls = []

    def half(file, content):
        calls.append(content)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, content[:100])

    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(CannotWrite, match=r"history\.jsonl cannot be written \(\d+ bytes\)"):
            run.append(entry(2))

    assert (run.path / "history.jsonl").read_bytes() == before
    run.append(entry(2))
    assert len(run.history()) == 2
