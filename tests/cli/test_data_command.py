"""`fedbranch data`: lists, checks and fetches."""

import gzip
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest

from data.sources.file_server import FileServer, downloads_of

ARTICLES = b'"3","Oil","Rises"\n"1","Summit","Ends"\n'

# The command with another table of published files, as its first two arguments say.
COMMAND = """
import json, sys
from dataclasses import replace
from fedbranch.cli.commands import main
from fedbranch.data.sources import Download, catalogue

name, table = sys.argv[1], json.loads(sys.argv[2])
downloads = tuple(
    Download(name=entry["name"], sha256=entry["sha256"], urls=tuple(entry["urls"]))
    for entry in table
)
catalogue.SOURCES = {**catalogue.SOURCES, name: replace(catalogue.SOURCES[name], downloads=downloads)}
del sys.argv[1:3]
main()
"""
NEWS = {"train.csv": ARTICLES, "test.csv": ARTICLES[:18]}


@pytest.fixture
def data_dir(tmp_path):
    folder = tmp_path / "data" / "ag_news"
    folder.mkdir(parents=True)
    (folder / "train.csv").write_bytes(ARTICLES)
    (folder / "test.csv.gz").write_bytes(gzip.compress(ARTICLES[:18]))
    return tmp_path / "data"


def data_command(*arguments, check=0, **environment):
    return fedbranch("data", *arguments, check=check, **environment)


def fedbranch(*arguments, check=0, **environment):
    result = subprocess.run(
        [sys.executable, "-m", "fedbranch", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {name: str(value) for name, value in environment.items()},
    )
    assert result.returncode == check, result.stderr
    assert "Traceback" not in result.stderr
    return result


def with_downloads(downloads, *arguments, check=0, **settings):
    """Run the command with other addresses for the files of a set."""
    result = subprocess.run(
        from_server(downloads, *arguments), capture_output=True, text=True, timeout=120, **settings
    )
    assert result.returncode == check, result.stderr
    assert "Traceback" not in result.stderr
    return result


def from_server(downloads, name, *arguments):
    table = json.dumps([asdict(download) for download in downloads])
    return [sys.executable, "-c", COMMAND, name, table, "data", name, *map(str, arguments)]


def test_all_sets_are_listed_with_what_is_there(data_dir):
    (data_dir / "ag_news" / "test.csv.gz").unlink()

    lines = data_command("--data-dir", data_dir).stdout.splitlines()

    assert lines[0] == "digits         in scikit-learn"
    assert f"mnist          not in {data_dir / 'mnist'}" in lines
    assert f"ag_news        0.0 MB in {data_dir / 'ag_news'}, without test.csv" in lines


def test_the_folder_may_come_from_the_environment(data_dir):
    listed = json.loads(data_command("--json", FEDBRANCH_DATA=data_dir).stdout)

    names = ["digits", "mnist", "fashion_mnist", "cifar10", "ag_news", "shakespeare"]
    assert [entry["name"] for entry in listed] == names
    (news,) = (entry for entry in listed if entry["name"] == "ag_news")
    assert news["folder"] == str(data_dir / "ag_news")
    assert news["is_complete"] is True


def test_a_set_that_is_there_is_checked_and_counted(data_dir):
    result = data_command("ag_news", "--data-dir", data_dir)

    assert result.stdout.splitlines() == [
        f"AG-News in {data_dir / 'ag_news'}",
        "  train  2 of 120,000 articles, 2 topics, 0.0 MB",
        "  test   1 of 7,600 articles, 1 topics, 0.0 MB",
        "Every file was read to its end; there is no SHA-256 to compare it with.",
    ]
    assert result.stderr == ""


def test_machines_get_the_same(data_dir):
    checked = json.loads(data_command("ag_news", "--data-dir", data_dir, "--json").stdout)

    assert checked["checked"] == "readable"
    assert checked["parts"]["train"] == {
        "rows": 2,
        "published_rows": 120_000,
        "classes": 2,
        "num_bytes": len(ARTICLES),
        "missing": [],
    }


def test_digits_need_no_folder(tmp_path):
    result = data_command("digits", "--data-dir", tmp_path / "nowhere")

    assert "1,797 images, 10 classes" in result.stdout


def test_missing_files_are_fetched_and_from_then_on_there(tmp_path):
    arguments = ("ag_news", "--data-dir", tmp_path / "data")
    with FileServer(NEWS) as server:
        fetched = with_downloads(downloads_of(NEWS, server.url), *arguments)
    again = data_command(*arguments)

    assert fetched.stdout == again.stdout
    assert "  train  2 of 120,000 articles, 2 topics" in fetched.stdout
    assert "Every file is as it was fetched, by its SHA-256." in fetched.stdout
    assert fetched.stderr == ""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_progress_is_shown_on_a_terminal(tmp_path):
    terminal, its_end = os.openpty()
    with FileServer(NEWS) as server:
        process = subprocess.Popen(
            from_server(downloads_of(NEWS, server.url), "ag_news", "--data-dir", tmp_path),
            stdout=subprocess.PIPE,
            stderr=its_end,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80"},
        )
        os.close(its_end)
        stdout, _ = process.communicate(timeout=60)

    assert process.returncode == 0
    assert stdout.startswith(b"AG-News in ")
    shown = os.read(terminal, 65536).decode()
    os.close(terminal)
    assert "train.csv" in shown
    assert f"{len(ARTICLES)}/{len(ARTICLES)} bytes" in shown


@pytest.mark.parametrize(("number", "said"), [("SIGINT", "interrupted"), ("SIGTERM", "terminated")])
def test_a_signal_during_a_transfer_ends_it_in_one_line(tmp_path, number, said):
    with FileServer(NEWS) as server:
        server.stalled = {"test.csv"}
        process = subprocess.Popen(
            from_server(downloads_of(NEWS, server.url), "ag_news", "--data-dir", tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert server.sent_half.wait(60)
        process.send_signal(getattr(signal, number))
        stdout, stderr = process.communicate(timeout=60)

    assert process.returncode == 128 + getattr(signal, number)
    assert (stdout, len(stderr.splitlines())) == ("", 1)
    assert stderr.startswith(f"fedbranch: {said}; complete files were kept")
    assert sorted(p.name for p in (tmp_path / "ag_news").iterdir()) == ["SHA256SUMS", "train.csv"]


def test_without_a_network_the_error_is_one_line(tmp_path):
    files = {"train.csv": b"", "test.csv": b""}

    result = with_downloads(
        downloads_of(files, "http://127.0.0.1:9/"), "ag_news", "--data-dir", tmp_path, check=1
    )

    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("fedbranch: AG-News cannot be fetched: train.csv could not be")
    assert str(tmp_path / "ag_news") in result.stderr


def test_a_changed_file_is_an_error_in_one_line(tmp_path):
    with FileServer(NEWS | {"train.csv": b"<html>"}) as server:
        result = with_downloads(
            downloads_of(NEWS, server.url), "ag_news", "--data-dir", tmp_path, check=1
        )

    assert "train.csv is not the published file" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_without_the_extra_the_error_says_what_to_install(tmp_path):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "pooch.py").write_text("raise ModuleNotFoundError(name='pooch')")
    path = os.pathsep.join([str(tmp_path / "library"), os.environ.get("PYTHONPATH", "")])

    result = data_command("cifar10", "--data-dir", tmp_path / "data", check=1, PYTHONPATH=path)

    assert "pip install 'fedbranch[data]'" in result.stderr


def test_plays_are_to_be_put_there(tmp_path):
    result = data_command("shakespeare", "--data-dir", tmp_path, check=1)

    assert f"put roles.jsonl into {tmp_path / 'shakespeare'}" in result.stderr


def test_a_damaged_file_is_an_error(data_dir):
    (data_dir / "ag_news" / "train.csv").write_bytes(ARTICLES[:-4])

    result = data_command("ag_news", "--data-dir", data_dir, check=1)

    assert str(data_dir / "ag_news" / "train.csv") in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_experiment_whose_data_are_not_there_says_how_to_get_them(tmp_path):
    path = tmp_path / "mnist.toml"
    path.write_text(
        "rounds = 1\n[data]\nsource = 'mnist'\nnum_clients = 2\n"
        "[training]\nlearning_rate = 0.1\nepochs = 1\n"
    )

    result = fedbranch("run", path, "--data-dir", tmp_path, "--out", tmp_path / "run", check=1)

    assert f"`fedbranch data mnist --data-dir {tmp_path}`" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_unknown_set_is_wrong_usage(tmp_path):
    result = data_command("mnits", check=2)

    assert "did you mean 'mnist'?" in result.stderr
