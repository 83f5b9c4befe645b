"""The files of a published data set: where they are, and whether they are the right ones."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from fedbranch.data.sources.downloads import Download
from fedbranch.errors import DamagedFile, MissingData

__all__ = [
    "SUMS_FILE",
    "Counts",
    "PartOfSet",
    "Source",
    "check_part",
    "default_data_dir",
    "find",
]

PartOfSet: TypeAlias = Literal["train", "test"]

SUMS_FILE = "SHA256SUMS"  # as `sha256sum -c` reads it


class Counts(NamedTuple):
    """Numbers of rows and classes in a part of a data set."""

    rows: int
    classes: int


def default_data_dir() -> Path:
    """Return the data folder that is used if none is given.

    ``$FEDBRANCH_DATA``, or else ``fedbranch`` in the user's cache folder
    (``$XDG_CACHE_HOME`` or ``~/.cache``).
    """
    if chosen := os.environ.get("FEDBRANCH_DATA"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedbranch"


def check_part(part: str) -> None:
    """Refuse a part that no set has."""
    if part not in get_args(PartOfSet):
        raise ValueError(f"part is {part!r}; give 'train' or 'test'")


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """A data set in files of its own format.

    Attributes
    ----------
    name
        As in ``fedbranch data NAME``.
    title
        Its name in messages.
    folders
        Folders inside the data folder that may contain its files. Files are fetched into the
        first.
    parts
        The files of each part. Every file may also be packed, as ``.gz``.
    published
        SHA-256 of the published files, unpacked. A file without one is compared with
        ``SHA256SUMS`` beside it, if that file exists.
    published_rows
        Number of rows of each complete part.
    downloads
        Where its files can be fetched from; empty if they have no public address.
    words
        What a row and a class are called.
    """

    name: str
    title: str
    folders: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]
    published: Mapping[str, str] = field(default_factory=dict)
    published_rows: Mapping[str, int] = field(default_factory=dict)
    downloads: tuple[Download, ...] = ()
    words: tuple[str, str] = ("images", "classes")

    @abstractmethod
    def count(self, part: str, data_dir: str | Path | None = None) -> Counts:
        """Read a part, check it as far as possible, and count its rows and classes."""

    @property
    def file_names(self) -> tuple[str, ...]:
        """All its files, without ``.gz``."""
        return tuple(name for names in self.parts.values() for name in names)

    def folder(self, data_dir: str | Path | None = None) -> Path:
        """Return the folder that contains the set, or into which it is fetched.

        A data folder that has the name of the set's own folder may be that folder itself.
        """
        root = default_data_dir() if data_dir is None else Path(data_dir)
        is_own = root.resolve().name == self.folders[0]
        choices = [*([root] if is_own else []), *(root / folder for folder in self.folders)]
        present = (f for f in choices if any(find(f, name) for name in self.file_names))
        return next(present, choices[0])

    def missing_files(self, data_dir: str | Path | None = None) -> list[Path]:
        """List the files that are missing, both plain and packed."""
        folder = self.folder(data_dir)
        return [folder / name for name in self.file_names if find(folder, name) is None]

    def path(self, file_name: str, data_dir: str | Path | None = None) -> Path:
        """Find a file of the set, plain or packed.

        Raises
        ------
        MissingData
            If it is not in the data folder.
        """
        folder = self.folder(data_dir)
        path = find(folder, file_name)
        if path is None:
            raise MissingData(
                f"{self.title}: {file_name} (or {file_name}.gz) is not in {folder}; "
                f"{self.how_to_get(data_dir)}"
            )
        return path

    def how_to_get(self, data_dir: str | Path | None = None) -> str:
        """Describe how to get the files."""
        put = f"put {', '.join(self.file_names)} there"
        if not self.downloads:
            return f"it cannot be fetched: {put}"
        where = "" if data_dir is None else f" --data-dir {data_dir}"
        return f"fetch it with `fedbranch data {self.name}{where}`, or {put}"

    def read(self, path: Path, *, most_bytes: int | None = None) -> bytes:
        """Read a file, unpacked.

        Parameters
        ----------
        path
            Plain or ``.gz``.
        most_bytes
            Expected length. Of a longer file this length and one byte more are read, so that
            a small ``.gz`` cannot fill the memory.

        Raises
        ------
        DamagedFile
            If it is packed and cannot be unpacked.
        """
        limit = -1 if most_bytes is None else most_bytes + 1
        if path.suffix != ".gz":
            with path.open("rb") as file:
                return file.read(limit)
        try:
            with gzip.open(path) as packed:
                return packed.read(limit)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self.damaged(path, f"cannot be unpacked ({error})") from error

    def check_size(self, path: Path, content: bytes, num_bytes: int) -> None:
        """Refuse content of another length."""
        has = "has" if path.suffix != ".gz" else "unpacks to"
        if len(content) < num_bytes:
            raise self.damaged(path, f"{has} {len(content):,} of {num_bytes:,} bytes: it was cut")
        if len(content) > num_bytes:
            raise self.damaged(path, f"{has} more than the {num_bytes:,} bytes there should be")

    def check_sum(self, path: Path, content: bytes) -> None:
        """Refuse content other than the published or, without that, the recorded one."""
        file_name = path.name.removesuffix(".gz")
        if file_name in self.published:
            found = hashlib.sha256(content).hexdigest()
            if found != self.published[file_name]:
                raise self.damaged(
                    path,
                    f"is not the published file: unpacked, its SHA-256 is {found} instead of "
                    f"{self.published[file_name]}",
                )
        elif path.name in (recorded := self.recorded_sums(path.parent)):
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != recorded[path.name]:
                raise self.damaged(
                    path,
                    f"was changed: its SHA-256 is not the one in {SUMS_FILE} beside it, but {found}",
                )

    def recorded_sums(self, folder: Path) -> dict[str, str]:
        """Read ``SHA256SUMS``, which was written when the files were fetched.

        Returns
        -------
        dict
            File name -> SHA-256; empty without such a file.

        Raises
        ------
        DamagedFile
            If a line is no SHA-256 and file name.
        """
        path = folder / SUMS_FILE
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return {}
        except UnicodeDecodeError as error:
            raise self.damaged(path, f"is no UTF-8 text: {error}") from error
        sums = {}
        for line in lines:
            digest, _, name = line.partition(" ")
            if len(digest) != 64 or not name:
                raise self.damaged(path, f"has the line {line!r}, which is no SHA-256 and file")
            sums[name.lstrip(" *")] = digest.lower()
        return sums

    def damaged(self, path: Path, what: str) -> DamagedFile:
        """Make the error for a file that cannot be used."""
        again = "get it again"
        if self.downloads:
            again += f", for example with `fedbranch data {self.name}`"
        return DamagedFile(f"{path} {what}; remove it and {again}")


def find(folder: Path, file_name: str) -> Path | None:
    """Find a file, plain or packed."""
    choices = (folder / file_name, folder / f"{file_name}.gz")
    return next((path for path in choices if path.is_file()), None)
