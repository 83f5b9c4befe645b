"""A cache that keeps whole updates in files, which are mapped into memory when they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedbranch.errors import DamagedFile
from fedbranch.storage.atomic import (
    add_tensor_file,
    digest_of,
    make_folder,
    open_plain,
    tensor_file_name,
)
from fedbranch.storage.checkpoint import Tensors
from fedbranch.storage.mapped_tensors import MappedTensors, safetensors_header
from fedbranch.tree.edge import TENSOR_NAME, Edge, SavedEdge, row_blocks, whole_rows
from fedbranch.types import JSON, Array, Vector

__all__ = ["EdgeOnDisk", "OnDisk"]

FILE_PREFIX = "edge"  # of the files' names


@dataclass(frozen=True, kw_only=True)
class OnDisk:
    """Keep whole updates in files that are mapped into memory: exact, and slower.

    Parameters
    ----------
    folder
        Where the files are; it is made if it is missing. Use one folder for each server, on the
        disk that checkpoints go to: then both share the files. A server that is loaded with the
        folder of one that has ended goes on with its files. Files that remain after the last
        server can be removed.
    """

    folder: str | Path

    def __post_init__(self) -> None:
        # Absolute, as the program may change to another folder.
        object.__setattr__(self, "folder", Path(self.folder).expanduser().absolute())

    def prepare(self) -> None:
        """Make the folder.

        Raises
        ------
        CannotWrite
            If it cannot be made.
        """
        make_folder(Path(self.folder))

    def num_kept(self, dim: int) -> int:
        """Return ``dim``: all numbers are kept."""
        return dim

    def compared(self, updates: Array) -> Vector:
        """Return the updates, shape (num_updates, dim), as float32 on the host."""
        return whole_rows(updates)

    def keep(self, updates: Mapping[str, Array]) -> Edge:
        """Write updates to a file that is named by its content, and map it.

        Raises
        ------
        CannotWrite
            If the disk is full, or refuses for another reason.
        """
        dim = int(next(iter(updates.values())).shape[0])
        header = safetensors_header(TENSOR_NAME, (len(updates), dim))

        def parts() -> Iterator[bytes | memoryview]:
            yield header
            for block in row_blocks(updates.values(), dim):
                yield block.data.cast("B")

        folder = Path(self.folder)
        make_folder(folder)
        num_bytes = len(header) + 4 * dim * len(updates)
        file, path, digest = add_tensor_file(folder, FILE_PREFIX, parts(), num_bytes)
        with file:
            mapped = MappedTensors(file, path, sha256=digest)
        return EdgeOnDisk(list(updates), mapped, dim=dim, is_ours=True)

    def restore(self, saved: SavedEdge) -> Edge:
        """Map the file of a saved edge: the one in the folder if it is there, or the saved one.

        An edge that was in memory is written to the folder.
        """
        if not isinstance(saved.tensors, MappedTensors):
            return self.keep(dict(zip(saved.client_ids, saved.updates, strict=True)))
        ours = self._ours(saved.tensors)
        return EdgeOnDisk(
            saved.client_ids,
            saved.tensors if ours is None else ours,
            dim=saved.dim,
            is_ours=ours is not None,
            read_ids=saved.ids,
        )

    def to_state(self) -> JSON:
        """Describe the cache for checkpoints; the folder is not part of it."""
        return {"kind": "files"}

    def _ours(self, saved: MappedTensors) -> MappedTensors | None:
        """Map the file with the same content that a server which has ended left in the folder."""
        path = Path(self.folder) / tensor_file_name(FILE_PREFIX, saved.sha256)
        try:
            with open_plain(path, num_bytes=saved.num_bytes, may_be_link=False) as file:
                if saved.is_at(path) or digest_of(file, saved.num_bytes) == saved.sha256:
                    return MappedTensors(file, path, sha256=saved.sha256)
        except (FileNotFoundError, DamagedFile):
            pass  # the saved one is used where it is
        return None


class EdgeOnDisk(Edge):
    """An edge whose rows are in a file.

    Parameters
    ----------
    client_ids
        Each once.
    mapped
        The file.
    dim
        Length of the updates.
    is_ours
        Whether to remove the file with the edge.
    read_ids
        The tensors that the client ids were read from, if a checkpoint has them already.
    """

    place = "on disk"

    def __init__(
        self,
        client_ids: Sequence[str],
        mapped: MappedTensors,
        *,
        dim: int,
        is_ours: bool,
        read_ids: Tensors | None = None,
    ) -> None:
        super().__init__(client_ids, mapped[TENSOR_NAME], dim=dim, read_ids=read_ids)
        self._mapped = mapped
        self._is_ours = is_ours

    def __getitem__(self, client_id: str) -> Vector:
        # A copy of the row: pages of the file do not stay in memory.
        vector = self._mapped.row(TENSOR_NAME, self.row(client_id))
        vector.flags.writeable = False
        return vector

    @property
    def tensors(self) -> MappedTensors:
        """The file itself, which checkpoints link or copy."""
        return self._mapped

    def blocks(self, num_rows: int) -> Iterator[Vector]:
        """Read all rows in order; each block is out of memory when the next is asked for."""
        return self._mapped.blocks(TENSOR_NAME, num_rows)

    def discard(self) -> None:
        """Remove the file, if it belongs to this edge; copies in checkpoints stay."""
        if self._is_ours:
            self._mapped.remove()
