"""Checkpoints: a state as one JSON file and the tensors that belong to it, replaced together.

``state.json`` names every tensor file by the SHA-256 of its content. It is put in place last, by
one rename, and the state before it stays beside it as ``previous.json``. So after a crash at any
moment, the folder has a whole state.

Tensors that did not change are not written again, and files that both states need are there once.
Tensors that are mapped from a file (:class:`fedbranch.storage.mapped_tensors.MappedTensors`) are
linked or copied, and are mapped again when they are read.

Both states are sealed and contain the SHA-256 of each tensor file, so damage is noticed.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedbranch.errors import DamagedFile, UsingPreviousState
from fedbranch.storage.atomic import (
    digest_of,
    has_content,
    make_folder,
    open_plain,
    replace_file,
    tensor_file_name,
)
from fedbranch.storage.mapped_tensors import MOST_HEADER_BYTES, MappedTensors
from fedbranch.storage.sealed_json import read_sealed, seal
from fedbranch.types import JSON

__all__ = [
    "Generation",
    "LastingTensors",
    "Tensors",
    "clear_leftovers",
    "go_back",
    "has_checkpoint",
    "has_previous",
    "peek",
    "previous_state_warning",
    "read_checkpoint",
    "read_generation",
    "write_checkpoint",
]

Tensors = Mapping[str, NDArray[Any]]
Generation = Literal["current", "previous"]

SCHEMA = 3
STATE_FILE = "state.json"
FILES: dict[Generation, str] = {"current": STATE_FILE, "previous": "previous.json"}
TENSORS = re.compile(r"[a-z]+(-\d{1,18}){0,2}")
# Files that we may remove; a folder may have files of others as well.
OUR_FILES = re.compile(
    r"[a-z]+(-\d+){0,2}-[0-9a-f]{16}\.safetensors(\.tmp)?|(state|previous)\.json\.tmp"
)


class ReadTensors(dict[str, NDArray[Any]]):
    """Tensors as they were read, with the manifest entry of their file."""

    def __init__(self, tensors: Tensors, written: JSON) -> None:
        super().__init__(tensors)
        self.written = written


class LastingTensors(Mapping[str, NDArray[Any]]):
    """Tensors that never change, so that their file need not be written again.

    Parameters
    ----------
    make
        Returns the tensors, always the same; called only when they are needed.
    read
        The tensors as they were read, if they come from a checkpoint.
    """

    def __init__(self, make: Callable[[], Tensors], read: Tensors | None = None) -> None:
        self._make = make
        # The manifest entry of their file, once there is one.
        self.written = read.written if isinstance(read, ReadTensors) else None

    def made(self) -> Tensors:
        """Make all tensors at once."""
        return self._make()

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._make()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._make())

    def __len__(self) -> int:
        return len(self._make())


def write_checkpoint(folder: Path, kind: str, state: JSON, files: Mapping[str, Tensors]) -> None:
    """Make a state and its tensors the current ones of a folder; the state before is kept.

    Parameters
    ----------
    folder
        Made if it does not exist.
    kind
        What the state describes; :func:`read_checkpoint` requires the same word.
    state
        Any JSON. NaN and infinity are refused.
    files
        Tensors by file. Tensors that never change belong into files of their own.

    Raises
    ------
    CannotWrite
        If the disk is full, or refuses for another reason. The checkpoint before is as it was.
    DamagedFile
        If a file of mapped tensors was changed while it was in use. The checkpoint before is as
        it was.
    """
    make_folder(folder)
    # The files of the previous state were checked when it became the previous one. Any other file
    # in the folder is read and checked before it is used again; that is once for each file.
    checked = _in_use(folder, "previous") or set()
    try:
        entries = {n: _written(folder, n, tensors, checked) for n, tensors in files.items()}
        manifest = {name: entry for name, entry in entries.items() if entry is not None}
        document = {"schema": SCHEMA, "kind": kind, "tensors": manifest, "state": state}
        content = seal({**document, "generation": "current"})
        in_use = {entry["file"] for entry in manifest.values()}
        # A state that is saved again does not become its own predecessor.
        if not has_content(folder / STATE_FILE, content):
            _keep_current(folder, kind, checked=checked | in_use)
            replace_file(folder / STATE_FILE, content)
    except BaseException:
        # The files of half a state would take space that the disk may lack.
        clear_leftovers(folder)
        raise
    _clear_away(folder, except_for=in_use | (_in_use(folder, "previous") or set()))


def read_checkpoint(folder: Path, kind: str) -> tuple[JSON, dict[str, Tensors]]:
    """Read what :func:`write_checkpoint` wrote; if the current state is damaged, the one before.

    Warns
    -----
    UsingPreviousState
        If the state before is returned.

    Raises
    ------
    DamagedFile
        If both are damaged: a file is missing, was cut or changed, or is not of this kind.
    """
    try:
        return read_generation(folder, kind, "current")
    except DamagedFile as error:
        damage = error
    if not has_previous(folder):
        raise damage
    try:
        found = read_generation(folder, kind, "previous")
    except DamagedFile as error:
        raise DamagedFile(f"{damage}; and of the state before it: {error}") from error
    warnings.warn(previous_state_warning(folder, found[0], damage), stacklevel=2)
    return found


def read_generation(
    folder: Path, kind: str, generation: Generation
) -> tuple[JSON, dict[str, Tensors]]:
    """Read one of the two states in a folder.

    Raises
    ------
    DamagedFile
        If a file is missing, was cut or changed, or is not of this kind.
    """
    document = _read_document(folder, kind, generation)
    files = {n: _read_tensors(folder, entry) for n, entry in document["tensors"].items()}
    return document["state"], files


def previous_state_warning(folder: Path, state: JSON, damage: DamagedFile) -> UsingPreviousState:
    """Make the warning that names the state which is used, and the damage to the other."""
    number = state.get("round") if isinstance(state, dict) else None
    after = f", after round {number}," if isinstance(number, int) else ""
    return UsingPreviousState(
        f"{damage}; the state before it{after} in {folder / FILES['previous']} is used instead"
    )


def go_back(folder: Path, kind: str) -> None:
    """Make the previous state the current one, as if the current one had never been saved."""
    document = _read_document(folder, kind, "previous")
    replace_file(folder / STATE_FILE, seal({**document, "generation": "current"}))


def has_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a saved state."""
    return any((folder / name).exists() for name in FILES.values())


def has_previous(folder: Path) -> bool:
    """Return whether a folder has a state before the current one."""
    return (folder / FILES["previous"]).exists()


def peek(folder: Path, kind: str) -> JSON | None:
    """Read the current state, or else the one before, without tensors; None if both are damaged."""
    for generation in FILES:
        with suppress(DamagedFile):
            state: JSON = _read_document(folder, kind, generation)["state"]
            return state
    return None


def clear_leftovers(folder: Path) -> None:
    """Remove what a crash left: temporary files, and tensor files that no state names."""
    in_use = [_in_use(folder, generation) for generation in FILES]
    known = set().union(*(names for names in in_use if names is not None))
    # Tensors that a damaged state may name stay, as the state might be repaired.
    _clear_away(folder, except_for=known, only_temporary=None in in_use)


def _written(folder: Path, name: str, tensors: Tensors, checked: set[str]) -> JSON | None:
    """Write a tensor file and return its manifest entry; None if there are no tensors."""
    if isinstance(tensors, MappedTensors):
        return _put(folder, name, tensors, checked)
    lasting = tensors if isinstance(tensors, LastingTensors) else None
    written = None if lasting is None else lasting.written
    if written is not None and _is_whole(folder, written, checked):
        return written
    made = tensors if lasting is None else lasting.made()
    arrays = {k: np.ascontiguousarray(v) for k, v in made.items()}
    if not arrays:
        return None
    import safetensors.numpy  # here, as training without files needs no safetensors

    content = safetensors.numpy.save(arrays)
    digest = hashlib.sha256(content).hexdigest()
    file_name = tensor_file_name(name, digest)
    if not has_content(folder / file_name, content):
        replace_file(folder / file_name, content)
    entry = {"file": file_name, "sha256": digest, "bytes": len(content)}
    if lasting is not None:
        lasting.written = entry
    return entry


def _put(folder: Path, name: str, tensors: MappedTensors, checked: set[str]) -> JSON:
    """Link or copy a mapped file into the folder, and return its manifest entry."""
    file_name = tensor_file_name(name, tensors.sha256)
    entry: JSON = {
        "file": file_name,
        "sha256": tensors.sha256,
        "bytes": tensors.num_bytes,
        "mapped": True,
    }
    if not _is_whole(folder, entry, checked):
        tensors.put(folder / file_name)
    return entry


def _is_whole(folder: Path, entry: JSON, checked: set[str]) -> bool:
    """Return whether the file of an entry exists and, unless already checked, is unchanged."""
    try:
        with _opened(folder, entry) as file:
            if entry["file"] not in checked:
                _check_digest(file, entry)
    except DamagedFile:
        return False
    return True


def _keep_current(folder: Path, kind: str, *, checked: set[str]) -> None:
    """Make the current state the previous one, if it is whole.

    A state that is damaged or missing must not replace one that may be whole.
    """
    try:
        document = _read_document(folder, kind, "current")
    except DamagedFile:
        return
    if not all(_is_whole(folder, entry, checked) for entry in document["tensors"].values()):
        return
    replace_file(folder / FILES["previous"], seal({**document, "generation": "previous"}))


def _in_use(folder: Path, generation: Generation) -> set[str] | None:
    """Return the tensor files that a state names; None if the state is damaged."""
    path = folder / FILES[generation]
    if not path.exists():
        return set()
    try:
        return {entry["file"] for entry in read_sealed(path)["tensors"].values()}
    except (DamagedFile, KeyError, TypeError, AttributeError):
        return None


def _clear_away(folder: Path, *, except_for: set[str], only_temporary: bool = False) -> None:
    for path in folder.iterdir():
        if not OUR_FILES.fullmatch(path.name) or path.name in except_for:
            continue
        if path.suffix == ".tmp" or not only_temporary:
            with suppress(OSError):  # it does no harm, and the next save tries again
                path.unlink()


def _read_document(folder: Path, kind: str, generation: Generation) -> JSON:
    path = folder / FILES[generation]
    try:
        document = read_sealed(path)
    except FileNotFoundError:
        raise DamagedFile(f"{path} does not exist; there is no saved {kind} in {folder}") from None
    try:
        schema, found_kind = document["schema"], document["kind"]
        if schema != SCHEMA:
            raise DamagedFile(
                f"{path} has schema {schema!r}; this version of fedbranch reads {SCHEMA}; read it "
                "with the version that saved it"
            )
        if found_kind != kind:
            raise DamagedFile(f"{path} holds a saved {found_kind}, not a {kind}")
        if document["generation"] != generation:
            raise DamagedFile(
                f"{path} holds a state that was saved as the {document['generation']} one; "
                "give the file its name back"
            )
        for name, entry in document["tensors"].items():
            _check_entry(name, entry)
        if not isinstance(document["state"], dict):
            raise ValueError("its state is no JSON object")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{path} cannot be read as a saved {kind}: {error!r}") from error
    return document


def _check_entry(name: str, entry: JSON) -> None:
    """Raise ValueError unless an entry names a file of ours, inside its folder."""
    if not TENSORS.fullmatch(name):
        raise ValueError(f"{name[:100]!r} is no name for tensors")
    digest, num_bytes = entry["sha256"], entry["bytes"]
    if not re.fullmatch("[0-9a-f]{64}", digest) or entry["file"] != tensor_file_name(name, digest):
        raise ValueError(f"the file {str(entry['file'])[:100]!r} is not named by its content")
    if type(num_bytes) is not int or num_bytes < 0:
        raise ValueError(f"{entry['file']} is to have {num_bytes!r} bytes")
    if type(entry.get("mapped", False)) is not bool:
        raise ValueError(f"{entry['file']} is to be mapped: {entry['mapped']!r}")


def _read_tensors(folder: Path, entry: JSON) -> Tensors:
    import safetensors.numpy

    path = folder / entry["file"]
    try:
        with _opened(folder, entry) as file:
            _check_digest(file, entry)
            if entry.get("mapped", False):
                return MappedTensors(file, path, sha256=entry["sha256"])
            file.seek(0)
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > min(entry["bytes"], MOST_HEADER_BYTES):
                raise DamagedFile(f"{path} cannot be read: a header of {header_bytes:,} bytes")
            file.seek(0)
            return ReadTensors(safetensors.numpy.load(file.read()), written=entry)
    except DamagedFile:
        raise
    except Exception as error:  # whatever the parser raises, the file is damaged
        raise DamagedFile(f"{path} cannot be read: {error!r}") from error


def _opened(folder: Path, entry: JSON) -> IO[bytes]:
    """Open a tensor file of the manifest to read it."""
    path = folder / entry["file"]
    try:
        return open_plain(path, num_bytes=entry["bytes"], may_be_link=False)
    except FileNotFoundError:
        raise DamagedFile(f"{path} is missing; the saved state needs it") from None


def _check_digest(file: IO[bytes], entry: JSON) -> None:
    if digest_of(file, entry["bytes"]) != entry["sha256"]:
        raise DamagedFile(f"{file.name} was cut or changed: its SHA-256 is not the one recorded")
