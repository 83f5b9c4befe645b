"""Tensor files that are mapped into memory, and never loaded as a whole.

Pages that were read are released block by block, so that a file may be larger than the memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from fedbranch.errors import DamagedFile
from fedbranch.storage.atomic import CHUNK_BYTES, link_file, replace_file_in_parts

__all__ = ["MOST_HEADER_BYTES", "MappedTensors", "safetensors_header"]

# A tensor takes about 100 bytes of the header. A damaged length must not fill the memory.
MOST_HEADER_BYTES = 8_000_000
FLOAT32 = np.dtype("<f4")


class MappedTensors(Mapping[str, NDArray[np.float32]]):
    """The float32 tensors of a safetensors file, as read-only views of the file itself.

    They stay as they are if the file is removed or replaced by another.

    Parameters
    ----------
    file
        Open for reading; it can be closed afterwards.
    path
        Its name.
    sha256
        SHA-256 of its content, which is not checked here.

    Raises
    ------
    DamagedFile
        If it is no safetensors file, or has tensors that are not float32.
    """

    def __init__(self, file: IO[bytes], path: Path, *, sha256: str) -> None:
        self.path = path
        self.sha256 = sha256
        about = os.fstat(file.fileno())
        self.num_bytes = about.st_size
        self._identity = (about.st_dev, about.st_ino)
        try:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._places = _parsed(self._map)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedFile(f"{path} cannot be read: {error!r}") from error

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        start, shape = self._places[name]
        self._check_length()
        flat = np.frombuffer(self._map, dtype=FLOAT32, count=math.prod(shape), offset=start)
        return flat.reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def blocks(self, name: str, rows_at_once: int) -> Iterator[NDArray[np.float32]]:
        """Read a tensor in blocks of rows; each is released when the next is asked for."""
        start, shape = self._places[name]
        row_bytes = FLOAT32.itemsize * math.prod(shape[1:])
        whole = self[name]
        for first in range(0, shape[0], rows_at_once):
            block = whole[first : first + rows_at_once]
            yield block
            self._release(start + first * row_bytes, len(block) * row_bytes)

    def row(self, name: str, row: int) -> NDArray[np.float32]:
        """Copy one row of a tensor into memory."""
        start, shape = self._places[name]
        row_bytes = FLOAT32.itemsize * math.prod(shape[1:])
        copied: NDArray[np.float32] = self[name][row].copy()
        self._release(start + row * row_bytes, row_bytes)
        return copied

    def parts(self) -> Iterator[bytes]:
        """Read the file's content in chunks, to be written elsewhere."""
        self._check_length()
        for start in range(0, self.num_bytes, CHUNK_BYTES):
            yield self._map[start : start + CHUNK_BYTES]
            self._release(start, min(CHUNK_BYTES, self.num_bytes - start))

    def is_at(self, path: Path) -> bool:
        """Return whether a path is a name of this very file."""
        try:
            about = path.lstat()
        except OSError:
            return False
        return (about.st_dev, about.st_ino) == self._identity and about.st_size == self.num_bytes

    def put(self, path: Path) -> None:
        """Put this content at a path: as a hard link to the file if possible, else as a copy.

        Raises
        ------
        CannotWrite
            If the disk is full, or refuses for another reason.
        DamagedFile
            If the content has changed since it was mapped.
        """
        digest = hashlib.sha256()
        for part in self.parts():
            digest.update(part)
        if digest.hexdigest() != self.sha256:
            raise DamagedFile(
                f"{self.path} was changed while it was in use: its SHA-256 is not the one recorded"
            )
        if not (self.is_at(self.path) and link_file(self.path, path)):
            replace_file_in_parts(path, self.parts(), self.num_bytes)

    def remove(self) -> None:
        """Remove the file's name, unless it now belongs to another file."""
        if self.is_at(self.path):
            with suppress(OSError):  # a file that stays does no harm
                self.path.unlink()

    def _check_length(self) -> None:
        """Raise DamagedFile if the file was cut: reading behind its end would end the process."""
        if self._map.size() != self.num_bytes:
            raise DamagedFile(
                f"{self.path} was cut or changed while it was in use: it has "
                f"{self._map.size():,} bytes instead of {self.num_bytes:,}"
            )

    def _release(self, start: int, num_bytes: int) -> None:
        """Release pages that were read, where the system has a call for it."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = start - start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, start + num_bytes - first)


def safetensors_header(name: str, shape: tuple[int, ...]) -> bytes:
    """Return the header of a safetensors file with one float32 tensor.

    Examples
    --------
    >>> safetensors_header("updates", (2, 3))[8:]
    b'{"updates":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}} '
    """
    num_bytes = FLOAT32.itemsize * math.prod(shape)
    entry = {"dtype": "F32", "shape": list(shape), "data_offsets": [0, num_bytes]}
    text = json.dumps({name: entry}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parsed(content: mmap.mmap) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Find where the tensors of a safetensors file begin, and their shapes."""
    header_bytes = int.from_bytes(content[:8], "little")
    if header_bytes > min(len(content) - 8, MOST_HEADER_BYTES):
        raise ValueError(f"a header of {header_bytes:,} bytes")
    header = json.loads(content[8 : 8 + header_bytes].decode())
    header.pop("__metadata__", None)
    places = {}
    for name, entry in header.items():
        shape, (start, end) = entry["shape"], entry["data_offsets"]
        if entry["dtype"] != "F32" or not all(type(n) is int for n in (*shape, start, end)):
            raise ValueError(f"the tensor {name[:100]!r} is not one of float32 numbers")
        num_bytes = FLOAT32.itemsize * math.prod(shape)
        is_inside = 0 <= start <= end <= len(content) - 8 - header_bytes
        if min(shape, default=0) < 0 or end - start != num_bytes or not is_inside:
            raise ValueError(f"the tensor {name[:100]!r} is not where the header says")
        places[name] = (8 + header_bytes + start, tuple(shape))
    return places
