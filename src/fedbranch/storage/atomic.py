"""Writing single files as a whole or not at all.

A file is written under a temporary name, synced to the disk and renamed. A line is appended whole
or not at all. If the disk is full or refuses, the error is :class:`fedbranch.errors.CannotWrite`, and
the files are as they were.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from fedbranch.errors import CannotWrite, DamagedFile

if sys.platform != "win32":
    import fcntl


__all__ = [
    "add_tensor_file",
    "append_line",
    "digest_of",
    "has_content",
    "link_file",
    "make_folder",
    "open_plain",
    "replace_file",
    "replace_file_in_parts",
    "sync",
    "tensor_file_name",
]


CHUNK_BYTES = 1 << 20  # of a file that are read or written at once


def open_plain(path: Path, *, num_bytes: int | None = None, may_be_link: bool = True) -> IO[bytes]:
    """Open a plain file to read it.

    Parameters
    ----------
    path
        The file.
    num_bytes
        The size that it must have; None to accept any.
    may_be_link
        Whether to follow a symbolic link.

    Raises
    ------
    DamagedFile
        If it is a folder, a device or the like, cannot be opened, or has another size.
        Or a symbolic link, unless ``may_be_link``.
    FileNotFoundError
        If it is not there.
    """
    try:
        about = path.stat() if may_be_link else path.lstat()
        if not stat.S_ISREG(about.st_mode):
            raise DamagedFile(f"{path} cannot be read: it is no plain file")
        if num_bytes is not None and about.st_size != num_bytes:
            raise DamagedFile(
                f"{path} was cut or changed: it has {about.st_size:,} bytes instead of {num_bytes:,}"
            )
        return path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}") from error


def digest_of(file: IO[bytes], num_bytes: int) -> str:
    """Compute the SHA-256 of the next bytes of a file, in chunks."""
    digest = hashlib.sha256()
    while num_bytes > 0 and (chunk := file.read(min(CHUNK_BYTES, num_bytes))):
        digest.update(chunk)
        num_bytes -= len(chunk)
    return digest.hexdigest()


def has_content(path: Path, content: bytes) -> bool:
    """Return whether a file exists and has exactly this content."""
    return path.exists() and path.stat().st_size == len(content) and path.read_bytes() == content


def make_folder(path: Path) -> None:
    """Make a folder if it does not exist."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(path, 0, error) from error


def replace_file(path: Path, content: bytes, *, is_private: bool = False) -> None:
    """Write a file, so that its name always has all of the old or all of the new content.

    Parameters
    ----------
    path
        The file.
    content
        All of it.
    is_private
        Whether only the owner may read the file.

    Raises
    ------
    CannotWrite
        If the disk is full, or refuses for another reason; no temporary file is left.
    """
    _replace(path, [content], len(content), is_private=is_private)


def replace_file_in_parts(path: Path, parts: Iterable[bytes | memoryview], num_bytes: int) -> None:
    """Write a file as :func:`replace_file` does, part by part.

    Parameters
    ----------
    path
        The file.
    parts
        Its content; each part is written before the next is asked for.
    num_bytes
        Size of all parts together, for the error.

    Raises
    ------
    CannotWrite
        If the disk is full, or refuses for another reason; no temporary file is left.
    """
    _replace(path, parts, num_bytes)


def tensor_file_name(name: str, digest: str) -> str:
    """Return the name of a tensor file, which contains the SHA-256 of its content."""
    return f"{name}-{digest[:16]}.safetensors"


def add_tensor_file(
    folder: Path, name: str, parts: Iterable[bytes | memoryview], num_bytes: int
) -> tuple[IO[bytes], Path, str]:
    """Write a tensor file that is named by its content, into a folder that others may write to.

    Temporary files of this name that a crash has left are removed.

    Parameters
    ----------
    folder
        It must exist.
    name
        Beginning of the file's name.
    parts, num_bytes
        As for :func:`replace_file_in_parts`.

    Returns
    -------
    tuple
        The file, open for reading, as others may remove its name at any time; its path; its
        SHA-256.

    Raises
    ------
    CannotWrite
        If the disk is full, or refuses for another reason; no temporary file is left.
    """
    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes | memoryview]:
        for part in parts:
            digest.update(part)
            yield part

    temporary = folder / (tensor_file_name(name, secrets.token_hex(8)) + ".tmp")
    file = None
    try:
        _clear_abandoned(folder, tensor_file_name(name, "?" * 16) + ".tmp")
        file = _opened_and_locked(temporary)
        _write(temporary, hashed(), os.O_WRONLY)
        path = folder / tensor_file_name(name, digest.hexdigest())
        temporary.replace(path)
        _sync(folder)
    except BaseException as error:
        if file is not None:
            file.close()
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _cannot_write(folder, num_bytes, error) from error
        raise
    return file, path, digest.hexdigest()


def _opened_and_locked(path: Path) -> IO[bytes]:
    """Make a file and lock it while it is open, so that others see that it is in use."""
    while True:
        file = path.open("x+b")
        if sys.platform != "win32":  # which has no such locks
            with suppress(OSError):  # some network file systems have none
                fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another process removed it before it was locked, as abandoned


def _clear_abandoned(folder: Path, pattern: str) -> None:
    """Remove temporary files that no process is writing."""
    if sys.platform == "win32":
        return
    for path in folder.glob(pattern):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def link_file(source: Path, path: Path) -> bool:
    """Add a second name to a file, by a hard link, if the file system can do that.

    Returns
    -------
    bool
        Whether ``path`` is now a name of the file; if not, nothing has changed.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.unlink(missing_ok=True)
        os.link(source, temporary, follow_symlinks=False)
        temporary.replace(path)
        # Renaming does nothing if both are names of one file already.
        temporary.unlink(missing_ok=True)
        _sync(path.parent)
    except (OSError, NotImplementedError):
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        return False
    return True


def _replace(
    path: Path,
    parts: Iterable[bytes | memoryview],
    num_bytes: int,
    *,
    is_private: bool = False,
) -> None:
    temporary = path.with_name(path.name + ".tmp")
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if is_private else os.O_TRUNC)
    try:
        # Left by a crash: another process may have it open, or it is a link to another file.
        temporary.unlink(missing_ok=True)
        _write(temporary, parts, flags, mode=0o600 if is_private else 0o666)
        temporary.replace(path)
        _sync(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _cannot_write(path, num_bytes, error) from error
        raise


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file, all of it or nothing.

    Raises
    ------
    CannotWrite
        If the disk is full, or refuses for another reason; the file is as it was.
    """
    num_before = path.stat().st_size if path.exists() else 0
    try:
        _write(path, [line], os.O_WRONLY | os.O_CREAT | os.O_APPEND, is_synced=False)
    except BaseException as error:
        with suppress(OSError):
            os.truncate(path, num_before)
        if isinstance(error, OSError):
            raise _cannot_write(path, len(line), error) from error
        raise


def sync(path: Path) -> None:
    """Wait until a file and its name are on the disk."""
    try:
        _sync(path)
        _sync(path.parent)
    except OSError as error:
        raise _cannot_write(path, path.stat().st_size, error) from error


def _write(
    path: Path,
    parts: Iterable[bytes | memoryview],
    flags: int,
    *,
    mode: int = 0o666,
    is_synced: bool = True,
) -> None:
    file = os.open(path, flags | getattr(os, "O_BINARY", 0), mode)
    try:
        for part in parts:
            rest = memoryview(part).cast("B")
            while rest:
                rest = rest[os.write(file, rest) :]
        if is_synced:
            os.fsync(file)
    finally:
        os.close(file)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _cannot_write(path: Path, num_bytes: int, error: OSError) -> CannotWrite:
    return CannotWrite(
        error.errno,
        f"{path} cannot be written ({num_bytes:,} bytes): {error.strerror}; make room there, or "
        "see why that folder refuses it, and go on: what was saved before is as it was",
        str(path),
    )
