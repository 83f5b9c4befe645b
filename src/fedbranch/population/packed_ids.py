"""Client ids in arrays, one after the other, as files have them.

The key of an id is its UTF-8 bytes. Every string has a key of its own, also one that is not valid
Unicode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbranch.population.int_column import checked_vector
from fedbranch.storage.checkpoint import Tensors

__all__ = [
    "MOST_BYTES",
    "checked_keys",
    "ids_between",
    "keys_of",
    "pack_ids",
    "pack_keys",
    "unpack_ids",
]

MOST_BYTES = 2**32 - 1  # of the ids that are packed together


def keys_of(client_ids: Iterable[str]) -> list[bytes]:
    """Return the keys of ids."""
    return [client_id.encode(errors="surrogatepass") for client_id in client_ids]


def ids_between(
    content: NDArray[np.uint8], starts: NDArray[np.integer[Any]], ends: NDArray[np.integer[Any]]
) -> list[str]:
    """Read the ids whose keys begin and end at these places of the packed content."""
    packed = content.data
    return [
        str(packed[start:end], "utf-8", "surrogatepass")
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]


def pack_ids(client_ids: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Pack ids into arrays, for a file.

    Returns
    -------
    dict
        ``packed``, the keys one after the other, and ``ends``, the place where each ends.

    Examples
    --------
    >>> tensors = pack_ids(["ada", "bo"])
    >>> tensors["packed"].tobytes(), tensors["ends"]
    (b'adabo', array([3, 5], dtype=uint32))
    >>> unpack_ids(tensors)
    ['ada', 'bo']
    """
    return pack_keys(keys_of(client_ids))


def pack_keys(keys: Sequence[bytes]) -> dict[str, NDArray[Any]]:
    """Pack keys as :func:`pack_ids` does ids."""
    content = b"".join(keys)
    assert len(content) <= MOST_BYTES, f"{len(keys)} ids have {len(content):,} bytes"
    ends = np.cumsum([len(key) for key in keys], dtype=np.uint32)
    return {"packed": np.frombuffer(content, dtype=np.uint8), "ends": ends}


def checked_keys(tensors: Tensors) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """Check packed keys of a file, which may hold anything, so that each can be read alone.

    Returns
    -------
    tuple
        The keys one after the other, and the place where each ends.

    Raises
    ------
    ValueError, KeyError
        If these are not keys of ids.
    """
    content = checked_vector(tensors["packed"], np.uint8)
    ends = checked_vector(tensors["ends"], np.uint32)
    if not len(ends) or (ends[1:] < ends[:-1]).any() or ends[-1] != len(content):
        raise ValueError(f"{len(ends)} ids do not make up {len(content)} bytes")
    str(content.data, "utf-8", "surrogatepass")
    inner = ends[ends < len(content)]
    if (content[inner] & 0xC0 == 0x80).any():  # not the first byte of a character
        raise ValueError("an id begins within a character")
    return content, ends


def unpack_ids(tensors: Tensors) -> list[str]:
    """Read the ids that :func:`pack_ids` put into a file, which may hold anything.

    Raises
    ------
    ValueError, KeyError
        If these are not packed ids.
    """
    content, ends = checked_keys(tensors)
    return ids_between(content, np.concatenate([[0], ends[:-1]]), ends)
