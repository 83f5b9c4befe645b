"""The commands that show runs: show, report, plot, watch."""

import json
import os
import shutil
import signal
import subprocess
import urllib.request

import pytest

from tests.cli.small_command import COMMAND, fedbranch_command


def test_a_finished_run_can_be_shown_again_and_to_machines(finished):
    folder, result = finished

    assert fedbranch_command("show", "runs/small-1", cwd=folder).stdout == result.stdout
    shown = json.loads(fedbranch_command("show", "runs/small-1", "--json", cwd=folder).stdout)
    assert shown["is_complete"]
    assert shown["finds_true_groups"]
    assert shown["mean"]["cfl"]["overall"] > shown["mean"]["fedavg"]["overall"] + 0.1
    assert len(shown["splits"]) == 1
    assert [d["node_id"] for d in shown["last_decisions"]] == [1, 2]
    assert sorted(map(tuple, shown["true_groups"]["1"].items())) == [("0", 3)]
    assert [node["parent_id"] for node in shown["tree"]] == [None, 0, 0]
    assert sorted(map(len, shown["clusters"].values())) == [3, 3]


def test_an_unfinished_baseline_is_not_shown_as_a_result(finished, tmp_path):
    folder, _ = finished
    shutil.copytree(folder / "runs/small-1", tmp_path / "run")
    (tmp_path / "run/baselines/fedavg/summary.json").unlink()

    shown = fedbranch_command("show", "run", cwd=tmp_path).stdout
    report = json.loads(fedbranch_command("show", "run", "--json", cwd=tmp_path).stdout)

    assert "plain FL" not in shown
    assert "without the baselines fedavg); continue with: fedbranch resume run" in shown
    assert "true groups." not in shown
    assert not report["is_complete"]


def test_a_baseline_can_be_shown_by_itself(finished):
    folder, _ = finished

    shown = fedbranch_command("show", "runs/small-1/baselines/fedavg", cwd=folder).stdout

    assert "plain FL" in shown
    assert "CFL" not in shown


def test_a_narrow_terminal_still_shows_the_numbers(finished):
    folder, _ = finished
    environment = {**os.environ, "COLUMNS": "40"}

    result = subprocess.run(
        [*COMMAND, "show", "runs/small-1"], capture_output=True, text=True, cwd=folder,
        env=environment,
    )  # fmt: skip

    summary = json.loads((folder / "runs" / "small-1" / "summary.json").read_text())
    assert f"{summary['mean']['accuracy']:.3f}" in result.stdout


def leaves_of(run, name):
    """The tensors that only this one of the two saved states needs."""
    return (
        run / "state" / json.loads((run / "state" / name).read_text())["tensors"]["leaves"]["file"]
    )


def test_a_run_whose_last_state_is_damaged_is_shown_as_it_was_before(finished, tmp_path):
    folder, _ = finished
    run = shutil.copytree(folder / "runs/small-1", tmp_path / "run")
    path = leaves_of(run, "state.json")
    path.write_bytes(path.read_bytes()[:-5])

    result = fedbranch_command("show", "run", cwd=tmp_path)

    (line,) = result.stderr.splitlines()
    assert line.startswith(f"fedbranch: warning: run/state/{path.name} was cut or changed")
    assert line.endswith("after round 15, in run/state/previous.json is used instead")
    assert "node 0" in result.stdout


def test_a_damaged_run_is_named(finished, tmp_path):
    folder, _ = finished
    run = shutil.copytree(folder / "runs/small-1", tmp_path / "run")
    paths = [leaves_of(run, name) for name in ("state.json", "previous.json")]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-5])

    result = fedbranch_command("show", "run", cwd=tmp_path, check=1)

    (line,) = result.stderr.splitlines()
    assert line.startswith("fedbranch: run/state/")
    assert all(f"{path.name} was cut or changed" in line for path in paths)


def test_a_report_says_where_it_is(finished):
    folder, _ = finished

    result = fedbranch_command(
        "report", "runs/small-1", "--out", "page.html", "--tensorboard", "events", cwd=folder
    )

    assert result.stdout == "page.html\nevents/small-1\n"
    assert (folder / "page.html").read_bytes() == (folder / "runs/small-1/report.html").read_bytes()
    assert list((folder / "events/small-1").glob("events.out.*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_is_watched_until_a_signal(finished, number):
    folder, _ = finished
    process = subprocess.Popen(
        [*COMMAND, "watch", "runs/small-1", "--port", "0", "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    with process:
        address = process.stdout.readline().strip()
        with urllib.request.urlopen(address, timeout=60) as answer:
            page = answer.read().decode()
        process.send_signal(number)
        rest, errors = process.communicate(timeout=60)

    assert address.startswith("http://127.0.0.1:")
    assert "small-1" in page
    assert (process.returncode, rest, errors) == (0, "", "")


def test_figures_are_drawn_to_a_file(finished):
    folder, _ = finished

    result = fedbranch_command("plot", "runs/small-1", "--out", "fig.svg", cwd=folder)

    assert result.stdout == "fig.svg\n"
    assert b"<svg" in (folder / "fig.svg").read_bytes()


@pytest.mark.parametrize("wrong", [("--out", "fig.doc"), ("--out", "fig.pdf", "--what", "trees")])
def test_figures_of_another_kind_are_wrong_usage(finished, wrong):
    folder, _ = finished

    result = fedbranch_command("plot", "runs/small-1", *wrong, cwd=folder, check=2)

    assert wrong[-1] in result.stderr


def test_no_report_is_made_of_what_is_no_run(tmp_path):
    result = fedbranch_command("report", ".", cwd=tmp_path, check=1)

    assert result.stderr == "fedbranch: . is not a run folder: it has no run.json\n"
