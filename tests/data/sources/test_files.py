"""Files of a data set: where they are found, and recorded sums."""

import shutil

import pytest

from data.sources.small_sets import (
    idx_files,
    news_csv,
    put,
    sha256,
    small_mnist,
    small_news,
    small_plays,
)
from fedbranch.data import sources
from fedbranch.data.sources.files import SUMS_FILE
from fedbranch.errors import DamagedFile, MissingData

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.fixture
def mnist_dir(tmp_path):
    put(tmp_path / "mnist", idx_files())
    return tmp_path


def refusal(load, *arguments):
    with pytest.raises(DamagedFile) as caught:
        load(*arguments)
    return str(caught.value)


def test_a_part_that_does_not_exist_is_named():
    for load in (sources.mnist, sources.cifar10, sources.ag_news):
        with pytest.raises(ValueError, match="part is 'validation'; give 'train' or 'test'"):
            load("validation")


def test_the_data_folder_is_the_one_named_in_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDBRANCH_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert sources.default_data_dir() == tmp_path / "home" / ".cache" / "fedbranch"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert sources.default_data_dir() == tmp_path / "cache" / "fedbranch"

    monkeypatch.setenv("FEDBRANCH_DATA", str(tmp_path / "data"))
    assert sources.default_data_dir() == tmp_path / "data"


def test_without_a_folder_the_default_one_is_read(monkeypatch, mnist_dir):
    monkeypatch.setenv("FEDBRANCH_DATA", str(mnist_dir))

    assert len(small_mnist().load("train").y) == 12


def test_the_folder_of_the_set_itself_may_be_given(monkeypatch, mnist_dir):
    assert len(small_mnist().load("train", mnist_dir / "mnist").y) == 12

    monkeypatch.chdir(mnist_dir / "mnist")
    assert len(small_mnist().load("train", ".").y) == 12


def test_a_data_folder_that_happens_to_have_the_name_of_a_set_works(mnist_dir):
    (mnist_dir / "mnist" / "mnist").mkdir()
    for path in list((mnist_dir / "mnist").glob("*-ubyte")):
        path.rename(path.parent / "mnist" / path.name)

    assert len(small_mnist().load("train", mnist_dir / "mnist").y) == 12


def test_files_of_torchvision_are_found(mnist_dir):
    shutil.move(mnist_dir / "mnist", mnist_dir / "MNIST" / "raw")

    assert len(small_mnist().load("train", mnist_dir).y) == 12


def test_what_is_missing_is_named_with_what_to_do(mnist_dir):
    (mnist_dir / "mnist" / TRAIN_LABELS).unlink()

    with pytest.raises(MissingData) as caught:
        small_mnist().load("train", mnist_dir)

    message = str(caught.value)
    assert f"{TRAIN_LABELS} (or {TRAIN_LABELS}.gz) is not in {mnist_dir / 'mnist'}" in message
    assert f"`fedbranch data mnist --data-dir {mnist_dir}`" in message


def test_what_cannot_be_fetched_is_not_said_to_be(tmp_path):
    with pytest.raises(MissingData, match=r"it cannot be fetched: put roles.jsonl there"):
        small_plays().load(tmp_path)


def test_a_text_that_was_changed_since_it_was_recorded_is_never_used(tmp_path):
    content = news_csv("train")
    put(tmp_path / "ag_news", {"train.csv": content})
    put(tmp_path / "ag_news", {SUMS_FILE: f"{sha256(content)}  train.csv\n".encode()})
    assert len(small_news().load("train", tmp_path).texts) == 4

    put(tmp_path / "ag_news", {"train.csv": content.replace(b"Mars", b"Moon")})

    assert f"its SHA-256 is not the one in {SUMS_FILE}" in refusal(
        small_news().load, "train", tmp_path
    )


@pytest.mark.parametrize("content", [b"\xff\xfe", b"train.csv\n", b"0" * 63 + b"  train.csv\n"])
def test_sums_that_are_none_are_an_error(tmp_path, content):
    put(tmp_path / "ag_news", {"train.csv": news_csv("train"), SUMS_FILE: content})

    assert SUMS_FILE in refusal(small_news().load, "train", tmp_path)
