"""Bytes on the wire: fields with their lengths in front, so that they can be read in one way only.

A list of byte strings becomes one byte string. There is no other structure, no text to parse,
and nothing is read before its size is known to be small.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from fedbranch.errors import DamagedMessage

__all__ = ["MAX_MESSAGE_BYTES", "pack", "unpack"]

MAX_MESSAGE_BYTES = 1024  # twice the longest message of the key agreement
LENGTH = struct.Struct(">I")


def pack(*fields: bytes) -> bytes:
    """Join fields, each with its length in front.

    Examples
    --------
    >>> pack(b"ab", b"").hex()
    '00000002616200000000'
    >>> pack(b"a", b"b") == pack(b"ab", b"")
    False
    """
    return b"".join(LENGTH.pack(len(field)) + field for field in fields)


def unpack(
    blob: bytes, sizes: Sequence[int | None], *, max_bytes: int = MAX_MESSAGE_BYTES
) -> list[bytes]:
    """Take fields apart again.

    Parameters
    ----------
    blob
        What came over the wire.
    sizes
        How many bytes each field must have; None: any number.
    max_bytes
        A longer blob is not looked at.

    Raises
    ------
    DamagedMessage
        If anything is missing, left over or of another size.

    Examples
    --------
    >>> unpack(pack(b"ab", b"xyz"), [2, None])
    [b'ab', b'xyz']
    """
    if len(blob) > max_bytes:
        raise DamagedMessage(
            f"a message of {len(blob)} bytes; the key agreement has none above {max_bytes}"
        )
    fields, start = [], 0
    for number, size in enumerate(sizes):
        content = start + LENGTH.size
        if content > len(blob):
            raise DamagedMessage(f"a message ends before its field {number}; send it again")
        (length,) = LENGTH.unpack_from(blob, start)
        start = content + length
        if start > len(blob) or (size is not None and length != size):
            raise DamagedMessage(
                f"field {number} of a message claims {length} bytes; "
                f"it must have {'what is left at most' if size is None else size}"
            )
        fields.append(blob[content:start])
    if start != len(blob):
        raise DamagedMessage(f"a message goes on for {len(blob) - start} bytes after its end")
    return fields
