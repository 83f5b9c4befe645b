"""The commands that run experiments: demo, run, resume."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import time

import pytest

import fedbranch
from tests.cli.small_command import COMMAND, CONFIG, fedbranch_command, folder_bytes


def test_a_run_ends_with_the_tree_the_table_the_reasons_and_the_path(finished):
    _, result = finished

    assert "split in round 7" in result.stdout
    assert "plain FL" in result.stdout
    assert "Why each cluster was split\nround 7, node 0: 3 + 3 clients: stationary" in result.stdout
    assert "Why the others were not\nround 16, node 1: congruent" in result.stdout
    assert "The clusters are exactly the true groups." in result.stdout
    assert "Run folder: runs/small-1" in result.stdout
    # No progress bar in a pipe: only what did the work, why, and the peak memory.
    assert re.fullmatch(
        r"fedbranch: engine vectorised \(a step of .*\); peak memory \d+ MiB.*\n", result.stderr
    )


def test_a_second_run_touches_nothing_and_has_the_same_bytes(finished):
    folder, _ = finished
    first = folder_bytes(folder / "runs/small-1")

    output = fedbranch_command("run", "small.toml", "--json", cwd=folder).stdout

    assert json.loads(output)["run"] == "runs/small-2"
    assert folder_bytes(folder / "runs/small-1") == folder_bytes(folder / "runs/small-2") == first


def test_another_seed_is_another_run(finished, tmp_path, config):
    folder, _ = finished
    config.write_text(CONFIG.replace("rounds = 16", "rounds = 1"))
    fedbranch_command("run", config, "--seed", 0, "--out", "same", cwd=tmp_path)
    fedbranch_command("run", config, "--seed", 1, "--out", "other", cwd=tmp_path)

    first = (folder / "runs/small-1/history.jsonl").read_text().splitlines()[0]
    assert (tmp_path / "same/history.jsonl").read_text().splitlines()[0] == first
    assert (tmp_path / "other/history.jsonl").read_text().splitlines()[0] != first


@pytest.mark.slow
def test_the_demo_shows_what_it_promises(tmp_path):
    report = json.loads(fedbranch_command("demo", "--json", cwd=tmp_path).stdout)

    assert report["run"] == "runs/demo-1"
    assert report["finds_true_groups"]
    assert [len(split["groups"]) for split in report["splits"]] == [4]
    assert sorted(map(len, report["clusters"].values())) == [5, 5, 5, 5]
    mean = {method: means["overall"] for method, means in report["mean"].items()}
    assert mean["cfl"] > mean["fedavg"] + 0.1
    assert mean["cfl"] > mean["local"] + 0.03


@pytest.mark.slow
def test_a_run_that_is_killed_twice_resumes_to_the_same_bytes(finished, tmp_path, config):
    folder, _ = finished

    kill_when(tmp_path, "parts/state/state.json", "run", config, "--out", "parts")
    kill_when(tmp_path, "parts/baselines/fedavg/state/state.json", "resume", "parts")
    assert not (tmp_path / "parts/baselines/fedavg/summary.json").exists()
    fedbranch_command("resume", "parts", cwd=tmp_path)

    assert folder_bytes(tmp_path / "parts") == folder_bytes(folder / "runs/small-1")


def kill_when(cwd, milestone, *arguments):
    """Start a command and end it, without warning, as soon as a file is there."""
    process = subprocess.Popen([*COMMAND, *map(str, arguments)], cwd=cwd, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (cwd / milestone).exists() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_an_interrupted_run_says_how_to_go_on(tmp_path, config):
    config.write_text(CONFIG.replace("rounds = 16", "rounds = 4000"))
    process = subprocess.Popen(
        [*COMMAND, "run", str(config), "--out", "parts"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "parts/state/state.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)

    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 130
    assert errors == "fedbranch: interrupted; continue with: fedbranch resume parts\n"
    shown = fedbranch_command("show", "parts", cwd=tmp_path)
    assert "of 4000 rounds, without the baselines fedavg); continue with" in shown.stdout


def test_a_progress_bar_runs_on_a_terminal(tmp_path, config):
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "run", str(config)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            chunk = os.read(screen, 4096)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        shown += chunk
    output, _ = process.communicate(timeout=60)
    os.close(screen)

    assert process.returncode == 0
    assert b"round 16/16" in shown
    assert b"2 clusters" in shown
    assert b"round 16/16" not in output


def test_a_run_made_in_python_is_resumed_in_python(tmp_path):
    fedbranch.RunFolder.create(tmp_path / "run", {"method": "cfl", "about": None, "clients": []})

    result = fedbranch_command("resume", "run", cwd=tmp_path, check=2)

    assert "resume it from Python" in result.stderr


def test_a_run_ends_with_a_page_about_it(finished):
    folder, result = finished

    assert result.stdout.endswith("Report: runs/small-1/report.html\n")
    assert "<!doctype html>" in (folder / "runs/small-1/report.html").read_text()[:100].lower()
    told = json.loads(fedbranch_command("show", "runs/small-1", "--json", cwd=folder).stdout)
    assert told["report"] == "runs/small-1/report.html"


def test_a_page_in_the_folder_does_not_keep_a_run_from_going_on(finished):
    folder, _ = finished
    run, page = folder / "runs/small-1", folder / "runs/small-1/report.html"
    before = folder_bytes(run), page.read_bytes()

    fedbranch_command("resume", run, cwd=folder)

    assert (folder_bytes(run), page.read_bytes()) == before


def test_a_page_that_cannot_be_written_does_not_cost_the_result(finished, tmp_path):
    folder, _ = finished
    shutil.copytree(folder / "runs/small-1", tmp_path / "run")
    (tmp_path / "run/report.html").unlink()
    (tmp_path / "run/report.html/taken").mkdir(parents=True)

    result = fedbranch_command("resume", "run", cwd=tmp_path)

    assert "warning: there is no report: run/report.html cannot be written" in result.stderr
    assert "Why each cluster was split" in result.stdout
    assert "Report:" not in result.stdout
