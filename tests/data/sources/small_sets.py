"""Small data sets, written in their true formats."""

import csv
import hashlib
import io
import json
import struct

import numpy as np

from fedbranch.data.sources.downloads import Download
from fedbranch.data.sources.images import CifarImages, IdxImages
from fedbranch.data.sources.texts import NewsTexts, RoleTexts

IDX_ROWS = {"train": 12, "test": 10}
CIFAR_ROWS_PER_FILE = 10
# An address, so that messages offer to fetch the set; no test may use it.
NO_SERVER = (Download(name="published.gz", sha256="0" * 64, urls=("http://127.0.0.1:9/",)),)


def drawn_images(part, shape, num_rows):
    rng = np.random.default_rng([len(part), num_rows])
    images = rng.integers(0, 256, (num_rows, *shape), dtype=np.uint8)
    return images, np.arange(num_rows, dtype=np.uint8) % 10


def idx(array):
    """An idx file, put together by hand."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def idx_files():
    files = {}
    for part, stem in (("train", "train"), ("test", "t10k")):
        images, labels = drawn_images(part, (28, 28), IDX_ROWS[part])
        files[f"{stem}-images-idx3-ubyte"] = idx(images)
        files[f"{stem}-labels-idx1-ubyte"] = idx(labels)
    return files


def cifar_files():
    names = [*(f"data_batch_{i}.bin" for i in range(1, 4)), "test_batch.bin"]
    files = {}
    for name in names:
        images, labels = drawn_images(name, (3, 32, 32), CIFAR_ROWS_PER_FILE)
        images[:, 0, 0, 0] = len(files)  # so that no two files are the same
        files[name] = b"".join(
            bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True)
        )
    return files


def small_mnist(downloads=NO_SERVER):
    return IdxImages(
        name="mnist",
        title="Small MNIST",
        folders=("mnist", "MNIST/raw"),
        published_rows=IDX_ROWS,
        published={name: sha256(content) for name, content in idx_files().items()},
        downloads=downloads,
    )


def small_cifar(downloads=NO_SERVER):
    files = cifar_files()
    return CifarImages(
        name="cifar10",
        title="Small CIFAR-10",
        folders=("cifar-10-batches-bin",),
        parts={"train": tuple(files)[:-1], "test": tuple(files)[-1:]},
        published_rows={"train": 3 * CIFAR_ROWS_PER_FILE, "test": CIFAR_ROWS_PER_FILE},
        rows_per_file=CIFAR_ROWS_PER_FILE,
        published={name: sha256(content) for name, content in files.items()},
        downloads=downloads,
    )


ARTICLES = {
    "train": [
        (3, 'Oil "soars", again', "Crude, at $50\\a barrel"),
        (1, "Wahlen in Österreich", "Votes are\u2028counted"),
        (2, "Cup final", "3:2"),
        (4, "Probe lands", "On Mars"),
    ],
    "test": [(4, "Chips", "Smaller"), (1, "Summit", "No result")],
}


def small_news(downloads=NO_SERVER):
    return NewsTexts(
        name="ag_news",
        title="Small AG-News",
        folders=("ag_news",),
        parts={"train": ("train.csv",), "test": ("test.csv",)},
        published_rows={part: len(rows) for part, rows in ARTICLES.items()},
        topics=("World", "Sports", "Business", "Sci/Tech"),
        downloads=downloads,
    )


def news_csv(part, columns=3):
    text = io.StringIO(newline="")
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    for topic, title, description in ARTICLES[part]:
        texts = [title, description] if columns == 3 else [f"{title} {description}"]
        writer.writerow([topic, *texts])
    return text.getvalue().encode()


ROLES = [
    {"play": "hamlet", "role": "HAMLET", "speeches": ["To be,\nor not to be", "Words, words"]},
    {"play": "hamlet", "role": "OPHELIA", "speeches": ["My lord\u2028?"]},
    {"play": "lear", "role": "FOOL", "speeches": ["Nuncle"]},
]


def small_plays():
    return RoleTexts(
        name="shakespeare",
        title="Small Shakespeare",
        folders=("shakespeare",),
        parts={"all": ("roles.jsonl",)},
    )


def roles_jsonl(roles=ROLES):
    return "".join(json.dumps(role, ensure_ascii=False) + "\n" for role in roles).encode()


def put(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
