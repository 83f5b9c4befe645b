"""What an edge of the tree keeps: the pre-split updates that newcomers are compared with.

They are kept as they are in memory, as they are on disk, or as short projections. To whoever
reads it an edge is a mapping from client ids to what is kept of their updates.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedbranch.core.geometry import Scaled, cosines_of_scaled, scaled_for_cosines, to_numpy
from fedbranch.core.projection import SMALLEST_SIZE, Projection
from fedbranch.errors import DamagedFile
from fedbranch.population.packed_ids import encoded, packed, unpacked
from fedbranch.storage.atomic import (
    add_tensor_file,
    digest_of,
    make_folder,
    open_plain,
    tensor_file_name,
)
from fedbranch.storage.checkpoint import LastingTensors, Tensors
from fedbranch.storage.mapped_tensors import MappedTensors, safetensors_header
from fedbranch.types import JSON, Array, Vector

__all__ = [
    "Edge",
    "EdgeCache",
    "InMemory",
    "OnDisk",
    "Sketched",
    "cache_to_state",
    "keep",
    "kept",
    "num_kept",
    "restored_cache",
    "restored_edge",
]

BLOCK_BYTES = 2**24  # of updates that are looked at, or written, at once
NAME = "updates"  # of the one tensor in an edge's file


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """Keep the updates as they are, in memory: exact, and right for small populations."""


@dataclass(frozen=True, kw_only=True)
class Sketched:
    """Keep a random projection of every update: less memory, and similarities with an error.

    Parameters
    ----------
    size
        Numbers that are kept of an update, at least 16; one that has no more is kept as it is.
        :class:`fedbranch.core.projection.Projection` says how far a similarity is off: with 1024
        numbers typically by 0.035, of updates that are spread over many coordinates.
    seed
        Of the projection. Clients that know it can make updates that are similar only here.

    Examples
    --------
    >>> Sketched(size=256).size
    256
    """

    size: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("size", SMALLEST_SIZE), ("seed", 0)):
            value = operator.index(getattr(self, name))
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class OnDisk:
    """Keep the updates as they are, in files that are mapped into memory: exact, and slower.

    Parameters
    ----------
    folder
        Where the files are; made if it is not there. Best one of its own for every server, on
        the disk that checkpoints go to: they then share the files. A server that is loaded with
        the folder of one that has ended goes on with its files. What is left in it when nobody
        uses the server any more can be removed.
    """

    folder: str | Path

    def __post_init__(self) -> None:
        # Absolute, as the program may change to another folder.
        object.__setattr__(self, "folder", Path(self.folder).expanduser().absolute())


EdgeCache = InMemory | Sketched | OnDisk


class Edge(Mapping[str, Vector]):
    """What is kept of the updates on one edge: client id -> read-only vector.

    Parameters
    ----------
    client_ids
        Each once.
    updates
        What is kept: shape (num_clients, num_kept), in memory or in a file that is mapped.
    dim
        How long the updates themselves were.
    is_ours
        Whether the file goes when the edge goes.
    read
        What the updates were read from, if they lie in a checkpoint already.
    read_ids
        The same of the ids.
    """

    def __init__(
        self,
        client_ids: Sequence[str] = (),
        updates: Vector | MappedTensors | None = None,
        *,
        dim: int = 0,
        is_ours: bool = False,
        read: Tensors | None = None,
        read_ids: Tensors | None = None,
    ) -> None:
        self.dim = dim
        self._row_of = row_of = {client_id: row for row, client_id in enumerate(client_ids)}
        self._ids = LastingTensors(lambda: packed(encoded(row_of)), read=read_ids)
        self._is_ours = is_ours
        self._mapped: MappedTensors | None = None
        self._tensors: Tensors
        if isinstance(updates, MappedTensors):
            self._mapped = self._tensors = updates
            self._matrix = updates[NAME]
        else:
            matrix = np.zeros((0, dim), dtype=np.float32) if updates is None else updates.view()
            matrix.flags.writeable = False
            self._matrix = matrix
            self._tensors = LastingTensors(lambda: {NAME: matrix}, read=read)
        if self._matrix.ndim != 2 or len(self._matrix) != len(self._row_of):
            raise ValueError(
                f"{len(self._row_of)} clients have cached updates of shape {self._matrix.shape}"
            )

    def __getitem__(self, client_id: str) -> Vector:
        row = self._row_of[client_id]
        # Of a file nothing stays in memory that nobody keeps.
        vector = self._matrix[row] if self._mapped is None else self._mapped.row(NAME, row)
        vector.flags.writeable = False
        return vector

    def __iter__(self) -> Iterator[str]:
        return iter(self._row_of)

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, client_id: object) -> bool:
        return client_id in self._row_of

    def __repr__(self) -> str:
        place = "in memory" if self._mapped is None else "on disk"
        num_clients, num_kept = self._matrix.shape
        return f"Edge({num_clients} clients, {num_kept} numbers each, {place})"

    @property
    def num_kept(self) -> int:
        """How many numbers are kept of every update."""
        return int(self._matrix.shape[1])

    @property
    def tensors(self) -> Tensors:
        """What is kept as one array, one row each: for checkpoints, in which it never changes."""
        return self._tensors

    @property
    def ids(self) -> Tensors:
        """Whose the rows are, for checkpoints as well."""
        return self._ids

    def similarities(self, updates: Scaled) -> Vector:
        """Compare updates, of which as much is kept, with those on the edge.

        Parameters
        ----------
        updates
            Shape (num_updates, num_kept), with what makes cosines of their products.

        Returns
        -------
        NDArray
            Shape (num_updates, num_clients): cosines. The same numbers whether the edge is in
            memory or on disk; memory that this takes is a few times
            16 MiB, or what four updates take or the given ones.
        """
        # So many that bringing the updates to length one again and again costs little.
        rows_at_once = max(len(updates.rows), 4, _rows_at_once(self.num_kept))
        blocks = (
            self._mapped.blocks(NAME, rows_at_once)
            if self._mapped is not None
            else (
                self._matrix[first : first + rows_at_once]
                for first in range(0, len(self), rows_at_once)
            )
        )
        cosines = [cosines_of_scaled(updates, scaled_for_cosines(block)) for block in blocks]
        return np.concatenate(cosines, axis=1)

    def discard(self) -> None:
        """Remove the edge's own file, if there is one; copies in checkpoints stay."""
        if self._is_ours and self._mapped is not None:
            self._mapped.remove()


def num_kept(cache: EdgeCache, dim: int) -> int:
    """Say how many numbers are kept of an update that has ``dim``."""
    return min(dim, cache.size) if isinstance(cache, Sketched) else dim


def kept(cache: EdgeCache, updates: Array) -> Vector:
    """Give what a cache keeps of updates, shape (num_updates, dim): that is what is compared."""
    dim = updates.shape[1]
    if isinstance(cache, Sketched) and num_kept(cache, dim) < dim:
        updates = Projection(dim=dim, size=cache.size, seed=cache.seed).of(updates)
    rows: Vector = to_numpy(updates).astype(np.float32, copy=False)
    return rows


def keep(cache: EdgeCache, updates: Mapping[str, Array | None]) -> Edge:
    """Make an edge.

    Parameters
    ----------
    cache
        How it keeps what it keeps.
    updates
        Client id -> update, shape (dim,), of any library on any device; of who has none (None)
        nothing is kept. They are read some at a time.

    Raises
    ------
    ValueError
        If they are not equally long vectors.
    CannotWrite
        If they are to be kept on disk, and that is full or refuses.
    """
    there = {client_id: update for client_id, update in updates.items() if update is not None}
    if not there:
        return Edge()
    shapes = {tuple(update.shape) for update in there.values()}
    dim = next(iter(shapes))[0] if len(next(iter(shapes))) == 1 else 0
    if len(shapes) > 1 or dim < 1:
        raise ValueError(
            f"the updates have shapes {sorted(shapes)}; an edge keeps vectors of one length"
        )
    ids, vectors = list(there), list(there.values())
    if isinstance(cache, OnDisk):
        return Edge(ids, _on_disk(Path(cache.folder), vectors, dim), dim=dim, is_ours=True)
    matrix = np.empty((len(ids), num_kept(cache, dim)), dtype=np.float32)
    first = 0
    for block in _blocks(vectors, dim):
        matrix[first : first + len(block)] = kept(cache, block)
        first += len(block)
    return Edge(ids, matrix, dim=dim)


def _on_disk(folder: Path, vectors: Sequence[Array], dim: int) -> MappedTensors:
    """Write updates to a file that is named by its content, and map it."""
    header = safetensors_header(NAME, (len(vectors), dim))

    def parts() -> Iterator[bytes | memoryview]:
        yield header
        for block in _blocks(vectors, dim):
            yield block.data.cast("B")

    make_folder(folder)
    num_bytes = len(header) + 4 * dim * len(vectors)
    file, path, digest = add_tensor_file(folder, "edge", parts(), num_bytes)
    with file:
        return MappedTensors(file, path, sha256=digest)


def _left_in(folder: Path, saved: MappedTensors) -> MappedTensors | None:
    """Give the file of a saved edge that a server which has ended left in a cache's folder."""
    path = folder / tensor_file_name("edge", saved.sha256)
    try:
        with open_plain(path, num_bytes=saved.num_bytes, may_be_link=False) as file:
            if saved.is_at(path) or digest_of(file, saved.num_bytes) == saved.sha256:
                return MappedTensors(file, path, sha256=saved.sha256)
    except (FileNotFoundError, DamagedFile):
        pass  # the saved one is used where it is
    return None


def _blocks(vectors: Sequence[Array], dim: int) -> Iterator[Vector]:
    """Give vectors as matrices of some rows each, on the host."""
    rows_at_once = _rows_at_once(dim)
    for first in range(0, len(vectors), rows_at_once):
        yield np.stack(
            [
                np.asarray(to_numpy(vector), dtype=np.float32)
                for vector in vectors[first : first + rows_at_once]
            ]
        )


def _rows_at_once(dim: int) -> int:
    return max(1, BLOCK_BYTES // (4 * max(1, dim)))


# Files


def cache_to_state(cache: EdgeCache) -> JSON | None:
    """Describe a cache; None for the default one. Where files are is not part of a state."""
    if isinstance(cache, Sketched):
        return {"kind": "sketches", "size": cache.size, "seed": cache.seed}
    return {"kind": "files"} if isinstance(cache, OnDisk) else None


def restored_cache(
    tree_state: object, *, given: EdgeCache | None = None, folder: Path | None = None
) -> EdgeCache:
    """Give the cache of a saved tree.

    Parameters
    ----------
    tree_state
        What describes the tree; :func:`cache_to_state` is in there.
    given
        What the user wants instead. Whole updates may go to disk or come from there; sketches
        stay what they are.
    folder
        Where the tree is saved: new files of one that is on disk go to ``edges`` in there,
        unless the user says where.

    Raises
    ------
    DamagedFile
        If the state cannot be.
    ValueError
        If what the user wants cannot be.
    """
    saved = _cache_from_state(tree_state, folder)
    if given is None:
        if saved is None:
            raise ValueError("the edges are on disk; pass cache=OnDisk(folder=...)")
        return saved
    if given != saved and (isinstance(saved, Sketched) or isinstance(given, Sketched)):
        raise ValueError(
            f"the saved edges are {saved!r}, and the cache is to be {given!r}; sketches cannot "
            "become other ones, nor whole updates sketches: leave the cache out"
        )
    return given


def _cache_from_state(tree_state: object, folder: Path | None) -> EdgeCache | None:
    """Give the cache that was saved; None for files of which nobody says where."""
    try:
        state = tree_state.get("cache")  # type: ignore[attr-defined]  # checked by trying
        if state is None:  # also in states of older versions
            return InMemory()
        if state["kind"] == "sketches":
            return Sketched(size=state["size"], seed=state["seed"])
        if state["kind"] == "files":
            return None if folder is None else OnDisk(folder=folder / "edges")
        raise ValueError(f"the kind {str(state['kind'])[:100]!r} is not known")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedFile(f"the saved tree contradicts itself: {error!r}") from error


def restored_edge(cache: EdgeCache, ids: Tensors, tensors: Tensors, *, dim: int | None) -> Edge:
    """Make an edge of a saved one.

    Parameters
    ----------
    cache
        How the tree keeps its edges from now on.
    ids, tensors
        What :attr:`Edge.ids` and :attr:`Edge.tensors` were.
    dim
        How long the updates were; None if that was not saved.

    Raises
    ------
    ValueError, KeyError, TypeError
        If that cannot be.
    """
    client_ids = unpacked(ids)
    matrix = tensors[NAME]
    if matrix.ndim != 2 or len(set(client_ids)) != len(matrix) or matrix.dtype != np.float32:
        raise ValueError(
            f"{len(client_ids)} clients have cached updates of shape {matrix.shape}, {matrix.dtype}"
        )
    dim = int(matrix.shape[1]) if dim is None else operator.index(dim)
    if isinstance(tensors, MappedTensors) and isinstance(cache, OnDisk):
        own = _left_in(Path(cache.folder), tensors)
        there = tensors if own is None else own
        edge = Edge(client_ids, there, dim=dim, is_ours=own is not None, read_ids=ids)
    elif isinstance(cache, OnDisk):
        edge = keep(cache, dict(zip(client_ids, matrix, strict=True)))
    else:
        whole = np.array(matrix) if isinstance(tensors, MappedTensors) else matrix
        edge = Edge(client_ids, whole, dim=dim, read=tensors, read_ids=ids)
    if edge.num_kept != num_kept(cache, dim):
        raise ValueError(
            f"cached updates of length {dim} have {edge.num_kept} numbers instead of "
            f"{num_kept(cache, dim)}"
        )
    return edge
