"""A state on disk: one JSON file and the tensors that belong to it, replaced together.

``state.json`` names every tensor file by the SHA-256 of its content and is itself put in
place last, by one rename. Whatever moment a crash picks, the folder holds either the old
state or the new one. Tensors that did not change are not written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbranch.errors import DamagedFile

__all__ = [
    "JSON",
    "LastingTensors",
    "Tensors",
    "clear_leftovers",
    "read_checkpoint",
    "replace_file",
    "write_checkpoint",
]

JSON = dict[str, Any]  # what json.loads gives back; there is no useful static type for it
Tensors = Mapping[str, NDArray[Any]]

SCHEMA = 1
STATE_FILE = "state.json"
# Files that we may remove: others may keep theirs in the same folder.
OUR_FILES = re.compile(r"[a-z]+(-\d+)?-[0-9a-f]{16}\.safetensors(\.tmp)?|state\.json\.tmp")


class LastingTensors(Mapping[str, NDArray[Any]]):
    """Tensors that never change, so that a file which has them need not be made again.

    Parameters
    ----------
    make
        Gives the tensors, always the same; called only when somebody looks at them.
    """

    def __init__(self, make: Callable[[], Tensors]) -> None:
        self._make = make
        self.written: dict[str, str] | None = None  # file and SHA-256, once there is one
        self.num_bytes = 0  # of that file

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._make()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._make())

    def __len__(self) -> int:
        return len(self._make())


def write_checkpoint(folder: Path, kind: str, state: JSON, files: Mapping[str, Tensors]) -> None:
    """Put a state and its tensors in place of what the folder held.

    Parameters
    ----------
    folder
        Made if it is not there.
    kind
        What the state describes; :func:`read_checkpoint` insists on the same word.
    state
        Anything JSON can say. NaN and infinity are refused.
    files
        Tensors by file, so that those which never change stay in files that never change.
    """
    import safetensors.numpy  # here, so that training without files needs no safetensors

    folder.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, dict[str, str]] = {}
    for name, tensors in files.items():
        lasting = tensors if isinstance(tensors, LastingTensors) else None
        if lasting is not None and lasting.written is not None:
            path = folder / lasting.written["file"]
            if path.exists() and path.stat().st_size == lasting.num_bytes:
                manifest[name] = lasting.written
                continue
        arrays = {k: np.ascontiguousarray(v) for k, v in dict(tensors).items()}
        if not arrays:
            continue
        content = safetensors.numpy.save(arrays)
        digest = hashlib.sha256(content).hexdigest()
        file_name = f"{name}-{digest[:16]}.safetensors"
        manifest[name] = {"file": file_name, "sha256": digest}
        if not _holds(folder / file_name, content):
            replace_file(folder / file_name, content)
        if lasting is not None:
            lasting.written, lasting.num_bytes = manifest[name], len(content)
    document = {"schema": SCHEMA, "kind": kind, "tensors": manifest, "state": state}
    text = json.dumps(document, sort_keys=True, indent=1, allow_nan=False) + "\n"
    replace_file(folder / STATE_FILE, text.encode())

    _clear_away(folder, except_for={entry["file"] for entry in manifest.values()})


def read_checkpoint(folder: Path, kind: str) -> tuple[JSON, dict[str, Tensors]]:
    """Read what :func:`write_checkpoint` wrote.

    Raises
    ------
    DamagedFile
        If a file is missing, was cut or changed, or is not of this kind.
    """
    document = _read_state(folder, kind)
    manifest: dict[str, dict[str, str]] = document["tensors"]
    return document["state"], {
        name: _read_tensors(folder, entry["file"], entry["sha256"])
        for name, entry in manifest.items()
    }


def clear_leftovers(folder: Path, kind: str) -> None:
    """Remove what a crash left half-way: temporary files and tensors of no state."""
    manifest = _read_state(folder, kind)["tensors"]
    _clear_away(folder, except_for={entry["file"] for entry in manifest.values()})


def _read_state(folder: Path, kind: str) -> JSON:
    path = folder / STATE_FILE
    try:
        document: JSON = json.loads(path.read_text(encoding="utf-8"))
        schema, found_kind = document["schema"], document["kind"]
        entries = document["tensors"].values()
        if not all(isinstance(e["file"], str) and isinstance(e["sha256"], str) for e in entries):
            raise TypeError("a tensor file is not named by a string")
        document["state"]  # it must be there
    except FileNotFoundError:
        raise DamagedFile(f"{path} does not exist; there is no saved {kind} in {folder}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{path} cannot be read as a saved {kind}: {error!r}") from error
    if schema != SCHEMA:
        raise DamagedFile(f"{path} has schema {schema!r}; this version of fedbranch reads {SCHEMA}")
    if found_kind != kind:
        raise DamagedFile(f"{path} holds a saved {found_kind}, not a {kind}")
    return document


def _clear_away(folder: Path, *, except_for: set[str]) -> None:
    for path in folder.iterdir():
        if OUR_FILES.fullmatch(path.name) and path.name not in except_for:
            path.unlink()


def replace_file(path: Path, content: bytes, *, is_private: bool = False) -> None:
    """Write a file so that its name always stands for all of the old or all of the new content.

    A private one only its owner can read.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        if is_private:
            temporary.unlink(missing_ok=True)  # of a crash; others might hold it open
            temporary.touch(mode=0o600, exist_ok=False)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _holds(path: Path, content: bytes) -> bool:
    return path.exists() and path.stat().st_size == len(content) and path.read_bytes() == content


def _read_tensors(folder: Path, file_name: str, digest: str) -> Tensors:
    import safetensors.numpy

    # The name comes from a file that anybody may have edited; it must not lead elsewhere.
    if file_name != Path(file_name).name:
        raise DamagedFile(f"{folder / STATE_FILE} names the file {file_name!r} outside its folder")
    path = folder / file_name
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DamagedFile(f"{path} is missing; {folder / STATE_FILE} needs it") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise DamagedFile(f"{path} was cut or changed: its SHA-256 is not the one recorded")
    return safetensors.numpy.load(content)
