"""Edges of the tree: what is kept of the pre-split updates that newcomers are compared with.

An edge is a mapping from client ids to what is kept of their updates. How it is kept is the
choice of a cache, see :class:`EdgeCache`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np

from fedbranch.core.geometry import Scaled, cosines_of_scaled, scaled_for_cosines, to_numpy
from fedbranch.population import pack_ids, unpack_ids
from fedbranch.storage.checkpoint import LastingTensors, Tensors
from fedbranch.storage.mapped_tensors import MappedTensors
from fedbranch.types import Array, Vector

__all__ = [
    "TENSOR_NAME",
    "Edge",
    "EdgeCache",
    "SavedEdge",
    "edge_in_memory",
    "make_edge",
    "restore_edge",
    "row_blocks",
    "rows_per_block",
    "whole_rows",
]

BLOCK_BYTES = 2**24  # of updates that are compared, or written, at once
LEAST_ROWS_COMPARED = 4  # at once, however long updates are
TENSOR_NAME = "updates"  # of the one tensor in an edge's file


class Edge(Mapping[str, Vector]):
    """What is kept of the updates on one edge: client id -> read-only vector.

    Parameters
    ----------
    client_ids
        Each once.
    updates
        What is kept, shape (num_clients, num_kept), float32; None for an edge without clients.
    dim
        Length of the updates themselves.
    read
        The tensors that ``updates`` were read from, if a checkpoint has them already.
    read_ids
        The same for the client ids.

    Attributes
    ----------
    place
        Where the rows are, in words.

    Raises
    ------
    TypeError
        If the rows are not float32: such an edge could be saved, but not loaded again.
    ValueError
        If there is not one row for each client.

    Notes
    -----
    A cache may return a subclass, as :class:`fedbranch.OnDisk` does. It overrides ``__getitem__``,
    :meth:`blocks`, :attr:`tensors` and :meth:`discard`. Where these make the rows of something
    else, ``updates`` need not hold them. It may be any float32 array of their shape, such as
    ``np.broadcast_to(np.float32(0), shape)``.
    """

    place = "in memory"

    def __init__(
        self,
        client_ids: Sequence[str] = (),
        updates: Vector | None = None,
        *,
        dim: int = 0,
        read: Tensors | None = None,
        read_ids: Tensors | None = None,
    ) -> None:
        self.dim = dim
        self._row_of = row_of = {client_id: row for row, client_id in enumerate(client_ids)}
        self._ids = LastingTensors(lambda: pack_ids(row_of), read=read_ids)
        matrix = np.zeros((0, dim), dtype=np.float32) if updates is None else updates.view()
        matrix.flags.writeable = False
        if matrix.ndim != 2 or len(matrix) != len(row_of):
            raise ValueError(f"{len(row_of)} clients have cached updates of shape {matrix.shape}")
        if matrix.dtype != np.float32:
            raise TypeError(
                f"the rows of an edge are {matrix.dtype}; an edge has float32: convert them with "
                "rows.astype(np.float32)"
            )
        self._matrix = matrix
        self._tensors = LastingTensors(lambda: {TENSOR_NAME: matrix}, read=read)

    def __getitem__(self, client_id: str) -> Vector:
        vector: Vector = self._matrix[self.row(client_id)]
        vector.flags.writeable = False
        return vector

    def __iter__(self) -> Iterator[str]:
        return iter(self._row_of)

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, client_id: object) -> bool:
        return client_id in self._row_of

    def __repr__(self) -> str:
        return f"Edge({len(self)} clients, {self.num_kept} numbers each, {self.place})"

    def row(self, client_id: str) -> int:
        """Return the row of a client."""
        return self._row_of[client_id]

    @property
    def num_kept(self) -> int:
        """Count the numbers that are kept of each update."""
        return int(self._matrix.shape[1])

    @property
    def tensors(self) -> Tensors:
        """All rows as one tensor, for checkpoints; it never changes."""
        return self._tensors

    @property
    def ids(self) -> Tensors:
        """The client ids in the order of the rows, for checkpoints as well."""
        return self._ids

    def blocks(self, num_rows: int) -> Iterator[Vector]:
        """Read all rows in order, at most ``num_rows`` at once."""
        for first in range(0, len(self), num_rows):
            yield self._matrix[first : first + num_rows]

    def similarities(self, updates: Scaled) -> Vector:
        """Compare updates with those on the edge.

        Parameters
        ----------
        updates
            Shape (num_updates, num_kept), scaled for cosines.

        Returns
        -------
        NDArray
            Shape (num_updates, num_clients): cosines. They are the same to the bit whether the
            edge is in memory or on disk.

        Notes
        -----
        It takes a few times the memory of a block. A block has as many rows as 16 MiB hold, but
        at least four rows and at least the number of ``updates``.
        """
        # Each block costs a pass over the given updates, so it has at least as many rows.
        num_rows = max(len(updates.rows), LEAST_ROWS_COMPARED, rows_per_block(self.num_kept))
        cosines = [
            cosines_of_scaled(updates, scaled_for_cosines(block)) for block in self.blocks(num_rows)
        ]
        return np.concatenate(cosines, axis=1)

    def discard(self) -> None:
        """Remove what the edge alone keeps outside of memory; copies in checkpoints stay."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SavedEdge:
    """An edge as it was read from a checkpoint, for a cache to restore.

    Attributes
    ----------
    client_ids
        In the order of the rows.
    updates
        What was kept of their updates, shape (num_clients, num_kept).
    dim
        Length of the updates themselves.
    tensors, ids
        What :attr:`fedbranch.Edge.tensors` and :attr:`fedbranch.Edge.ids` were when they were saved. An edge that
        is made with them as ``read`` and ``read_ids`` is not written again to the checkpoint
        that has them.
    """

    client_ids: Sequence[str]
    updates: Vector
    dim: int
    tensors: Tensors
    ids: Tensors

    def in_memory(self) -> Edge:
        """Make an edge whose rows are in memory."""
        is_mapped = isinstance(self.tensors, MappedTensors)
        updates = np.array(self.updates) if is_mapped else self.updates
        return Edge(self.client_ids, updates, dim=self.dim, read=self.tensors, read_ids=self.ids)


@runtime_checkable
class EdgeCache(Protocol):
    """How edges keep updates; pass any object with these methods as ``cache``.

    :class:`fedbranch.InMemory`, :class:`fedbranch.Sketched` and :class:`fedbranch.OnDisk` are
    ours. The contract, which :func:`fedbranch.testing.check_edge_cache` checks:

    - A cache has no state of its own that edges depend on: two caches that are equal (``==``)
      do the same. One cache may serve several trees.
    - What is compared with an edge is ``compared(updates)``, never the updates themselves. It
      depends on nothing but each update: not on the others, nor on their order.
    - ``keep`` keeps exactly ``compared`` of each update: for an edge of ``updates``,
      ``edge[client_id]`` equals the row of ``compared`` that belongs to this client.
    - Both have ``num_kept(dim)`` numbers for updates of length ``dim``.
    - What an edge gives, compares and saves is float32, also if it holds less. An edge that
      holds something else than float32 rows is a subclass of :class:`fedbranch.Edge`, as that
      of :class:`fedbranch.OnDisk` is.
    - ``compared`` keeps finite numbers finite.
    - An edge does not change with the arrays it was made from. It stays what it is until
      :meth:`fedbranch.Edge.discard`, whatever happens to other edges of the cache.
    - An edge goes into checkpoints as :attr:`fedbranch.Edge.tensors` and :attr:`fedbranch.Edge.ids`. ``restore``
      makes of these an edge with the same ids, in the same order, and the same numbers.
    - If ``keep`` raises, it leaves nothing behind; the split then does not happen. A disk that
      is full or refuses is :class:`fedbranch.errors.CannotWrite`.

    Of a cache that is not ours, checkpoints have the name only. Pass it again when loading:
    ``Server.load(folder, cache=...)``.
    """

    def prepare(self) -> None:
        """Make what the cache needs, such as a folder; called when a new tree is made.

        Raises
        ------
        CannotWrite
            If edges could not be kept, so that this is known before the first split.
        """
        ...

    def num_kept(self, dim: int) -> int:
        """Count the numbers that are kept of an update of length ``dim``."""
        ...

    def compared(self, updates: Array) -> Vector:
        """Compute what is kept of updates, and compared.

        Parameters
        ----------
        updates
            Shape (num_updates, dim); of any library, on any device.

        Returns
        -------
        NDArray
            Shape (num_updates, num_kept(dim)), float32, on the host. It may be the array that
            was given.
        """
        ...

    def keep(self, updates: Mapping[str, Array]) -> Edge:
        """Make an edge.

        Parameters
        ----------
        updates
            Client id -> update, shape (dim,); of any library, on any device. There is at least
            one, and all have the same length. :func:`fedbranch.tree.row_blocks` reads them some at a time.
        """
        ...

    def restore(self, saved: SavedEdge) -> Edge:
        """Make an edge of a saved one; ``saved.in_memory()`` is enough for edges in memory."""
        ...


def make_edge(cache: EdgeCache, updates: Mapping[str, Array | None]) -> Edge:
    """Make an edge of those updates that there are.

    Parameters
    ----------
    cache
        How the edge keeps them.
    updates
        Client id -> update, shape (dim,), of any library on any device; None where a client has
        no update, of which nothing is kept.

    Raises
    ------
    ValueError
        If they are not equally long vectors.
    CannotWrite
        If the cache writes files, and the disk is full or refuses.
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
    return cache.keep(there)


def restore_edge(cache: EdgeCache, ids: Tensors, tensors: Tensors, *, dim: int | None) -> Edge:
    """Make an edge of a saved one, after checking what was saved.

    Parameters
    ----------
    cache
        How the tree keeps its edges from now on.
    ids, tensors
        What :attr:`fedbranch.Edge.ids` and :attr:`fedbranch.Edge.tensors` were.
    dim
        Length of the updates; None if that was not saved.

    Raises
    ------
    ValueError, KeyError, TypeError
        If the parts contradict each other.
    """
    client_ids = unpack_ids(ids)
    matrix = tensors[TENSOR_NAME]
    if matrix.ndim != 2 or len(set(client_ids)) != len(matrix) or matrix.dtype != np.float32:
        raise ValueError(
            f"{len(client_ids)} clients have cached updates of shape {matrix.shape}, {matrix.dtype}"
        )
    dim = int(matrix.shape[1]) if dim is None else operator.index(dim)
    edge = cache.restore(
        SavedEdge(client_ids=client_ids, updates=matrix, dim=dim, tensors=tensors, ids=ids)
    )
    if edge.num_kept != cache.num_kept(dim):
        raise ValueError(
            f"cached updates of length {dim} have {edge.num_kept} numbers instead of "
            f"{cache.num_kept(dim)}"
        )
    return edge


# For caches


def edge_in_memory(updates: Mapping[str, Array], compared: Callable[[Array], Vector]) -> Edge:
    """Make an edge in memory of what ``compared`` computes of updates, some at a time."""
    dim = int(next(iter(updates.values())).shape[0])
    matrix: Vector | None = None
    first = 0
    for block in row_blocks(updates.values(), dim):
        rows = compared(block)
        if matrix is None:
            matrix = np.empty((len(updates), rows.shape[1]), dtype=np.float32)
        matrix[first : first + len(rows)] = rows
        first += len(rows)
    return Edge(list(updates), matrix, dim=dim)


def row_blocks(vectors: Collection[Array], dim: int) -> Iterator[Vector]:
    """Read vectors of length ``dim`` as float32 matrices on the host, about 16 MiB each."""
    num_rows = rows_per_block(dim)
    remaining = iter(vectors)
    for _ in range(0, len(vectors), num_rows):
        some = islice(remaining, num_rows)
        yield np.stack([np.asarray(to_numpy(vector), dtype=np.float32) for vector in some])


def rows_per_block(dim: int) -> int:
    """Count the vectors of length ``dim`` that a block of 16 MiB holds, at least one."""
    return max(1, BLOCK_BYTES // (4 * max(1, dim)))


def whole_rows(updates: Array) -> Vector:
    """Bring updates to the host as float32, without a copy where that is possible."""
    rows: Vector = to_numpy(updates).astype(np.float32, copy=False)
    return rows
