"""The data sets by name: list them, look for their files, check and fetch them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbranch.data.sources.downloads import Download
from fedbranch.data.sources.fetching import OnProgress, fetch_missing
from fedbranch.data.sources.files import Source, find
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
    """The files of a part of a data set in the data folder.

    Attributes
    ----------
    num_bytes
        Size of its files on disk.
    missing
        The files that are missing.
    rows, classes
        Numbers of rows and classes; None if the files were not read.
    published_rows
        Number of rows of the complete part, if it is known.
    """

    num_bytes: int
    missing: tuple[str, ...] = ()
    rows: int | None = None
    classes: int | None = None
    published_rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The files of a data set in the data folder.

    Attributes
    ----------
    folder
        None for a set that comes with a library.
    checked
        What is known about the files; None if they were not read.

        - ``"embedded"``: they come with a library.
        - ``"published"``: every file has the SHA-256 of the published one.
        - ``"recorded"``: every file has the SHA-256 that was recorded when it was fetched.
        - ``"readable"``: every file can be read to its end.
    """

    name: str
    title: str
    folder: Path | None
    parts: Mapping[str, PartHolding]
    words: tuple[str, str]
    checked: Checked | None = None

    @property
    def missing(self) -> list[str]:
        """The files that are missing."""
        return [name for part in self.parts.values() for name in part.missing]

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(part.num_bytes for part in self.parts.values())

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
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
    """Find the files of a data set without reading them.

    Parameters
    ----------
    name
        One of :data:`NAMES`.
    data_dir
        The data folder; by default :func:`default_data_dir`.

    Raises
    ------
    ValueError
        If no data set has this name.

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
    """Return whether all files of a data set exist, without reading them.

    Parameters and the ``ValueError`` are those of :func:`look`.
    """
    return not look(name, data_dir).missing


def check(name: str, data_dir: str | Path | None = None) -> Holding:
    """Read a data set, check it as far as possible, and count its rows.

    Parameters and the ``ValueError`` are those of :func:`look`.

    Raises
    ------
    MissingData
        If a file is missing.
    DamagedFile
        If a file is cut, damaged, or not the published or recorded one.
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
    name: str,
    data_dir: str | Path | None = None,
    *,
    downloads: Sequence[Download] | None = None,
    on_progress: OnProgress | None = None,
) -> Holding:
    """Download the missing files of a data set, and check all of it.

    Needs the extra ``[data]`` if a file is missing. A file that exists is not downloaded again.

    Parameters
    ----------
    name, data_dir
        As for :func:`look`.
    downloads
        The published files, with their hashes and addresses; by default those of the set.
    on_progress
        Called while a file arrives, with its name, the bytes so far and all its bytes (0 if
        unknown).

    Raises
    ------
    MissingData
        If a file cannot be fetched; the message says which files to put where.
    DamagedFile
        If a file is cut, damaged, or not the published or recorded one.
    CannotWrite
        If the disk is full or the folder refuses a file.
    """
    _check_name(name)
    if name in SOURCES:
        fetch_missing(SOURCES[name], data_dir, downloads=downloads, on_progress=on_progress)
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
