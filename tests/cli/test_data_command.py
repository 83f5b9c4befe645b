"""`fedbranch data`: lists, checks and fetches."""

import gzip
import json
import os
import subprocess
import sys

import pytest

ARTICLES = b'"3","Oil","Rises"\n"1","Summit","Ends"\n'

# A module `datasets` as the command finds it on the path: AG-News with short articles.
DATASETS = """
def load_dataset(hub_id, *, split):
    assert hub_id == "fancyzhx/ag_news"
    for i in range({"train": 120_000, "test": 7_600}[split]):
        yield {"text": f"Article {i}", "label": i % 4}
"""
UNREACHABLE = """
def load_dataset(hub_id, *, split):
    raise ConnectionError(f"Couldn't reach {hub_id!r} on the Hub")
"""


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


def on_path(folder, text):
    folder.mkdir()
    (folder / "datasets.py").write_text(text)
    return folder


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


def test_what_is_missing_is_fetched_and_from_then_on_there(tmp_path):
    path = on_path(tmp_path / "library", DATASETS)
    arguments = ("ag_news", "--data-dir", tmp_path / "data")

    fetched = data_command(*arguments, PYTHONPATH=path)
    again = data_command(*arguments)

    assert fetched.stdout == again.stdout
    assert "  train  120,000 articles, 4 topics" in fetched.stdout
    assert "Every file is as it was fetched, by its SHA-256." in fetched.stdout
    assert fetched.stderr == ""


def test_without_a_network_the_error_is_one_line(tmp_path):
    path = on_path(tmp_path / "library", UNREACHABLE)

    result = data_command("mnist", "--data-dir", tmp_path / "data", check=1, PYTHONPATH=path)

    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("fedbranch: MNIST cannot be fetched: the hub did not give")
    assert str(tmp_path / "data" / "mnist") in result.stderr


def test_without_the_extra_the_error_says_what_to_install(tmp_path):
    path = on_path(tmp_path / "library", "raise ModuleNotFoundError(name='datasets')")

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
