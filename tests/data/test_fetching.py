"""Data sets from the hub: turned into the published files, or refused as a whole."""

import subprocess
import sys

import numpy as np
import pytest

from data.small_sets import (
    ARTICLES,
    Hub,
    cifar_files,
    idx_files,
    news_csv,
    put,
    sha256,
    small_cifar,
    small_mnist,
    small_news,
    small_plays,
)
from fedbranch.data.sources.files import SUMS_FILE
from fedbranch.data.sources.hub import fetch_missing
from fedbranch.errors import DamagedFile, MissingData


@pytest.fixture
def hub():
    return Hub()


def fetch(source, folder, hub):
    return fetch_missing(source, folder, load_dataset=hub.load_dataset)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("make", "folder", "files"),
    [
        (small_mnist, "mnist", idx_files()),
        (small_cifar, "cifar-10-batches-bin", cifar_files()),
    ],
)
def test_rows_of_the_hub_become_the_published_files(tmp_path, hub, make, folder, files):
    assert fetch(make(), tmp_path, hub)

    written = contents(tmp_path / folder)
    sums = written.pop(SUMS_FILE).decode()
    assert written == files
    assert sums == "".join(f"{sha256(files[name])}  {name}\n" for name in sorted(files))


def test_articles_of_the_hub_are_read_as_those_of_the_published_files(tmp_path, hub):
    put(tmp_path / "own" / "ag_news", {f"{part}.csv": news_csv(part) for part in ARTICLES})

    fetch(small_news(), tmp_path / "fetched", hub)

    for part in ARTICLES:
        own, fetched = (small_news().load(part, tmp_path / name) for name in ("own", "fetched"))
        assert fetched.texts == own.texts
        np.testing.assert_array_equal(fetched.topics, own.topics)


def test_fetching_twice_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        fetch(small_news(), tmp_path / name, Hub())

    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_sha256sum_can_check_what_was_fetched(tmp_path, hub):
    fetch(small_news(), tmp_path, hub)

    subprocess.run(["sha256sum", "-c", SUMS_FILE], cwd=tmp_path / "ag_news", check=True)


def test_an_article_that_is_changed_after_fetching_is_noticed(tmp_path, hub):
    fetch(small_news(), tmp_path, hub)
    path = tmp_path / "ag_news" / "train.csv.gz"
    path.write_bytes((tmp_path / "ag_news" / "test.csv.gz").read_bytes())

    with pytest.raises(DamagedFile, match=r"was changed"):
        small_news().load("train", tmp_path)


def test_what_is_there_is_neither_fetched_nor_touched(tmp_path, hub):
    put(tmp_path / "mnist", idx_files())

    assert not fetch(small_mnist(), tmp_path, hub)

    assert hub.asked == []
    assert contents(tmp_path) == idx_files()


def test_only_the_part_that_is_missing_is_fetched(tmp_path, hub):
    own = news_csv("train")
    put(tmp_path / "ag_news", {"train.csv": own})

    fetch(small_news(), tmp_path, hub)

    assert hub.asked == [("fancyzhx/ag_news", "test")]
    written = contents(tmp_path / "ag_news")
    assert written["train.csv"] == own
    assert set(written) == {"train.csv", "test.csv.gz", SUMS_FILE}
    assert b"train" not in written[SUMS_FILE]


def test_sums_of_what_was_fetched_before_are_kept(tmp_path, hub):
    fetch(small_news(), tmp_path, hub)
    before = contents(tmp_path)
    (tmp_path / "ag_news" / "test.csv.gz").unlink()

    fetch(small_news(), tmp_path, hub)

    assert contents(tmp_path) == before


def changed(row, **columns):
    return {**row, **columns}


@pytest.mark.parametrize(
    ("make", "damage", "said"),
    [
        (small_mnist, lambda rows: rows[:-1], "its train part has 11 rows of 12"),
        (small_mnist, lambda rows: [*rows, rows[0]], "its train part has more than 12 rows"),
        (small_mnist, lambda rows: rows[::-1], "does not give train-images-idx3-ubyte"),
        (
            small_mnist,
            lambda rows: [*rows[:-1], changed(rows[-1], label=0)],
            "does not give train-labels-idx1-ubyte with its SHA-256",
        ),
        (
            small_mnist,
            lambda rows: [changed(rows[0], label=10), *rows[1:]],
            "row 1 of its train part has the label 10",
        ),
        (
            small_mnist,
            lambda rows: [changed(rows[0], image=np.zeros((28, 28, 3), np.uint8))],
            "image 1 of its train part is uint8 of (28, 28, 3)",
        ),
        (
            small_mnist,
            lambda rows: [{"pixels": row["image"], "label": row["label"]} for row in rows],
            "its columns are ['label', 'pixels'], without image or img",
        ),
        (small_cifar, lambda rows: rows[::-1], "does not give data_batch_1.bin, data_batch_2.bin"),
        (small_cifar, lambda rows: rows[:10] * 3, "does not give data_batch_1.bin, data_batch_3"),
        (small_news, lambda rows: rows[:3], "its train part has 3 rows, not 4"),
        (small_news, lambda rows: [], "its train part has 0 rows, not 4"),
        (
            small_news,
            lambda rows: [changed(rows[0], label=-1), *rows[1:]],
            "row 1 of its train part has the label -1",
        ),
        (small_news, lambda rows: [{"label": 0}], "its columns are ['label'], without text"),
    ],
)
def test_a_hub_that_has_something_else_is_refused_as_a_whole(tmp_path, hub, make, damage, said):
    source = make()
    hub.rows[source.hub_id, "train"] = damage(hub.rows[source.hub_id, "train"])

    with pytest.raises(DamagedFile) as caught:
        fetch(source, tmp_path, hub)

    assert f"{source.hub_id} on the hub is not the published {source.title}" in str(caught.value)
    assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_leaves_nothing_half_written(tmp_path, hub, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        fetch(small_mnist(), tmp_path, hub)

    assert contents(tmp_path) == {}


def test_without_a_network_the_error_says_which_files_go_where(tmp_path):
    def unreachable(hub_id, *, split):
        raise ConnectionError(f"Couldn't reach '{hub_id}'\non the Hub (LocalEntryNotFoundError)")

    with pytest.raises(MissingData) as caught:
        fetch_missing(small_mnist(), tmp_path, load_dataset=unreachable)

    message = str(caught.value)
    assert "did not give ylecun/mnist (ConnectionError: Couldn't reach 'ylecun/mnist' on" in message
    assert "put train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images" in message
    assert f"into {tmp_path / 'mnist'}, plain or .gz" in message


def test_without_the_extra_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)

    with pytest.raises(MissingData) as caught:
        fetch_missing(small_mnist(), tmp_path)

    assert "`pip install 'fedbranch[data]'`" in str(caught.value)
    assert f"into {tmp_path / 'mnist'}" in str(caught.value)


def test_plays_are_on_no_hub(tmp_path, hub):
    with pytest.raises(MissingData) as caught:
        fetch(small_plays(), tmp_path, hub)

    assert "put roles.jsonl into" in str(caught.value)
    assert str(tmp_path / "shakespeare") in str(caught.value)
