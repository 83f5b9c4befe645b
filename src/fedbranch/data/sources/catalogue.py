"""The data sets by name: which there are, what of them is there, and whether it is right."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbranch.data.sources.files import Source, find
from fedbranch.data.sources.hub import LoadDataset, fetch_missing
from fedbranch.data.sources.images import CIFAR10, FASHION_MNIST, MNIST, digits
from fedbranch.data.sources.texts import AG_NEWS, SHAKESPEARE

__all__ = ["NAMES", "SOURCES", "Holding", "PartHolding", "check", "fetch", "is_present", "look"]

SOURCES: Mapping[str, Source] = {
    source.name: source for source in (MNIST, FASHION_MNIST, CIFAR10, AG_NEWS, SHAKESPEARE)
}
NAMES = ("digits", *SOURCES)

Checked = Literal["embedded", "published", "recorded", "readable"]


@dataclass(frozen=True, kw_only=True)
class PartHolding:
    """What is there of a part of a data set.

    Attributes
    ----------
    num_bytes
        Of its files, as they are on disk.
    missing
        The files that are not there.
    rows, classes
        None if nobody has looked into the files.
    published_rows
        How many rows it has in full, where that is known.
    """

    num_bytes: int
    missing: tuple[str, ...] = ()
    rows: int | None = None
    classes: int | None = None
    published_rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What is there of a data set.

    Attributes
    ----------
    folder
        None for a set that comes with a library.
    checked
        How far it is known to be right: ``"embedded"`` in a library, every file is the
        ``"published"`` one, every file is as it was ``"recorded"`` when it was written, or
        every file is ``"readable"`` to its end; None if nobody has looked into the files.
    """

    name: str
    title: str
    folder: Path | None
    parts: Mapping[str, PartHolding]
    words: tuple[str, str]
    checked: Checked | None = None

    @property
    def missing(self) -> list[str]:
        """The files that are not there."""
        return [name for part in self.parts.values() for name in part.missing]

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(part.num_bytes for part in self.parts.values())

    def to_json(self) -> dict[str, Any]:
        """Describe it for machines."""
        return {
            "name": self.name,
            "title": self.title,
            "folder": None if self.folder is None else str(self.folder),
            "is_complete": not self.missing,
            "checked": self.checked,
            "num_bytes": self.num_bytes,
            "parts": {
                name: {
                    "rows": part.rows,
                    "published_rows": part.published_rows,
                    "classes": part.classes,
                    "num_bytes": part.num_bytes,
                    "missing": list(part.missing),
                }
                for name, part in self.parts.items()
            },
        }


def look(name: str, data_dir: str | Path | None = None) -> Holding:
    """Say which files of a data set are there, without reading them.

    Parameters
    ----------
    name
        One of :data:`NAMES`.
    data_dir
        The data folder; by default :func:`default_data_dir`.

    Raises
    ------
    ValueError
        If there is no such data set.

    Examples
    --------
    >>> look("digits").missing
    []
    """
    _check_name(name)
    if name == "digits":
        return _digits()
    source = SOURCES[name]
    folder = source.folder(data_dir)
    return Holding(
        name=name,
        title=source.title,
        folder=folder,
        words=source.words,
        parts={part: _part(source, part, folder) for part in source.parts},
    )


def is_present(name: str, data_dir: str | Path | None = None) -> bool:
    """Say whether all files of a data set are there, without reading them.

    Parameters and the ``ValueError`` are those of :func:`look`.
    """
    return not look(name, data_dir).missing


def check(name: str, data_dir: str | Path | None = None) -> Holding:
    """Read a data set, check it as far as possible, and say what is in it.

    Parameters and the ``ValueError`` are those of :func:`look`.

    Raises
    ------
    MissingData
        If a file is not there.
    DamagedFile
        If a file is cut, damaged, or not what was published or recorded.
    """
    _check_name(name)
    if name == "digits":
        labels = digits().y
        return _digits(rows=len(labels), classes=len(np.unique(labels)))
    source = SOURCES[name]
    folder = source.folder(data_dir)
    parts = {}
    for part in source.parts:
        counts = source.count(part, data_dir)
        parts[part] = _part(source, part, folder, rows=counts.rows, classes=counts.classes)
    return Holding(
        name=name,
        title=source.title,
        folder=folder,
        words=source.words,
        parts=parts,
        checked=_how_far(source, folder),
    )


def fetch(
    name: str, data_dir: str | Path | None = None, *, load_dataset: LoadDataset | None = None
) -> Holding:
    """Fetch what is missing of a data set from the Hugging Face hub, and check all of it.

    Needs the extra ``[data]`` if anything is missing. The rows are written as the files that
    the set was published as, whole or not at all.

    Parameters
    ----------
    name, data_dir
        As for :func:`look`.
    load_dataset
        Called as ``load_dataset(hub_id, split=part)``; by default ``datasets.load_dataset``.

    Raises
    ------
    MissingData
        If it cannot be fetched; it says which files to put where.
    DamagedFile
        If a file is cut, damaged, or not what was published or recorded.
    """
    _check_name(name)
    if name in SOURCES:
        fetch_missing(SOURCES[name], data_dir, load_dataset=load_dataset)
    return check(name, data_dir)


def _check_name(name: str) -> None:
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"there is no data set {name!r}; {hint}data sets: {', '.join(NAMES)}")


def _digits(rows: int | None = None, classes: int | None = None) -> Holding:
    return Holding(
        name="digits",
        title="Digits",
        folder=None,
        words=("images", "classes"),
        parts={"all": PartHolding(num_bytes=0, rows=rows, classes=classes)},
        checked="embedded",
    )


def _part(
    source: Source, part: str, folder: Path, rows: int | None = None, classes: int | None = None
) -> PartHolding:
    found = {name: find(folder, name) for name in source.parts[part]}
    return PartHolding(
        num_bytes=sum(path.stat().st_size for path in found.values() if path is not None),
        missing=tuple(name for name, path in found.items() if path is None),
        rows=rows,
        classes=classes,
        published_rows=source.published_rows.get(part),
    )


def _how_far(source: Source, folder: Path) -> Checked:
    if set(source.file_names) <= set(source.published):
        return "published"
    recorded = source.recorded_sums(folder)
    paths = [find(folder, name) for name in source.file_names]
    return "recorded" if all(p is not None and p.name in recorded for p in paths) else "readable"
