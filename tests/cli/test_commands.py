import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

import fedbranch

CONFIG = """
rounds = 16
checkpoint_every = 3
baselines = ["fedavg"]
[data]
num_clients = 6
num_groups = 2
structure = "label-permutation"
[training]
learning_rate = 0.5
epochs = 5
batch_size = 120
[rule]
eps_mean = 0.6
eps_max = 0.7
gamma_max = 0.5
"""
COMMAND = [sys.executable, "-m", "fedbranch"]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder in which `fedbranch run small.toml` has been called once."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.toml").write_text(CONFIG)
    result = fedbranch_command("run", "small.toml", cwd=folder)
    return folder, result


def fedbranch_command(*arguments, cwd, check=0):
    result = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=300
    )
    assert result.returncode == check, result.stderr
    return result


def folder_bytes(path):
    """All files of a run but the page about it, which has the folder's name in it."""
    return {
        p.relative_to(path): p.read_bytes()
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.name != "report.html"
    }


def test_version_and_help(tmp_path):
    assert fedbranch_command("--version", cwd=tmp_path).stdout.strip() == fedbranch.__version__
    text = fedbranch_command("--help", cwd=tmp_path).stdout
    assert all(command in text for command in ("demo", "run", "resume", "show"))


@pytest.mark.parametrize(
    ("command", "promised"),
    [
        ("run", ["digits-label-permutation", "the next free", "--seed", "--json"]),
        ("resume", ["A run folder.", "same result"]),
        ("show", ["A run folder.", "reason for every split"]),
        ("demo", ["four clusters", "--out"]),
    ],
)
def test_every_command_explains_its_arguments(tmp_path, command, promised):
    text = " ".join(fedbranch_command(command, "--help", cwd=tmp_path).stdout.split())

    assert all(phrase in text for phrase in promised)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("rounds = 16", "rounds = -1"), "small.toml: rounds is -1; it must be at least 1"),
        (("epochs = 5", "epoch = 5"), "did you mean training.epochs?"),
        (
            ("gamma_max = 0.5", "gamma_max = 'x'"),
            "rule.gamma_max is 'x'; it must be a finite number",
        ),
    ],
)
def test_a_bad_config_is_one_line_and_exit_code_2_before_torch_is_loaded(
    tmp_path, config, change, message
):
    config.write_text(CONFIG.replace(*change))
    script = (
        "import sys; sys.argv = ['fedbranch', 'run', 'small.toml']\n"
        "from fedbranch.cli.commands import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )

    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path
    )

    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("fedbranch: ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "nothing.toml"], 2, "nothing.toml cannot be read"),
        (["run", "dmo"], 2, "did you mean 'demo'?"),
        (["show", "nowhere"], 1, "nowhere is not a run folder"),
        (["resume", "nowhere"], 1, "nowhere is not a run folder"),
        (["demo", "--seed", "-1"], 2, "seed is -1"),
        (["demo", "--out", "."], 1, "already holds something"),
    ],
)
def test_expected_errors_are_one_line(tmp_path, arguments, code, message):
    (tmp_path / "precious.txt").write_text("mine")

    result = fedbranch_command(*arguments, cwd=tmp_path, check=code)

    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


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


def test_a_report_says_where_it_is(finished):
    folder, _ = finished

    result = fedbranch_command(
        "report", "runs/small-1", "--out", "page.html", "--tensorboard", "events", cwd=folder
    )

    assert result.stdout == "page.html\nevents/small-1\n"
    assert (folder / "page.html").read_bytes() == (folder / "runs/small-1/report.html").read_bytes()
    assert list((folder / "events/small-1").glob("events.out.*"))


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
