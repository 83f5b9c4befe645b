"""Client ids in arrays, one after the other, as files have them.

Ids are bytes there. Whatever a string holds has bytes of its own, also what is not valid Unicode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbranch.population.int_column import checked_array
from fedbranch.storage.checkpoint import Tensors

__all__ = ["MOST_BYTES", "checked_packed", "decoded", "encoded", "packed", "unpacked"]

MOST_BYTES = 2**32 - 1  # of all ids together


def encoded(client_ids: Iterable[str]) -> list[bytes]:
    """Give the bytes of ids."""
    return [client_id.encode(errors="surrogatepass") for client_id in client_ids]


def decoded(
    content: NDArray[np.uint8], starts: NDArray[np.integer[Any]], ends: NDArray[np.integer[Any]]
) -> list[str]:
    """Give the ids that lie between these places."""
    there = content.data
    return [
        str(there[start:end], "utf-8", "surrogatepass")
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]


def packed(keys: Sequence[bytes]) -> dict[str, NDArray[Any]]:
    """Put the bytes of ids one after the other.

    Examples
    --------
    >>> tensors = packed(encoded(["ada", "bo"]))
    >>> tensors["packed"].tobytes(), tensors["ends"]
    (b'adabo', array([3, 5], dtype=uint32))
    >>> unpacked(tensors)
    ['ada', 'bo']
    """
    content = b"".join(keys)
    assert len(content) <= MOST_BYTES, f"{len(keys)} ids have {len(content):,} bytes"
    ends = np.cumsum([len(key) for key in keys], dtype=np.uint32)
    return {"packed": np.frombuffer(content, dtype=np.uint8), "ends": ends}


def checked_packed(tensors: Tensors) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """Read ids of a file, which may hold anything, so that each of them can be read alone.

    Returns
    -------
    tuple
        All ids, and where each ends.

    Raises
    ------
    ValueError, KeyError
        If that cannot be.
    """
    content = checked_array(tensors["packed"], np.uint8)
    ends = checked_array(tensors["ends"], np.uint32)
    if not len(ends) or (ends[1:] < ends[:-1]).any() or ends[-1] != len(content):
        raise ValueError(f"{len(ends)} ids do not make up {len(content)} bytes")
    str(content.data, "utf-8", "surrogatepass")
    inner = ends[ends < len(content)]
    if (content[inner] & 0xC0 == 0x80).any():  # the middle of a character
        raise ValueError("an id begins within a character")
    return content, ends


def unpacked(tensors: Tensors) -> list[str]:
    """Give the ids that :func:`packed` put into a file, which may hold anything.

    Raises
    ------
    ValueError, KeyError
        If that cannot be.
    """
    content, ends = checked_packed(tensors)
    return decoded(content, np.concatenate([[0], ends[:-1]]), ends)
