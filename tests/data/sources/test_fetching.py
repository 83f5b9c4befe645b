"""Published files over HTTP: whole, from whichever mirror has them, or not at all."""

import gzip
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from data.sources.file_server import FileServer, archive_download, archive_of, downloads_of
from data.sources.small_sets import (
    ARTICLES,
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
from fedbranch.data.sources.fetching import fetch_missing
from fedbranch.data.sources.files import SUMS_FILE
from fedbranch.errors import CannotWrite, DamagedFile, MissingData

MNIST = {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in idx_files().items()}
NEWS = {f"{part}.csv": news_csv(part) for part in ARTICLES}
TRAIN_IMAGES = "train-images-idx3-ubyte.gz"


@pytest.fixture
def server():
    with FileServer(MNIST | NEWS) as running:
        yield running


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sums_of(files):
    return "".join(f"{sha256(files[name])}  {name}\n" for name in sorted(files)).encode()


def refusal(error, *arguments, **settings):
    with pytest.raises(error) as caught:
        fetch_missing(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is fetched


def test_files_are_kept_as_they_were_published(tmp_path, server):
    added = fetch_missing(small_mnist(), tmp_path, downloads=downloads_of(MNIST, server.url))

    assert added == [tmp_path / "mnist" / name for name in MNIST]
    assert contents(tmp_path / "mnist") == MNIST | {SUMS_FILE: sums_of(MNIST)}
    assert small_mnist().load("test", tmp_path).y.tolist() == list(range(10))


def test_by_default_the_addresses_are_those_of_the_set(tmp_path, server):
    news = small_news(downloads_of(NEWS, server.url))

    fetch_missing(news, tmp_path)

    assert contents(tmp_path / "ag_news") == NEWS | {SUMS_FILE: sums_of(NEWS)}
    assert len(news.load("train", tmp_path).texts) == len(ARTICLES["train"])


def test_an_archive_is_unpacked_and_not_kept(tmp_path, server):
    files = cifar_files()
    packed = archive_of(files)
    server.files["a.tar.gz"] = packed
    table = archive_download(packed, files, server.url + "a.tar.gz")

    added = fetch_missing(small_cifar(), tmp_path, downloads=[table])

    assert sorted(path.name for path in added) == sorted(files)
    assert contents(tmp_path) == files | {SUMS_FILE: sums_of(files)}
    assert len(small_cifar().load("train", tmp_path).y) == 30


def test_of_an_archive_only_missing_files_are_unpacked(tmp_path, server):
    files = cifar_files()
    packed = archive_of(files)
    server.files["a.tar.gz"] = packed
    put(tmp_path / "cifar-10-batches-bin", {"test_batch.bin": b"own"})

    added = fetch_missing(
        small_cifar(),
        tmp_path,
        downloads=[archive_download(packed, files, server.url + "a.tar.gz")],
    )

    assert len(added) == 3
    assert contents(tmp_path)["test_batch.bin"] == b"own"


def test_a_second_call_fetches_nothing(tmp_path, server):
    table = downloads_of(MNIST, server.url)
    fetch_missing(small_mnist(), tmp_path, downloads=table)
    before = contents(tmp_path)
    server.asked.clear()

    assert fetch_missing(small_mnist(), tmp_path, downloads=table) == []

    assert server.asked == []
    assert contents(tmp_path) == before


def test_files_that_are_there_are_neither_fetched_nor_changed(tmp_path, server):
    own = {name: content for name, content in idx_files().items() if "train" in name}
    put(tmp_path / "mnist", own)

    fetch_missing(small_mnist(), tmp_path, downloads=downloads_of(MNIST, server.url))

    assert [name for name in server.asked if "train" in name] == []
    assert {name: contents(tmp_path)[name] for name in own} == own


def test_without_a_missing_file_pooch_is_not_needed(tmp_path, monkeypatch):
    put(tmp_path / "mnist", idx_files())
    monkeypatch.setitem(sys.modules, "pooch", None)

    assert fetch_missing(small_mnist(), tmp_path) == []


def test_fetching_gives_the_same_bytes_again(tmp_path, server):
    for name in ("a", "b"):
        fetch_missing(small_news(), tmp_path / name, downloads=downloads_of(NEWS, server.url))

    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_articles_with_titles_are_read_as_those_in_one_text(tmp_path, server):
    one_text = {f"{part}.csv": news_csv(part, columns=2) for part in ARTICLES}
    put(tmp_path / "own" / "ag_news", one_text)

    fetch_missing(small_news(), tmp_path / "fetched", downloads=downloads_of(NEWS, server.url))

    for part in ARTICLES:
        own, fetched = (small_news().load(part, tmp_path / name) for name in ("own", "fetched"))
        assert fetched.texts == own.texts
        np.testing.assert_array_equal(fetched.topics, own.topics)


def test_sha256sum_can_check_fetched_files(tmp_path, server):
    fetch_missing(small_news(), tmp_path, downloads=downloads_of(NEWS, server.url))

    subprocess.run(["sha256sum", "-c", SUMS_FILE], cwd=tmp_path / "ag_news", check=True)


def test_sums_of_files_that_were_fetched_before_are_kept(tmp_path, server):
    table = downloads_of(NEWS, server.url)
    fetch_missing(small_news(), tmp_path, downloads=table)
    before = contents(tmp_path)
    (tmp_path / "ag_news" / "test.csv").unlink()

    fetch_missing(small_news(), tmp_path, downloads=table)

    assert contents(tmp_path) == before


def test_only_fetched_files_have_a_recorded_sum(tmp_path, server):
    put(tmp_path / "ag_news", {"train.csv": b"own"})

    fetch_missing(small_news(), tmp_path, downloads=downloads_of(NEWS, server.url))

    assert b"train" not in contents(tmp_path)[SUMS_FILE]


def test_an_article_that_is_changed_after_fetching_is_noticed(tmp_path, server):
    fetch_missing(small_news(), tmp_path, downloads=downloads_of(NEWS, server.url))
    (tmp_path / "ag_news" / "train.csv").write_bytes(NEWS["test.csv"])

    with pytest.raises(DamagedFile, match=r"was changed"):
        small_news().load("train", tmp_path)


def test_progress_counts_the_bytes_of_each_file(tmp_path, server):
    large = {"train.csv": b"x" * 700_000, "test.csv": b"y"}
    server.files |= large
    seen = []

    fetch_missing(
        small_news(),
        tmp_path,
        downloads=downloads_of(large, server.url),
        on_progress=lambda *numbers: seen.append(numbers),
    )

    for name, content in large.items():
        so_far = [num_bytes for file, num_bytes, _ in seen if file == name]
        assert so_far == sorted(so_far)
        assert so_far[-1] == len(content)
    assert {(name, total) for name, _, total in seen} == {("train.csv", 700_000), ("test.csv", 1)}
    assert len(seen) > 3


# Addresses that fail


def test_after_a_404_the_next_mirror_is_asked(tmp_path, server):
    table = downloads_of(NEWS, server.url + "gone/", server.url)

    fetch_missing(small_news(), tmp_path, downloads=table)

    assert server.asked == ["gone/train.csv", "train.csv", "gone/test.csv", "test.csv"]
    assert contents(tmp_path) == NEWS | {SUMS_FILE: sums_of(NEWS)}


def test_after_a_cut_transfer_the_next_mirror_is_asked(tmp_path, server):
    server.files |= {f"b/{name}": content for name, content in NEWS.items()}
    server.cut = {"train.csv"}

    fetch_missing(
        small_news(), tmp_path, downloads=downloads_of(NEWS, server.url, server.url + "b/")
    )

    assert contents(tmp_path) == NEWS | {SUMS_FILE: sums_of(NEWS)}


def test_after_a_changed_copy_the_next_mirror_is_asked(tmp_path, server):
    server.files |= {f"changed/{name}": content + b"." for name, content in NEWS.items()}

    fetch_missing(
        small_news(), tmp_path, downloads=downloads_of(NEWS, server.url + "changed/", server.url)
    )

    assert contents(tmp_path) == NEWS | {SUMS_FILE: sums_of(NEWS)}


@pytest.mark.parametrize("has_other_mirror", [False, True])
def test_a_changed_file_is_refused_with_both_hashes(tmp_path, server, has_other_mirror):
    changed = MNIST[TRAIN_IMAGES][:-1] + b"?"
    server.files[TRAIN_IMAGES] = changed
    mirrors = [server.url, server.url + "gone/"][: 1 + has_other_mirror]

    message = refusal(DamagedFile, small_mnist(), tmp_path, downloads=downloads_of(MNIST, *mirrors))

    assert f"Small MNIST: {TRAIN_IMAGES} is not the published file" in message
    assert sha256(MNIST[TRAIN_IMAGES]) in message
    assert sha256(changed) in message
    assert server.url + TRAIN_IMAGES in message
    assert ("404" in message) is has_other_mirror
    assert "try again, or put train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k" in message
    assert f"into {tmp_path / 'mnist'}, plain or .gz" in message
    assert list(tmp_path.iterdir()) == []


def test_a_transfer_that_is_cut_leaves_whole_files_only_and_is_resumed(tmp_path, server):
    table = downloads_of(NEWS, server.url)
    server.cut = {"test.csv"}

    message = refusal(MissingData, small_news(), tmp_path, downloads=table)

    assert f"test.csv could not be downloaded ({server.url}test.csv: " in message
    whole = {"train.csv": NEWS["train.csv"]}
    assert contents(tmp_path) == whole | {SUMS_FILE: sums_of(whole)}
    assert [path.name for path in tmp_path.iterdir()] == ["ag_news"]
    assert not [path for path in (tmp_path / "ag_news").iterdir() if path.is_dir()]

    server.cut, server.asked[:] = set(), []
    fetch_missing(small_news(), tmp_path, downloads=table)
    assert server.asked == ["test.csv"]
    assert contents(tmp_path) == NEWS | {SUMS_FILE: sums_of(NEWS)}


def test_without_a_network_the_error_says_which_file_goes_where(tmp_path):
    closed_port = "http://127.0.0.1:9/"
    table = downloads_of(MNIST, closed_port, "http://no-such-host.invalid/")

    message = refusal(MissingData, small_mnist(), tmp_path, downloads=table)

    assert message.startswith(
        f"Small MNIST cannot be fetched: {TRAIN_IMAGES} could not be downloaded "
        f"({closed_port}{TRAIN_IMAGES}: "
    )
    assert "Connection refused" in message
    assert "http://no-such-host.invalid/" in message
    assert "put train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images" in message
    assert f"into {tmp_path / 'mnist'}, plain or .gz" in message
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)

    message = refusal(MissingData, small_mnist(), tmp_path, downloads=downloads_of(MNIST, "x"))

    assert "`pip install 'fedbranch[data]'`" in message
    assert f"into {tmp_path / 'mnist'}" in message


def test_plays_have_no_address(tmp_path):
    message = refusal(MissingData, small_plays(), tmp_path)

    assert f"put roles.jsonl into {tmp_path / 'shakespeare'}" in message
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_an_address_stops_the_set_before_anything_is_fetched(tmp_path, server):
    table = downloads_of({"train.csv": NEWS["train.csv"]}, server.url)

    assert "put test.csv into" in refusal(MissingData, small_news(), tmp_path, downloads=table)
    assert server.asked == []


# Full disks, interruptions and incomplete archives


def test_a_disk_that_fails_leaves_nothing_half_written(tmp_path, server, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    message = refusal(
        CannotWrite, small_mnist(), tmp_path, downloads=downloads_of(MNIST, server.url)
    )

    assert "No space left on device" in message
    assert contents(tmp_path) == {}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_during_the_transfer_is_named(tmp_path, server, monkeypatch):
    import pooch

    class ToFullDisk(pooch.HTTPDownloader):
        def __call__(self, url, output_file, pooch, check_only=False):
            super().__call__(url, "/dev/full", pooch, check_only)

    monkeypatch.setattr("pooch.HTTPDownloader", ToFullDisk)
    message = refusal(CannotWrite, small_news(), tmp_path, downloads=downloads_of(NEWS, server.url))

    assert f"nothing can be written into {tmp_path / 'ag_news'}: No space left" in message
    assert list(tmp_path.iterdir()) == []


def test_a_data_folder_that_is_a_file_is_named(tmp_path, server):
    (tmp_path / "data").write_text("not a folder")

    message = refusal(
        CannotWrite, small_news(), tmp_path / "data", downloads=downloads_of(NEWS, server.url)
    )

    assert str(tmp_path / "data" / "ag_news") in message


def test_ctrl_c_during_a_transfer_leaves_nothing_half(tmp_path, server):
    server.stalled = {"test.csv"}
    script = f"""
        from data.sources.file_server import downloads_of
        from data.sources.small_sets import ARTICLES, news_csv, small_news
        from fedbranch.data.sources.fetching import fetch_missing
        files = {{f"{{part}}.csv": news_csv(part) for part in ARTICLES}}
        fetch_missing(small_news(), {str(tmp_path)!r}, downloads=downloads_of(files, {server.url!r}))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert server.sent_half.wait(30)

    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)

    assert b"KeyboardInterrupt" in stderr
    whole = {"train.csv": NEWS["train.csv"]}
    assert contents(tmp_path) == whole | {SUMS_FILE: sums_of(whole)}
    assert not [path for path in (tmp_path / "ag_news").iterdir() if path.is_dir()]


def test_an_archive_that_lacks_a_file_is_refused(tmp_path, server):
    files = cifar_files()
    packed = archive_of({name: c for name, c in files.items() if name != "test_batch.bin"})
    server.files["a.tar.gz"] = packed
    table = archive_download(packed, files, server.url + "a.tar.gz")

    message = refusal(DamagedFile, small_cifar(), tmp_path, downloads=[table])

    assert "cifar-10-binary.tar.gz does not contain test_batch.bin" in message
    assert list(tmp_path.iterdir()) == []
