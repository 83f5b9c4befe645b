"""Images from files in their own formats: what is read, and what is refused."""

import gzip

import numpy as np
import pytest

from data.sources.small_sets import cifar_files, idx, idx_files, put, small_cifar, small_mnist
from fedbranch.data import digits
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


def test_digits_are_the_real_ones():
    x, y = digits()

    assert x.shape == (1797, 1, 8, 8)
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    assert (x.min(), x.max()) == (0, 1)
    assert np.bincount(y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
