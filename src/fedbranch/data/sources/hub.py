"""Data sets from the Hugging Face hub, turned into the files that they were published as.

So there is one way to read a set, wherever it came from, and its SHA-256 can be compared.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedbranch.data.sources.files import SUMS_FILE, Source, find
from fedbranch.data.sources.images import CifarImages, IdxImages, Images, idx_header
from fedbranch.data.sources.texts import NewsTexts
from fedbranch.errors import DamagedFile, MissingData
from fedbranch.storage.atomic import replace_file

__all__ = ["HubRow", "LoadDataset", "fetch_missing"]

HubRow: TypeAlias = Mapping[str, Any]  # column -> value, of the data set's own type
LoadDataset: TypeAlias = Callable[..., Iterable[HubRow]]

IMAGE_COLUMNS = ("image", "img")


def fetch_missing(
    source: Source,
    data_dir: str | Path | None = None,
    *,
    load_dataset: LoadDataset | None = None,
) -> bool:
    """Fetch the parts of a set that are not complete in the data folder.

    Parameters
    ----------
    source
        The data set.
    data_dir
        By default :func:`default_data_dir`. Made if it is not there.
    load_dataset
        Called as ``load_dataset(hub_id, split=part)``; by default that of Hugging Face's
        ``datasets``.

    Returns
    -------
    bool
        Whether anything was missing.

    Raises
    ------
    MissingData
        If the set is on no hub, the hub cannot be reached or ``datasets`` is not installed.
    DamagedFile
        If the hub's rows are not those of the published set; nothing is written then.
    """
    folder = source.folder(data_dir)
    missing = [
        part
        for part, names in source.parts.items()
        if any(find(folder, name) is None for name in names)
    ]
    if not missing:
        return False
    files: dict[str, bytes] = {}
    for part in missing:
        files |= packed(source, part, _rows(source, part, data_dir, load_dataset))
    _put(source, folder, files)
    return True


def _rows(
    source: Source, part: str, data_dir: str | Path | None, load_dataset: LoadDataset | None
) -> Iterable[HubRow]:
    names = ", ".join(path.name for path in source.missing_files(data_dir))
    put = f"put {names} into {source.folder(data_dir)}, plain or .gz"
    if source.hub_id is None:
        raise MissingData(f"{source.title} is on no hub and cannot be fetched; {put}")
    if load_dataset is None:
        load_dataset = _datasets(source, put)
    try:
        return load_dataset(source.hub_id, split=part)
    except Exception as error:  # without a network these come from several libraries
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise MissingData(
            f"{source.title} cannot be fetched: the hub did not give {source.hub_id} "
            f"({said}); try again with a network, or {put}"
        ) from error


def _datasets(source: Source, put: str) -> LoadDataset:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise MissingData(
            f"{source.title} cannot be fetched: that needs {error.name}, so "
            f"`pip install 'fedbranch[data]'`; or {put}"
        ) from error
    load: LoadDataset = datasets.load_dataset
    return load


def packed(source: Source, part: str, rows: Iterable[HubRow]) -> dict[str, bytes]:
    """Turn the hub's rows of a part into the files of the set's own format."""
    if isinstance(source, IdxImages):
        return _idx_files(source, part, rows)
    if isinstance(source, CifarImages):
        return _cifar_files(source, part, rows)
    assert isinstance(source, NewsTexts)
    return _csv_file(source, part, rows)


def _idx_files(source: IdxImages, part: str, rows: Iterable[HubRow]) -> dict[str, bytes]:
    images, labels = _images(source, part, rows)
    images_file, labels_file = source.parts[part]
    files = {
        images_file: idx_header((len(images), *source.shape[1:])) + images.tobytes(),
        labels_file: idx_header((len(labels),)) + labels.tobytes(),
    }
    for name, content in files.items():
        if _sha256(content) != source.published[name]:
            raise _unexpected(source, f"its {part} part does not give {name} with its SHA-256")
    return files


def _cifar_files(source: CifarImages, part: str, rows: Iterable[HubRow]) -> dict[str, bytes]:
    images, labels = _images(source, part, rows)
    table = np.concatenate([labels[:, None], images.reshape(len(images), -1)], axis=1)
    # The hub has whole files in another order; which is which, their sums say.
    names = {source.published[name]: name for name in source.parts[part]}
    blocks = [block.tobytes() for block in np.split(table, len(names))]
    files = {names[_sha256(block)]: block for block in blocks if _sha256(block) in names}
    if len(files) < len(names):
        lacking = ", ".join(sorted(set(source.parts[part]) - set(files)))
        raise _unexpected(source, f"its {part} part does not give {lacking} with its SHA-256")
    return files


def _csv_file(source: NewsTexts, part: str, rows: Iterable[HubRow]) -> dict[str, bytes]:
    text = io.StringIO(newline="")
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    num_rows = 0
    for num_rows, row in enumerate(rows, start=1):
        article = _column(source, row, "text")
        topic = _label(source, row, part, num_rows, len(source.topics))
        writer.writerow([topic + 1, article])
    if num_rows != source.published_rows[part]:
        raise _unexpected(
            source, f"its {part} part has {num_rows:,} rows, not {source.published_rows[part]:,}"
        )
    (file_name,) = source.parts[part]
    # Without a time in its header the same text gives the same bytes.
    return {f"{file_name}.gz": gzip.compress(text.getvalue().encode(), mtime=0)}


def _images(
    source: Images, part: str, rows: Iterable[HubRow]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Collect images, channels before rows and columns, and labels."""
    expected = source.published_rows[part]
    images = np.empty((expected, *source.shape), np.uint8)
    labels = np.empty(expected, np.uint8)
    channels, height, width = source.shape
    shape = (height, width) if channels == 1 else (height, width, channels)
    num_rows = 0
    for num_rows, row in enumerate(rows, start=1):
        if num_rows > expected:
            raise _unexpected(source, f"its {part} part has more than {expected:,} rows")
        image = np.asarray(_column(source, row, *IMAGE_COLUMNS))
        if image.shape != shape or image.dtype != np.uint8:
            raise _unexpected(
                source, f"image {num_rows} of its {part} part is {image.dtype} of {image.shape}"
            )
        images[num_rows - 1] = image[None] if channels == 1 else image.transpose(2, 0, 1)
        labels[num_rows - 1] = _label(source, row, part, num_rows, source.num_classes)
    if num_rows < expected:
        raise _unexpected(source, f"its {part} part has {num_rows:,} rows of {expected:,}")
    return images, labels


def _column(source: Source, row: HubRow, *names: str) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise _unexpected(source, f"its columns are {sorted(row)}, without {' or '.join(names)}")


def _label(source: Source, row: HubRow, part: str, num_rows: int, num_classes: int) -> int:
    label = _column(source, row, "label")
    if label not in range(num_classes):
        raise _unexpected(source, f"row {num_rows} of its {part} part has the label {label!r}")
    return int(label)


def _unexpected(source: Source, what: str) -> DamagedFile:
    return DamagedFile(
        f"{source.hub_id} on the hub is not the published {source.title}: {what}; nothing was "
        f"written, get {', '.join(source.file_names)} from elsewhere"
    )


def _put(source: Source, folder: Path, files: dict[str, bytes]) -> None:
    """Write files whole or not at all, and what they are beside them."""
    sums = source.recorded_sums(folder) if folder.is_dir() else {}
    sums |= {name: _sha256(content) for name, content in files.items()}
    listed = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    folder.mkdir(parents=True, exist_ok=True)
    # In a folder of its own, so that two who fetch at once do not write into one file.
    with tempfile.TemporaryDirectory(prefix=".fetched-", dir=folder) as temporary:
        for name, content in [*files.items(), (SUMS_FILE, listed.encode())]:
            replace_file(Path(temporary) / name, content)
            (Path(temporary) / name).replace(folder / name)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
