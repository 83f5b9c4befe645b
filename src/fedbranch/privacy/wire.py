"""Bytes on the wire: fields with their lengths in front, so that there is one way to read them.

A list of byte strings becomes one byte string. There is no other structure and no text to parse.
A field is read only after its length was checked.
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
    """Split a message into its fields.

    Parameters
    ----------
    blob
        The received message.
    sizes
        The length of each field in bytes; None: any length.
    max_bytes
        A longer blob is refused unread.

    Raises
    ------
    DamagedMessage
        If bytes are missing or left over, or a field has another length.

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
            allowed = f"at most {len(blob) - content}" if size is None else f"{size}"
            raise DamagedMessage(
                f"field {number} of a message claims {length} bytes; it must have {allowed}"
            )
        fields.append(blob[content:start])
    if start != len(blob):
        raise DamagedMessage(f"a message goes on for {len(blob) - start} bytes after its end")
    return fields
