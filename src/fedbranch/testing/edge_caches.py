"""The check of an edge cache: edges keep, compare and save what they were given."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.geometry import scaled_for_cosines
from fedbranch.testing.contract import Contract, shortened
from fedbranch.tree import Edge, EdgeCache, ParameterTree, SavedEdge, make_edge
from fedbranch.tree.edge import TENSOR_NAME
from fedbranch.types import Array, Vector

__all__ = ["check_edge_cache"]

ROUNDING = 1e-5  # of cosines, and of numbers relative to the length of a vector
DIMS = (5, 300)
NUM_CLIENTS = 6  # in each group
NUM_NEWCOMERS = 9
BLOCKS = (1, 4, 100)  # rows at once

Groups = list[dict[str, Vector]]


def check_edge_cache(make_cache: Callable[[], EdgeCache], *, error: float = ROUNDING) -> None:
    """Check that a cache keeps the contract of :class:`fedbranch.tree.EdgeCache`.

    Parameters
    ----------
    make_cache
        Returns a cache. Each call returns one with the same settings.
    error
        Largest error of a similarity that the cache may have, for updates of 300 numbers. The
        default is right for a cache that keeps whole updates.

    Raises
    ------
    AssertionError
        With the first clause of the contract that does not hold.

    Examples
    --------
    >>> from fedbranch import InMemory
    >>> check_edge_cache(InMemory)
    """
    contract = Contract("fedbranch.tree.EdgeCache", _shown(make_cache))
    with contract.answering("make_cache()"):
        cache: object = make_cache()
    if not isinstance(cache, EdgeCache):
        methods = ("prepare", "num_kept", "compared", "keep", "restore")
        missing = [name for name in methods if not callable(getattr(cache, name, None))]
        raise contract.broken(
            "a cache has the methods of the protocol", f"missing: {missing}", "add them"
        )
    with contract.answering("prepare(), twice"):
        cache.prepare()
        cache.prepare()
    check = _Check(contract, make_cache, cache, error)
    for dim in DIMS:
        check.check_compared(dim)
        check.check_edge(dim)
    check.check_one_client()
    check.check_missing_updates()
    check.check_arrays_of_torch()
    check.check_similarities()
    check.check_discard()
    check.check_failed_keep()
    with tempfile.TemporaryDirectory() as folder:
        check.check_tree(Path(folder))


class _Check:
    def __init__(
        self,
        contract: Contract,
        make_cache: Callable[[], EdgeCache],
        cache: EdgeCache,
        error: float,
    ) -> None:
        self._contract = contract
        self._make_cache = make_cache
        self._cache = cache
        self._error = error

    def check_compared(self, dim: int) -> None:
        """Check the shape of what is compared, and that each update counts alone."""
        updates = np.stack(list(_planted(dim)[0].values()))
        compared = self._compared(updates)
        num_kept = self._cache.num_kept(dim)
        if compared.shape != (len(updates), num_kept) or compared.dtype != np.float32:
            raise self._contract.broken(
                "compared returns float32 of shape (num_updates, num_kept(dim))",
                f"{compared.dtype} of shape {compared.shape}; num_kept({dim}) is {num_kept}",
                "let num_kept say how many numbers compared returns",
            )
        for rows in ([3], [5, 0], list(range(len(updates)))[::-1]):
            some = self._compared(updates[rows])
            if not _near(some, compared[rows]):
                raise self._contract.broken(
                    "compared depends on nothing but each update",
                    f"for the updates {rows} of length {dim} alone: "
                    f"{shortened(some[0, :4])}, among others {shortened(compared[rows[0], :4])}",
                    "compute each row from its update only",
                )
        if not _near(_rows_of(self._make_cache().compared(updates)), compared):
            raise self._contract.broken(
                "caches with the same settings do the same",
                f"two caches of make_cache() compare other numbers of updates of length {dim}",
                "derive everything from the settings; draw nothing anew",
            )

    def check_edge(self, dim: int) -> None:
        """Check what an edge keeps, in every way of reading it."""
        updates = _planted(dim)[0]
        given = {client_id: update.copy() for client_id, update in updates.items()}
        edge = self._kept(given)
        for update in given.values():
            update[:] = 99
        self._check_content(edge, updates, "after the arrays that it was made from have changed")
        if edge.dim != dim or edge.num_kept != self._cache.num_kept(dim):
            raise self._contract.broken(
                "an edge knows the length of updates, and how many numbers it keeps",
                f"edge.dim is {edge.dim} and edge.num_kept {edge.num_kept}; the updates have {dim} "
                f"numbers, num_kept({dim}) is {self._cache.num_kept(dim)}",
                "pass dim=... and the kept rows to Edge",
            )
        for num_rows in BLOCKS:
            rows = np.concatenate(list(edge.blocks(num_rows)))
            if not np.array_equal(rows, np.stack([edge[client_id] for client_id in edge])):
                raise self._contract.broken(
                    "edge.blocks reads all rows in the order of the clients",
                    f"blocks of {num_rows} rows are not the rows of the clients",
                    "override blocks together with __getitem__",
                )
        saved = SavedEdge(
            client_ids=list(edge),
            updates=np.array(edge.tensors[TENSOR_NAME]),
            dim=dim,
            tensors={TENSOR_NAME: np.array(edge.tensors[TENSOR_NAME])},
            ids=edge.ids,
        )
        with self._contract.answering("restore(saved)"):
            restored = self._cache.restore(saved)
        self._check_same(restored, edge, "restored from its tensors")

    def check_one_client(self) -> None:
        """Check an edge with one client, and with updates of zeros."""
        for client_id, update in [("only", [3, 4, 0, 0, 1]), ("zero", [0, 0, 0, 0, 0])]:
            updates = {client_id: np.array(update, dtype=np.float32)}
            edge = self._kept(updates)
            self._check_content(edge, updates, "with one client")

    def check_missing_updates(self) -> None:
        """Check that a client without an update is not on the edge."""
        updates = _planted(DIMS[0])[0]
        with self._contract.answering("keep, for an edge of which some clients have no update"):
            some = make_edge(self._cache, {**updates, "absent": None})
            empty = make_edge(self._cache, {"absent": None})
        if "absent" in some or len(empty):
            raise self._contract.broken(
                "of a client without an update nothing is kept",
                f"edges of {list(some)} and {list(empty)}",
                "keep the clients that keep was given, and no others",
            )
        self._check_content(some, updates, "beside a client without an update")

    def check_arrays_of_torch(self) -> None:
        """Check updates of another library."""
        import torch  # here: edges themselves need no PyTorch

        updates = _planted(DIMS[0])[0]
        tensors: dict[str, Array] = {i: torch.from_numpy(own) for i, own in updates.items()}  # type: ignore[misc]  # a tensor is an array of its own library
        self._check_content(self._kept(tensors), updates, "made from tensors of PyTorch")

    def check_similarities(self) -> None:
        """Compare similarities with brute force: of what is kept, and of whole updates."""
        dim = DIMS[-1]
        groups, newcomers, _ = _planted_with_newcomers(dim)
        edge = self._kept(groups[0])
        compared = self._compared(newcomers)
        with self._contract.answering("edge.similarities(updates)"):
            found = edge.similarities(scaled_for_cosines(compared))
        kept = _cosines(compared, np.stack([edge[client_id] for client_id in edge]))
        whole = _cosines(newcomers, np.stack(list(groups[0].values())))
        for what, expected, bound in [
            ("the cosines of what is compared with what is kept", kept, ROUNDING),
            ("the cosines of whole updates, within the error of the cache", whole, self._error),
        ]:
            off = np.inf
            if found.shape == expected.shape:
                off = float(np.abs(found - expected).max())
            if not off <= bound:
                raise self._contract.broken(
                    f"similarities are {what}",
                    f"the largest difference is {off:.3g}, the bound {bound:.3g}; shapes "
                    f"{found.shape} and {expected.shape}, (updates, clients)",
                    "compare what `compared` returns, or state the error of the cache: error=...",
                )

    def check_discard(self) -> None:
        """Check that edges outlive each other, also with the same content."""
        updates = _planted(DIMS[-1])[0]
        one, same = self._kept(updates), self._kept(updates)
        with self._contract.answering("edge.discard()"):
            one.discard()
        self._check_content(same, updates, "after an edge with the same content was discarded")
        self._check_content(self._kept(updates), updates, "made after another one was discarded")
        same.discard()

    def check_failed_keep(self) -> None:
        """Check that an error while updates are read leaves the cache as it was."""
        updates = _planted(DIMS[0])[0]
        broken: dict[str, Array] = {**updates, "broken": _Unreadable(DIMS[0])}  # type: ignore[dict-item]  # it only looks like an array
        found = "no error"
        try:
            self._cache.keep(broken)
        except _CannotBeRead:
            found = ""
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        if found:
            raise self._contract.broken(
                "if updates cannot be read, keep raises their error, and leaves nothing behind",
                found,
                "let the error of an update's array through",
            )
        self._check_content(self._kept(updates), updates, "made after one that failed")

    # In a tree

    def check_tree(self, folder: Path) -> None:
        """Check a tree with these edges: routing, saving, loading, and splits that are undone."""
        dim = DIMS[-1]
        groups, newcomers, own = _planted_with_newcomers(dim)
        with self._contract.answering("a split"):
            tree = ParameterTree(dim, cache=self._make_cache())
            tree.split(0, groups)
        expected = [1 + int(group) for group in own]
        self._check_routes(tree, newcomers, expected, "a tree that was split")
        with self._contract.answering("ParameterTree.save(folder)"):
            tree.save(folder / "saved")
        loaded = self._loaded(folder / "saved")
        for node in tree:
            self._check_same(
                loaded[node.id].cached_updates, node.cached_updates, "loaded from a folder"
            )
        self._check_routes(loaded, newcomers, expected, "a loaded tree")
        # It goes on: another split, saved beside the edges that were loaded.
        pair = [dict(list(groups[0].items())[:3]), dict(list(groups[0].items())[3:])]
        with self._contract.answering("a split of a loaded tree"):
            loaded.split(1, pair)
            loaded.save(folder / "again")
        again = self._loaded(folder / "again")
        for node in loaded:
            self._check_same(
                again[node.id].cached_updates, node.cached_updates, "loaded a second time"
            )
        with self._contract.answering("undo_split"):
            again.undo_split(0)
            children = again.split(0, groups)
        self._check_routes(
            again,
            newcomers,
            [children[group] for group in own],
            "a tree whose split was undone and made anew",
        )
        self._check_routes(
            self._loaded(folder / "saved"),
            newcomers,
            expected,
            "a checkpoint, after edges of another tree were discarded,",
        )

    def _loaded(self, folder: Path) -> ParameterTree:
        with self._contract.answering("ParameterTree.load(folder, cache=...)"):
            return ParameterTree.load(folder, cache=self._make_cache())

    def _check_routes(
        self, tree: ParameterTree, updates: Vector, expected: Sequence[int], where: str
    ) -> None:
        with self._contract.answering(f"descending in {where}"):
            found = [descent.child_id for descent in tree.descend_all(0, updates)]
        if found != list(expected):
            raise self._contract.broken(
                "newcomers go to the child whose updates they resemble",
                f"{where} sends them to {found}; their groups are at {list(expected)}",
                "check `compared` and `restore`",
            )

    # Edges

    def _kept(self, updates: Mapping[str, Array]) -> Edge:
        with self._contract.answering("keep(updates)"):
            edge = self._cache.keep(updates)
        if not isinstance(edge, Edge):
            raise self._contract.broken(
                "keep returns an Edge",
                f"a {type(edge).__name__}",
                "return an Edge, or a subclass of it",
            )
        return edge

    def _compared(self, updates: Vector) -> Vector:
        with self._contract.answering("compared(updates)"):
            return _rows_of(self._cache.compared(updates))

    def _check_content(self, edge: Edge, updates: Mapping[str, Vector], when: str) -> None:
        """Compare an edge with what is compared of its updates."""
        if list(edge) != list(updates) or len(edge) != len(updates):
            raise self._contract.broken(
                "an edge has the clients that it was made of, in their order",
                f"an edge {when} has {list(edge)}; it was made of {list(updates)}",
                "pass list(updates) to Edge",
            )
        expected = self._compared(np.stack(list(updates.values())))
        for row, client_id in enumerate(updates):
            with self._contract.answering(f"reading an edge {when}"):
                kept = np.asarray(edge[client_id])
            if not _near(kept[None, :], expected[row : row + 1]):
                raise self._contract.broken(
                    "edge[client_id] equals the client's row of compared",
                    f"client {client_id!r}, on an edge {when}: {shortened(kept[:4])} instead of "
                    f"{shortened(expected[row, :4])}",
                    "keep a copy of what compared returns",
                )
            if kept.flags.writeable:
                raise self._contract.broken(
                    "what an edge returns is read-only",
                    f"edge[{client_id!r}] can be written to",
                    "return vectors with flags.writeable = False",
                )

    def _check_same(self, found: Edge, expected: Edge, how: str) -> None:
        if list(found) != list(expected):
            raise self._contract.broken(
                "restore makes an edge with the same ids, in the same order",
                f"{how}: {list(found)}, before {list(expected)}",
                "use saved.client_ids, or saved.in_memory()",
            )
        for client_id in expected:
            own = np.asarray(found[client_id])
            if not np.array_equal(own, expected[client_id]):
                raise self._contract.broken(
                    "restore makes an edge with the same numbers",
                    f"client {client_id!r}, {how}: {shortened(own[:4])}, before "
                    f"{shortened(expected[client_id][:4])}",
                    "do not apply `compared` to what is already kept",
                )


class _CannotBeRead(Exception):
    pass


class _Unreadable:
    """An update whose numbers cannot be read, as on a device that is gone."""

    def __init__(self, dim: int) -> None:
        self.shape = (dim,)
        self.ndim = 1

    def __array__(self, dtype: object = None, copy: object = None) -> NDArray[np.float32]:
        raise _CannotBeRead(f"this update cannot be read as {dtype}, {copy}")

    def __len__(self) -> int:
        return self.shape[0]


def _planted(dim: int) -> Groups:
    return _planted_with_newcomers(dim)[0]


def _planted_with_newcomers(dim: int) -> tuple[Groups, Vector, NDArray[np.intp]]:
    """Draw three groups of updates, and newcomers of each of them."""
    rng = np.random.default_rng(0)
    pulls = rng.normal(size=(3, dim))
    groups = [
        {
            f"{group}-{n}": (pull + 0.5 * rng.normal(size=dim)).astype(np.float32)
            for n in range(NUM_CLIENTS)
        }
        for group, pull in enumerate(pulls)
    ]
    own = np.arange(NUM_NEWCOMERS) % len(pulls)
    newcomers = pulls[own] + 0.5 * rng.normal(size=(NUM_NEWCOMERS, dim))
    return groups, newcomers.astype(np.float32), own


def _rows_of(compared: object) -> Vector:
    rows: Vector = np.asarray(compared)
    return rows


def _near(found: Vector, expected: Vector) -> bool:
    """Compare rows, relative to the length of each."""
    if found.shape != expected.shape:
        return False
    lengths = np.linalg.norm(expected.astype(np.float64), axis=1)
    off = np.linalg.norm(found.astype(np.float64) - expected, axis=1)
    return bool((off <= ROUNDING * lengths).all())


def _cosines(a: Vector, b: Vector) -> NDArray[np.float64]:
    """Compute all cosines one by one, in double precision."""
    return np.array(
        [
            [
                float(x.astype(np.float64) @ y) / float(np.linalg.norm(x) * np.linalg.norm(y))
                for y in b.astype(np.float64)
            ]
            for x in a.astype(np.float64)
        ]
    )


def _shown(make_cache: object) -> str:
    return str(getattr(make_cache, "__name__", None) or shortened(make_cache))
