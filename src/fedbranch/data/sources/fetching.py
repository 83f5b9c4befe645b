"""Download published files over HTTP, and put them into the data folder.

A file is downloaded into a temporary folder inside the set's own folder. It is renamed into its
place when it is complete and its SHA-256 is the published one. An interruption therefore leaves
whole files only, and the next call fetches the others.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from fedbranch.data.sources.downloads import Download
from fedbranch.data.sources.files import SUMS_FILE, Source, find
from fedbranch.errors import CannotWrite, DamagedFile, MissingData
from fedbranch.storage.atomic import make_folder, replace_file, sync

__all__ = ["OnProgress", "fetch_missing"]

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with a file's name, the bytes that have arrived, and all its bytes (0: unknown)."""

CHUNK_BYTES = 1 << 18  # read and written at once
SILENCE_S = 30.0  # an address that sends nothing for this long has failed


def fetch_missing(
    source: Source,
    data_dir: str | Path | None = None,
    *,
    downloads: Sequence[Download] | None = None,
    on_progress: OnProgress | None = None,
) -> list[Path]:
    """Download the files of a set that are not in the data folder.

    Needs the extra ``[data]`` if a file is missing.

    Parameters
    ----------
    source
        The data set.
    data_dir
        By default :func:`default_data_dir`. It is made if it does not exist.
    downloads
        The published files, with their hashes and addresses; by default those of the set.
    on_progress
        Called while a file arrives, with its name, the bytes so far and all its bytes.

    Returns
    -------
    list of Path
        The files that were added, in the order in which they arrived.

    Raises
    ------
    MissingData
        If a file has no address, no address answers, or ``pooch`` is not installed.
    DamagedFile
        If no address has the published file: every copy has another SHA-256.
    CannotWrite
        If the disk is full or the folder refuses a file.
    """
    missing = {path.name for path in source.missing_files(data_dir)}
    offered = source.downloads if downloads is None else downloads
    without_address = missing.difference(*(download.file_names for download in offered), ())
    folder = source.folder(data_dir)
    if without_address:
        names = ", ".join(name for name in source.file_names if name in without_address)
        raise MissingData(
            f"{source.title} cannot be fetched: it has no public address; "
            f"put {names} into {folder}, plain or .gz"
        )
    added = []
    for download in offered:
        wanted = missing.intersection(download.file_names)
        if wanted:
            added += _fetch(source, download, wanted, folder, on_progress)
            missing -= wanted
    return added


def _fetch(
    source: Source,
    download: Download,
    wanted: set[str],
    folder: Path,
    on_progress: OnProgress | None,
) -> list[Path]:
    make_folder(folder)
    try:
        with (
            _disk_errors(folder),
            tempfile.TemporaryDirectory(prefix=".fetched-", dir=folder) as temporary,
        ):
            path = Path(temporary) / download.name
            _download(source, download, path, folder, on_progress)
            paths = _unpacked(source, download, path, wanted) if download.members else [path]
            return _put(source, paths, folder)
    except BaseException:
        with suppress(OSError):  # it holds other files
            folder.rmdir()
        raise


def _download(
    source: Source, download: Download, path: Path, folder: Path, on_progress: OnProgress | None
) -> None:
    """Download a file from the first address that has the published one."""
    missing = [name for name in source.file_names if find(folder, name) is None]
    put = f"put {', '.join(missing)} into {folder}, plain or .gz"
    try:
        import pooch
        from requests import RequestException
    except ModuleNotFoundError as error:
        raise MissingData(
            f"{source.title} cannot be fetched: that needs {error.name}, so "
            f"`pip install 'fedbranch[data]'`; or {put}"
        ) from error
    failures: list[str] = []
    wrong: list[str] = []
    for url in download.urls:
        progress = False if on_progress is None else _Progress(download.name, on_progress)
        get = pooch.HTTPDownloader(progress, CHUNK_BYTES, timeout=SILENCE_S)
        try:
            get(url, str(path), None)
        except (RequestException, ConnectionError, TimeoutError) as error:
            failures.append(f"{url}: {_reason(error)}")
            continue
        found = pooch.file_hash(str(path), alg="sha256")
        if found == download.sha256:
            return
        wrong.append(f"{url} has {path.stat().st_size:,} bytes with the SHA-256 {found}")
    if wrong:
        raise DamagedFile(
            f"{source.title}: {download.name} is not the published file; expected is the "
            f"SHA-256 {download.sha256}, but {'; '.join(wrong + failures)}; the copy was damaged "
            f"on the way or changed there, and nothing of it was kept; try again, or {put}"
        )
    raise MissingData(
        f"{source.title} cannot be fetched: {download.name} could not be downloaded "
        f"({'; '.join(failures)}); try again with a network, or {put}"
    )


class _Progress:
    """A progress bar as pooch knows it, which passes the numbers on."""

    def __init__(self, name: str, on_progress: OnProgress) -> None:
        self.name = name
        self.on_progress = on_progress
        self.total = 0
        self.num_bytes = 0

    def update(self, num_bytes: int) -> None:
        # pooch counts whole chunks, of which the last is shorter.
        self.num_bytes += num_bytes
        so_far = min(self.num_bytes, self.total) if self.total else self.num_bytes
        self.on_progress(self.name, so_far, self.total)

    def reset(self) -> None:
        self.num_bytes = 0

    def close(self) -> None:
        pass


def _reason(error: Exception) -> str:
    """Describe why an address failed, without the layers of libraries around it."""
    cause = error.args[0] if error.args else error
    return " ".join(str(getattr(cause, "reason", cause)).split())


def _unpacked(source: Source, download: Download, path: Path, wanted: set[str]) -> list[Path]:
    """Unpack the wanted files of an archive beside it."""
    paths = {}
    with tarfile.open(path) as archive:
        for member in archive:  # in their order, so that the archive is unpacked once only
            name = download.members.get(member.name, "")
            content = archive.extractfile(member) if name in wanted else None
            if content is not None:
                paths[name] = path.with_name(name)
                with paths[name].open("wb") as file:
                    shutil.copyfileobj(content, file, CHUNK_BYTES)
    lacking = sorted(wanted.difference(paths))
    if lacking:
        raise DamagedFile(
            f"{source.title}: {download.name} does not contain {', '.join(lacking)}; nothing of it "
            "was kept"
        )
    return list(paths.values())


def _put(source: Source, paths: list[Path], folder: Path) -> list[Path]:
    """Rename complete files into their places, after a line for each in ``SHA256SUMS``."""
    sums = source.recorded_sums(folder)
    for path in paths:
        with path.open("rb") as file:
            sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        sync(path)
    listed = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    # Written in the temporary folder: two processes that fetch at once must not share a file.
    list_path = paths[0].with_name(SUMS_FILE)
    replace_file(list_path, listed.encode())
    for path in (list_path, *paths):
        path.replace(folder / path.name)
    added = [folder / path.name for path in paths]
    sync(added[-1])
    return added


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except CannotWrite:
        raise
    except OSError as error:
        raise CannotWrite(
            error.errno,
            f"nothing can be written into {folder}: {error.strerror}; make room there, or choose "
            "another data folder",
            str(folder),
        ) from error
