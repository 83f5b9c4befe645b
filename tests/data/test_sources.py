"""Data sets from files in their own formats: what is read, and what is refused."""

import gzip
import json
import shutil

import numpy as np
import pytest

from data.small_sets import (
    ARTICLES,
    ROLES,
    cifar_files,
    idx,
    idx_files,
    news_csv,
    put,
    roles_jsonl,
    sha256,
    small_cifar,
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


@pytest.fixture
def cifar_dir(tmp_path):
    put(tmp_path / "cifar-10-batches-bin", cifar_files())
    return tmp_path


def refusal(load, *arguments):
    with pytest.raises(DamagedFile) as caught:
        load(*arguments)
    return str(caught.value)


def in_gzip(path):
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


# Images


def test_idx_files_become_floats_and_labels(mnist_dir):
    x, y = small_mnist().load("test", mnist_dir)

    content = idx_files()["t10k-images-idx3-ubyte"]
    assert (x.dtype, x.shape, y.dtype) == (np.float32, (10, 1, 28, 28), np.int64)
    assert y.tolist() == list(range(10))
    assert x[0, 0, 0, 0] == np.float32(content[16]) / np.float32(255)
    assert x[9, 0, 27, 27] == np.float32(content[-1]) / np.float32(255)
    assert 0 <= x.min() < x.max() <= 1


def test_raw_images_are_the_bytes_of_the_file(mnist_dir):
    x, _ = small_mnist().load("train", mnist_dir, raw=True)

    assert x.dtype == np.uint8
    assert x.tobytes() == idx_files()[TRAIN_IMAGES][16:]


def test_a_cifar_row_is_a_label_and_three_planes(cifar_dir):
    x, y = small_cifar().load("train", cifar_dir, raw=True)

    files = cifar_files()
    assert (x.shape, y.dtype) == ((30, 3, 32, 32), np.int64)
    second = files["data_batch_1.bin"][3073:6146]
    assert y[1] == second[0]
    assert x[1].tobytes() == second[1:]
    assert x[20].tobytes() == files["data_batch_3.bin"][1:3073]


def test_floats_are_the_bytes_divided_by_255(cifar_dir):
    floats, raw = (small_cifar().load("train", cifar_dir, raw=raw).x for raw in (False, True))

    assert floats.dtype == np.float32
    np.testing.assert_array_equal(floats, raw.astype(np.float32) / 255)


@pytest.mark.parametrize("raw", [False, True])
def test_what_was_read_can_be_written_to_and_lies_in_one_piece(mnist_dir, cifar_dir, raw):
    for source in (small_mnist(), small_cifar()):
        x, y = source.load("train", mnist_dir, raw=raw)
        for array in (x, y):
            assert array.flags.writeable
            assert array.flags.c_contiguous


def test_packed_files_give_the_same(mnist_dir, cifar_dir):
    cases = [
        (small_mnist(), mnist_dir / "mnist"),
        (small_cifar(), cifar_dir / "cifar-10-batches-bin"),
    ]
    for source, folder in cases:
        plain = source.load("train", mnist_dir)
        for path in list(folder.iterdir()):
            in_gzip(path)

        packed = source.load("train", mnist_dir)

        np.testing.assert_array_equal(packed.x, plain.x)
        np.testing.assert_array_equal(packed.y, plain.y)


def test_a_part_that_does_not_exist_is_named():
    for load in (sources.mnist, sources.cifar10, sources.ag_news):
        with pytest.raises(ValueError, match="part is 'validation'; give 'train' or 'test'"):
            load("validation")


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (TRAIN_IMAGES, lambda c: c[:-1], "9,423 of 9,424 bytes: it was cut"),
        (TRAIN_IMAGES, lambda c: c[:9], "9 of 9,424 bytes: it was cut"),
        (TRAIN_IMAGES, lambda c: b"", "0 of 9,424 bytes: it was cut"),
        (TRAIN_IMAGES, lambda c: c + b"\0", "more than the 9,424 bytes there should be"),
        (TRAIN_IMAGES, lambda c: b"<!DOCTYPE html>" + c, "begins with 3c21444f"),
        (TRAIN_IMAGES, lambda c: c[:3] + b"\x02" + c[4:], "begins with 00000802"),
        (TRAIN_IMAGES, lambda c: c[:4] + b"\xff" * 4 + c[8:], "begins with 00000803 ffffffff"),
        (TRAIN_IMAGES, lambda c: c[:-1] + bytes([c[-1] ^ 1]), "is not the published file"),
        (
            TRAIN_LABELS,
            lambda c: c[:10] + b"\x0a" + c[11:],
            "the label 10 in row 2; labels are 0-9",
        ),
        (TRAIN_LABELS, lambda c: c[:8] + c[9:] + b"\0", "is not the published file"),
        (TRAIN_LABELS, lambda c: idx(np.zeros(11, np.uint8)), "begins with 00000801 0000000b"),
    ],
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_damaged_idx_file_is_never_used(mnist_dir, name, damage, said, is_packed):
    path = mnist_dir / "mnist" / name
    path.write_bytes(damage(path.read_bytes()))
    if is_packed:
        in_gzip(path)

    message = refusal(small_mnist().load, "train", mnist_dir)

    assert said in message
    assert str(path) in message
    assert "remove it and get it again, for example with `fedbranch data mnist`" in message


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda c: c[:-3073], "27,657 of 30,730 bytes: it was cut"),
        (lambda c: c + c[:3073], "more than the 30,730 bytes there should be"),
        (lambda c: c[:3073] + b"\xc8" + c[3074:], "the label 200 in row 1; labels are 0-9"),
        (lambda c: c[:-1] + bytes([c[-1] ^ 1]), "is not the published file"),
        (lambda c: cifar_files()["data_batch_1.bin"], "is not the published file"),
    ],
)
def test_a_damaged_cifar_file_is_never_used(cifar_dir, damage, said):
    path = cifar_dir / "cifar-10-batches-bin" / "data_batch_2.bin"
    path.write_bytes(damage(path.read_bytes()))

    message = refusal(small_cifar().load, "train", cifar_dir)

    assert said in message
    assert str(path) in message


@pytest.mark.parametrize(
    "damage", [lambda c: c[:-9], lambda c: c[:40] + b"\0" * 40 + c[80:], bytes.swapcase]
)
def test_a_broken_gzip_is_never_used(mnist_dir, damage):
    path = mnist_dir / "mnist" / TRAIN_IMAGES
    in_gzip(path)
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(damage(packed.read_bytes()))

    assert f"{packed} cannot be unpacked" in refusal(small_mnist().load, "train", mnist_dir)


def test_a_file_that_unpacks_to_gigabytes_is_not_unpacked(mnist_dir):
    path = mnist_dir / "mnist" / f"{TRAIN_LABELS}.gz"
    (mnist_dir / "mnist" / TRAIN_LABELS).unlink()
    labels = idx_files()[TRAIN_LABELS]
    path.write_bytes(gzip.compress(labels + bytes(10**8)))

    message = refusal(small_mnist().load, "train", mnist_dir)

    assert "unpacks to more than the 20 bytes there should be" in message


def test_the_pickles_of_cifar_are_not_touched(tmp_path):
    python_version = tmp_path / "cifar-10-batches-py"
    put(python_version, {"batches.meta": b"", "data_batch_1": b"cos\nsystem\n(S'false'\ntR."})

    for data_dir in (tmp_path, python_version):
        with pytest.raises(MissingData, match=r"is the Python version, made of pickles"):
            small_cifar().load("train", data_dir)


# Texts


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("is_packed", [False, True])
def test_news_have_title_and_description_in_one_text(tmp_path, columns, is_packed):
    put(tmp_path / "ag_news", {"train.csv": news_csv("train", columns)})
    if is_packed:
        in_gzip(tmp_path / "ag_news" / "train.csv")

    texts, topics = small_news().load("train", tmp_path)

    assert texts == [f"{title} {description}" for _, title, description in ARTICLES["train"]]
    assert topics.tolist() == [2, 0, 1, 3]
    assert topics.dtype == np.int64


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b'"1","a"\n"5","b"\n', "has the class '5' and the text 'b' in line 2; classes are 1-4"),
        (b'"0","a"\n', "has the class '0'"),
        (b"Class Index,Title,Description\n", "has the class 'Class Index'"),
        (b'"1","a"\n"2"\n', "has 1 columns in line 2"),
        (b'"1","a","b"\n"2","c"\n', "has 2 columns in line 2"),
        (b'"1","a","b","c"\n', "has 4 columns in line 1"),
        (b'"1","a"\n\n"2","b"\n', "has 0 columns in line 2"),
        (b'"1","a"\n"2","b', "is no csv from line 2 on (unexpected end of data)"),
        (b'"1","a"\n"2","b"c"\n', "is no csv from line 2 on"),
        (b'"1"," "\n', "no text is empty"),
        (b'"1","a\xff"\n', "is no UTF-8 text"),
        (b'"1","' + b"a" * 200_000 + b'"\n', "is no csv from line 1 on (field larger"),
    ],
)
def test_a_damaged_csv_is_never_used(tmp_path, content, said):
    put(tmp_path / "ag_news", {"train.csv": content})

    message = refusal(small_news().load, "train", tmp_path)

    assert said in message
    assert str(tmp_path / "ag_news" / "train.csv") in message


@pytest.mark.parametrize("num_bytes", range(1, len(news_csv("test")) - 1, 3))
def test_a_csv_that_was_cut_is_noticed_wherever_it_was_cut(tmp_path, num_bytes):
    content = news_csv("test")
    put(tmp_path / "ag_news", {"test.csv": content[:num_bytes]})
    ends_with_a_row = content[:num_bytes].rstrip(b"\n") == content.split(b"\n")[0]

    if ends_with_a_row:  # then only a recorded sum can tell
        put(tmp_path / "ag_news", {SUMS_FILE: f"{sha256(content)}  test.csv\n".encode()})

    refusal(small_news().load, "test", tmp_path)


@pytest.mark.parametrize("is_packed", [False, True])
def test_roles_are_read_with_all_their_lines(tmp_path, is_packed):
    put(tmp_path / "shakespeare", {"roles.jsonl": roles_jsonl()})
    if is_packed:
        in_gzip(tmp_path / "shakespeare" / "roles.jsonl")

    roles = small_plays().load(tmp_path)

    assert [role._asdict() for role in roles] == ROLES


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (roles_jsonl()[:-20], "has no role in line 3"),
        (b"[1, 2]\n", "has no role in line 1"),
        (b"[" * 100_000, "has no role in line 1"),
        (b'{"play": "a", "role": "b"}\n', "has no role in line 1 (KeyError('speeches'))"),
        (roles_jsonl([{"play": 1, "role": "b", "speeches": ["c"]}]), "has a role in line 1 whose"),
        (roles_jsonl([{"play": "a", "role": "b", "speeches": "c"}]), "has a role in line 1 whose"),
        (roles_jsonl([{"play": "a", "role": "b", "speeches": []}]), "has a role in line 1 whose"),
        (roles_jsonl([{"play": "a", "role": "b", "speeches": [7]}]), "has a role in line 1 whose"),
        (b'{"play": "\xff"}\n', "is no UTF-8 text"),
    ],
)
def test_damaged_roles_are_never_used(tmp_path, content, said):
    put(tmp_path / "shakespeare", {"roles.jsonl": content})

    assert said in refusal(small_plays().load, tmp_path)


# Where they are


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


# Sums that were recorded


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


def test_look_says_what_is_there_without_reading_it(tmp_path):
    put(tmp_path / "ag_news", {"train.csv": b"anything"})

    news, plays = (sources.look(name, tmp_path) for name in ("ag_news", "shakespeare"))

    assert (news.missing, news.num_bytes, news.checked) == (["test.csv"], 8, None)
    assert (plays.missing, plays.num_bytes) == (["roles.jsonl"], 0)
    assert not sources.is_present("ag_news", tmp_path)
    assert sources.is_present("digits", tmp_path)
    assert json.loads(json.dumps(news.to_json()))["is_complete"] is False


def test_check_says_what_is_in_it(tmp_path):
    files = {"train.csv": news_csv("train"), "test.csv": news_csv("test", columns=2)}
    put(tmp_path / "ag_news", files)

    news = sources.check("ag_news", tmp_path)

    assert news.folder == tmp_path / "ag_news"
    assert (news.parts["train"].rows, news.parts["train"].classes) == (4, 4)
    assert news.parts["train"].published_rows == 120_000
    assert news.parts["test"].num_bytes == len(files["test.csv"])
    assert news.checked == "readable"


def test_digits_are_always_there(tmp_path):
    part = sources.check("digits", tmp_path).parts["all"]

    assert (part.rows, part.classes) == (1797, 10)


def test_an_unknown_set_is_an_error_that_names_the_nearest():
    for function in (sources.look, sources.check, sources.fetch):
        with pytest.raises(ValueError, match="no data set 'mnits'; did you mean 'mnist'"):
            function("mnits")
