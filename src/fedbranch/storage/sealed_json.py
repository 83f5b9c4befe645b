"""Sealed JSON: documents that end with the SHA-256 of all bytes before it.

So a change of one bit is noticed. It is no signature: a program that can write the file can write
another SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import NoReturn

from fedbranch.errors import DamagedFile
from fedbranch.storage.atomic import digest_of, open_plain
from fedbranch.types import JSON

__all__ = ["read_sealed", "seal", "unseal"]

SEAL = re.compile(rb',\s*"sha256":\s*"([0-9a-f]{64})"\s*\}\s*\Z')
LONGEST_SEAL = 128  # bytes


def seal(document: JSON, *, indent: int | None = None) -> bytes:
    """Write a document as one JSON object that ends with the SHA-256 of all before it.

    Parameters
    ----------
    document
        Not empty; NaN and infinity are refused.
    indent
        Spaces for each level; None for one line.

    Examples
    --------
    >>> seal({"round": 1})[:31]
    b'{"round": 1, "sha256": "f24d883'
    >>> unseal(seal({"round": 1}))
    {'round': 1}
    """
    assert document
    text = json.dumps(document, sort_keys=True, indent=indent, allow_nan=False)
    body = text.removesuffix("}").rstrip().encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    if indent is None:
        return body + b', "sha256": "' + digest + b'"}\n'
    margin = b"\n" + b" " * indent
    return body + b"," + margin + b'"sha256": "' + digest + b'"\n}\n'


def unseal(content: bytes) -> JSON:
    """Read the document that :func:`seal` wrote.

    Raises
    ------
    ValueError
        If it was cut or changed, or never was a sealed document.
    """
    # Nothing is parsed before this check: what others wrote may be nested absurdly deep.
    digest, num_sealed = _seal_of(content[-LONGEST_SEAL:], len(content))
    if hashlib.sha256(memoryview(content)[:num_sealed]).hexdigest() != digest:
        raise ValueError("it was changed: its SHA-256 is not the one recorded")
    try:
        document = json.loads(content.decode(), parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is too deeply nested") from None
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    del document["sha256"]
    return document


def read_sealed(path: Path) -> JSON:
    """Read a file that is one sealed document.

    Raises
    ------
    DamagedFile
        If it was cut or changed, or never was a sealed document.
    FileNotFoundError
        If it does not exist.
    """
    with open_plain(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        try:
            # The end is read first: a file that others made may be larger than the memory.
            file.seek(max(0, num_bytes - LONGEST_SEAL))
            digest, num_sealed = _seal_of(file.read(LONGEST_SEAL), num_bytes)
            file.seek(0)
            if digest_of(file, num_sealed) != digest:
                raise ValueError("it was changed: its SHA-256 is not the one recorded")
            file.seek(0)
            return unseal(file.read())
        except ValueError as error:
            raise DamagedFile(f"{path} cannot be read: {error}") from error


def _seal_of(end: bytes, num_bytes: int) -> tuple[str, int]:
    """Find the recorded SHA-256 at the end of a text, and count the bytes before it."""
    found = SEAL.search(end)
    if found is None:
        raise ValueError("it was cut or changed, or is of another version: no SHA-256 at its end")
    return found[1].decode(), num_bytes - len(end) + found.start()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
