"""Caches in checkpoints and run folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedbranch.errors import DamagedFile
from fedbranch.tree.caches.in_memory import InMemory
from fedbranch.tree.caches.on_disk import OnDisk
from fedbranch.tree.caches.sketched import Sketched
from fedbranch.tree.edge import Edge, EdgeCache, SavedEdge
from fedbranch.types import JSON, Array, Vector

__all__ = ["UnknownCache", "cache_to_state", "restored_cache"]

KEEP_WHOLE_UPDATES = (InMemory, OnDisk)  # each reads the edges of the other
LONGEST_NAME = 100  # of what messages quote from files


class UnknownCache:
    """A stand-in for a cache that is not ours, in a tree that is only read.

    It restores the edges as they were saved. It neither makes edges nor compares updates with
    them, as only the cache that was saved knows how.

    Parameters
    ----------
    name
        The class of the cache that was saved.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._num_kept: dict[int, int] = {}  # by the length of updates

    def __repr__(self) -> str:
        return self.name

    def prepare(self) -> None:
        """Raise, as no new tree can use it."""
        raise self._error()

    def num_kept(self, dim: int) -> int:
        """Return the count of numbers that restored edges have."""
        if dim not in self._num_kept:
            raise self._error()
        return self._num_kept[dim]

    def compared(self, updates: Array) -> Vector:  # noqa: ARG002 -- the cache protocol
        """Raise, as it is not known what the saved cache compared."""
        raise self._error()

    def keep(self, updates: Mapping[str, Array]) -> Edge:  # noqa: ARG002 -- the cache protocol
        """Raise, as it is not known what the saved cache kept."""
        raise self._error()

    def restore(self, saved: SavedEdge) -> Edge:
        """Read a saved edge into memory."""
        edge = saved.in_memory()
        self._num_kept.setdefault(saved.dim, edge.num_kept)
        return edge

    def to_state(self) -> JSON:
        """Name the cache that was saved, as it was named there."""
        return {"kind": "other", "name": self.name}

    def _error(self) -> ValueError:
        return ValueError(
            f"the edges were made by the cache {self.name!r}, which is not part of fedbranch and "
            "was not saved; pass it when loading: ParameterTree.load(folder, cache=...)"
        )


OURS = (InMemory, Sketched, OnDisk, UnknownCache)


def cache_to_state(cache: EdgeCache) -> JSON | None:
    """Describe a cache for a checkpoint.

    Returns
    -------
    dict or None
        None for :class:`InMemory`. Where files are is not part of it. A cache that is not ours
        is only named.
    """
    # A subclass of ours is not ours: it may keep something else.
    if isinstance(cache, OURS) and type(cache) in OURS:
        return cache.to_state()
    return {"kind": "other", "name": type(cache).__name__}


def restored_cache(
    tree_state: object,
    *,
    given: EdgeCache | None = None,
    folder: Path | None = None,
    only_to_read: bool = False,
) -> EdgeCache:
    """Choose the cache for a saved tree.

    Parameters
    ----------
    tree_state
        The state of the tree, which contains what :func:`cache_to_state` returned.
    given
        The cache that the user wants instead. Whole updates may go to disk or come from there;
        sketches, and edges of a cache that is not ours, need a cache of their kind.
    folder
        Where the tree is saved. If its edges were on disk, new files go to ``edges`` in there,
        unless a cache is given.
    only_to_read
        Accept that a saved cache is not ours; :class:`UnknownCache` then stands in for it.

    Raises
    ------
    DamagedFile
        If the state contradicts itself, or names a cache that is not ours and none is given.
    ValueError
        If the cache that is given cannot read the saved edges.
    """
    saved = _saved_cache(tree_state, folder)
    if given is None:
        if saved is None:
            raise ValueError("the edges are on disk; pass cache=OnDisk(folder=...)")
        if isinstance(saved, UnknownCache) and not only_to_read:
            raise DamagedFile(
                f"the cache {saved.name!r} is not part of fedbranch and was not saved; pass it "
                "when loading: Server.load(folder, cache=...)"
            )
        return saved
    if isinstance(saved, UnknownCache):
        fits = type(given).__name__ == saved.name
    else:
        keeps_whole = saved is None or isinstance(saved, KEEP_WHOLE_UPDATES)
        fits = given == saved or (keeps_whole and isinstance(given, KEEP_WHOLE_UPDATES))
    if fits:
        return given
    if isinstance(saved, Sketched) or isinstance(given, Sketched):
        raise ValueError(
            f"the saved edges are {saved!r}, and the cache is to be {given!r}; sketches cannot "
            "become other ones, nor whole updates sketches: leave the cache out"
        )
    raise ValueError(
        f"the saved edges are {saved!r}, and the cache is to be {given!r}; pass a cache of the "
        "kind that made them"
    )


def _saved_cache(tree_state: object, folder: Path | None) -> EdgeCache | UnknownCache | None:
    """Return the cache that was saved; None for files if no folder is known."""
    try:
        state = tree_state.get("cache")  # type: ignore[attr-defined]  # checked by trying
        if state is None:  # also in states of older versions
            return InMemory()
        if state["kind"] == "sketches":
            return Sketched(size=state["size"], seed=state["seed"])
        if state["kind"] == "files":
            return None if folder is None else OnDisk(folder=folder / "edges")
        if state["kind"] == "other":
            return UnknownCache(str(state["name"])[:LONGEST_NAME])
        raise ValueError(f"the kind {str(state['kind'])[:LONGEST_NAME]!r} is not known")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedFile(f"the saved tree contradicts itself: {error!r}") from error
