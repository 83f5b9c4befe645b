"""The hierarchy of updates when the matrix of their similarities would not fit into memory.

Similarities are computed for a block of rows at a time, with all rows before each. Only those are
kept that can still be edges of the maximum spanning tree. Most cannot: two clients that are joined
by a path of stronger edges need no weaker edge. The weakest edge on the path between any two rows
follows, nearly exactly, from a few numbers for each row (:class:`_Reach`). So sifting a block takes
one comparison for each entry.

The result is that of :func:`fedbranch.core.linkage.hierarchy`, ties included. An edge as similar as
the path's weakest edge is dropped if it comes after that edge in the strict order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import (
    breadth_first_order,
    connected_components,
    minimum_spanning_tree,
)

from fedbranch.core.geometry import checked_namespace, cosine_similarity, scaled_for_cosines
from fedbranch.core.linkage import Hierarchy, spanning_tree_of, strict_order
from fedbranch.core.products import column_blocks, inner_products, is_on_host, to_numpy
from fedbranch.types import Array

__all__ = ["hierarchy_of"]

# Default memory of similarities.
BYTES_ON_HOST = 2**30
BYTES_ELSEWHERE = 2**33
# Prim's algorithm on the whole matrix brings rows to the host one by one. On another device that
# is worth it up to this many rows.
DENSE_ELSEWHERE = 4096
# Entries that are sifted at once; on the host they stay in the cache.
SIFTED_ON_HOST = 2**18
SIFTED_ELSEWHERE = 2**28
# The tree is made anew when more edges than this wait, or when the rows have grown by this factor.
MOST_WAITING = 2**20
GROWTH = 1.5
# If a larger share of similarities passes the first comparison, many are equal.
MOST_USUALLY = 1 / 64
MOST_HUBS = 32
FEWEST_AROUND_A_HUB = 32


def hierarchy_of(updates: Array, *, memory_bytes: int | None = None) -> Hierarchy:
    """Build the whole single-linkage hierarchy of the cosine similarities of updates.

    Parameters
    ----------
    updates
        Shape (num_clients, dim), floating; of any library, on any device.
    memory_bytes
        Memory for similarities. If the whole matrix fits, it is computed at once; otherwise in
        blocks of a quarter of this memory. By default 1 GiB in main memory, 8 GiB elsewhere.

    Returns
    -------
    Hierarchy
        From which any number of groups can be cut. It is the same whether computed at once or
        in blocks, except for similarities that differ by less than the rounding of their
        products. Copies of one update have such similarities, 1 up to rounding. So edges may
        join different copies, but the groups are the same where they are further apart.

    Raises
    ------
    ValueError
        If there are no updates, or one contains NaN or infinity.

    Notes
    -----
    The time is that of half the product of the updates with themselves, and of about two
    operations for every entry of it. The memory, beside the blocks:

    - about 300 bytes for every row;
    - a copy of the updates, if some are so long or short that their squares leave the dtype;
    - up to 250 MiB of main memory, if very many pairs are nearly equally similar.

    Examples
    --------
    >>> updates = np.array([[1.0, 0.0], [1.0, 0.1], [-1.0, 0.2]])
    >>> hierarchy_of(updates).groups(2)
    array([0, 0, 1])
    """
    xp = checked_namespace(updates, "updates")
    if memory_bytes is not None:
        try:
            memory_bytes = operator.index(memory_bytes)
        except TypeError:
            raise TypeError(
                f"memory_bytes is {memory_bytes!r}; pass a whole number, such as 2**30 for 1 GiB"
            ) from None
        if memory_bytes < 1:
            raise ValueError(f"memory_bytes is {memory_bytes}; it must be at least 1")
    on_host = is_on_host(updates)
    if memory_bytes is None:
        memory_bytes = BYTES_ON_HOST if on_host else BYTES_ELSEWHERE
    num_clients = int(updates.shape[0])
    if num_clients == 0:
        raise ValueError("there are no updates; pass at least one")
    number_bytes = xp.finfo(updates.dtype).bits // 8
    fits = num_clients**2 * number_bytes <= memory_bytes
    if fits and (on_host or num_clients <= DENSE_ELSEWHERE):
        merges = spanning_tree_of(to_numpy(cosine_similarity(updates)))
    else:
        merges = _Forest(memory_bytes // (4 * number_bytes)).grown_over(updates)
    # A row that is not finite has an edge that is not finite; a single row has no edge.
    found: Array = updates if num_clients == 1 else merges.similarities
    xp = array_namespace(found)
    if not bool(xp.all(xp.isfinite(found))):
        raise ValueError("updates contain NaN or infinity; leave these out")
    return merges


# The strength of an edge: its similarity minus 1j times its smaller row. NumPy compares real parts
# first, so the larger of two is the better edge; if they are equal, either may be better.
Strengths: TypeAlias = NDArray[np.complex128]


class _Edges(NamedTuple):
    """Pairs of rows, with their similarities."""

    rows: NDArray[np.intp]  # (k, 2): smaller row, larger row
    similarities: NDArray[np.floating]  # (k,), in [-1, 1]

    @property
    def strengths(self) -> Strengths:
        """The edges' strengths."""
        strengths: Strengths = self.similarities - 1j * self.rows[:, 0]
        return strengths


@dataclass
class _Reach:
    """A lower bound for the path between any two rows, from a few hubs among the rows.

    The strength of a path is that of its weakest edge. Every row belongs to the hub that it
    reaches by the strongest path. Two rows are then joined by a path through their hubs. It is as
    strong as the weakest of three: the paths from the rows to their hubs, and that between the
    hubs.
    """

    strength: Strengths  # (num_rows,): of the path to the row's hub
    hub: NDArray[np.intp]  # (num_rows,): its number
    between: Strengths  # (num_hubs, num_hubs), infinite on the diagonal

    def extended(self, strongest: _Edges) -> _Reach:
        """Add rows, each of which is connected to a row before it."""
        num_before = len(self.hub)
        strength = np.concatenate([np.full(num_before, np.inf), strongest.strengths])
        above = np.concatenate([np.arange(num_before), strongest.rows[:, 0]])
        above, strength = _followed_up(above, strength)
        return _Reach(
            np.concatenate(
                [self.strength, np.minimum(strength, self.strength[above])[num_before:]]
            ),
            self.hub[above],
            self.between,
        )


class _Forest:
    """A maximum spanning tree that grows by blocks of rows.

    Parameters
    ----------
    most_entries
        Similarities that may be computed at once.
    """

    def __init__(self, most_entries: int) -> None:
        self._most_entries = most_entries
        self._tree: _Edges
        self._reach: _Reach  # by the tree, and by the strongest edge of each row since then
        self._waiting: list[_Edges] = []  # edges that may be better than some of the tree
        self._num_waiting = 0
        self._rows_of_tree = 0

    def grown_over(self, updates: Array) -> Hierarchy:
        """Build the hierarchy of these updates."""
        num_first = max(1, min(math.isqrt(self._most_entries), int(updates.shape[0])))
        if not is_on_host(updates):
            num_first = min(num_first, DENSE_ELSEWHERE)
        first = spanning_tree_of(to_numpy(cosine_similarity(updates[:num_first, :])))
        self._tree = _Edges(first.edge_rows, first.similarities)
        self._rows_of_tree = num_first
        self._measure_reach()
        for start, block in _blocks(updates, num_first, self._most_entries):
            self._add(start, block)
        self._join(int(updates.shape[0]))
        return Hierarchy(edge_rows=self._tree.rows, similarities=self._tree.similarities)

    def _add(self, start: int, block: Array) -> None:
        """Add rows, given their similarities to all rows before each; changes the block."""
        xp = array_namespace(block)
        num_new, num_rows = (int(length) for length in block.shape)
        # With the strongest edge of each new row, the tree spans all rows and can sift the block.
        nearest = xp.argmax(block, axis=1)
        here = xp.arange(num_new, device=device(block))
        strongest = _edges(nearest, np.arange(start, num_rows), block[here, nearest])
        block[here, nearest] = -math.inf
        self._keep(strongest)
        self._reach = self._reach.extended(strongest)
        step = max(1, min(_at_once(block), self._most_entries // 4) // num_rows)
        sieve = _Sieve(self._reach, block)
        top = 0
        while top < num_new:
            rows = block[top : top + step, :]
            places = sieve.sifted(rows, start + top)
            if len(places) > MOST_WAITING and step > 1:
                step //= 2  # fewer rows, so that the host gets fewer places at once
                continue
            row, column = np.divmod(to_numpy(places), num_rows)
            found = xp.take(xp.reshape(rows, (-1,)), places)
            self._keep(_edges(column, row + start + top, found))
            top += step
            if self._num_waiting > MOST_WAITING:
                self._join(num_rows)
                self._measure_reach()
                sieve = _Sieve(self._reach, block)
        if num_rows >= GROWTH * self._rows_of_tree:
            self._join(num_rows)
            self._measure_reach()

    def _keep(self, edges: _Edges) -> None:
        self._waiting.append(edges)
        self._num_waiting += len(edges.similarities)

    def _join(self, num_rows: int) -> None:
        """Make the tree anew from its own and the waiting edges."""
        rows, similarities = zip(self._tree, *self._waiting, strict=True)
        edges = _Edges(np.concatenate(rows), np.concatenate(similarities))
        order = strict_order(*edges, num_rows)
        kept = order[_kept_by_rank(edges.rows[order], num_rows)]
        self._tree = _Edges(edges.rows[kept], edges.similarities[kept])
        self._waiting, self._num_waiting = [], 0
        self._rows_of_tree = num_rows

    def _measure_reach(self) -> None:
        """Compute how strongly the tree connects its rows."""
        self._reach = _reach_from(_chosen_hubs(self._tree), self._tree)


class _Sieve:
    """Finds the similarities of a block that may be edges of the tree.

    Parameters
    ----------
    reach
        Of all rows up to the last of the block.
    block
        The arrays here are of its library, and on its device.
    """

    def __init__(self, reach: _Reach, block: Array) -> None:
        xp = array_namespace(block)
        dtype = to_numpy(block[:0, :0]).dtype

        def there(array: NDArray[np.generic]) -> Array:
            placed: Array = xp.asarray(np.ascontiguousarray(array), device=device(block))
            return placed

        self._hub = there(reach.hub.astype(np.int64))
        self._row = there(np.arange(len(reach.hub), dtype=np.int32))
        self._paths = _Paths(*map(there, _paths(reach.strength, dtype)))
        between = _Paths(*map(there, _paths(reach.between, dtype)))
        own = self._paths.to_beat_by(self._row)
        self._ceilings = xp.empty(
            (len(reach.between), len(reach.hub)), dtype=block.dtype, device=device(block)
        )
        for number in range(len(reach.between)):
            to_hub = _Paths(*(xp.take(part[number, :], self._hub) for part in between))
            self._ceilings[number, :] = xp.minimum(own, to_hub.to_beat_by(self._row))

    def sifted(self, rows: Array, start: int) -> Array:
        """Find the flat places of similarities that may be edges, in rows from ``start`` on."""
        xp = array_namespace(rows)
        own = slice(start, start + int(rows.shape[0]))
        paths = _Paths(*(part[own][:, None] for part in self._paths))
        ceilings = xp.take(self._ceilings, self._hub[own], axis=0)
        places = _places(rows >= xp.minimum(ceilings, paths.strength))
        # If few are equal, keeping them costs less than finding out which comes first.
        if places.shape[0] > MOST_USUALLY * rows.shape[0] * rows.shape[1]:
            places = _places(rows >= xp.minimum(ceilings, paths.to_beat_by(self._row[None, :])))
        return places


def _places(is_there: Array) -> Array:
    xp = array_namespace(is_there)
    places: Array = xp.nonzero(xp.reshape(is_there, (-1,)))[0]
    return places


class _Paths(NamedTuple):
    """The weakest edges of some paths, and the similarities that would beat them."""

    strength: Array  # similarity of the weakest edge
    beyond: Array  # the next larger number
    first: Array  # smaller row of the weakest edge

    def to_beat_by(self, row: Array) -> Array:
        """Compute the least similarity that an edge needs, if its smaller row is ``row``.

        Of equal edges the one with the smaller row is better.
        """
        xp = array_namespace(row)
        to_beat: Array = xp.where(self.first < row, self.beyond, self.strength)
        return to_beat


def _paths(strengths: Strengths, dtype: np.dtype[np.floating]) -> tuple[NDArray[np.generic], ...]:
    """Compute the three fields of :class:`_Paths`."""
    strength = strengths.real.astype(dtype)
    with np.errstate(under="ignore"):
        beyond = np.nextafter(strength, dtype.type(np.inf))
    # Similarities that exceed 1 by rounding count as 1, so nothing beats 1.
    beyond[strength >= 1] = np.inf
    return strength, beyond, (-strengths.imag).astype(np.int32)


def _edges(smaller: Array, larger: NDArray[np.intp], similarities: Array) -> _Edges:
    rows = np.stack([to_numpy(smaller), larger], axis=1).astype(np.intp)
    return _Edges(rows, np.clip(to_numpy(similarities), -1, 1))


def _blocks(updates: Array, start: int, most_entries: int) -> Iterator[tuple[int, Array]]:
    """Compute, for some rows at a time, their cosines to all rows before each of them.

    Entries for other rows are minus infinity.
    """
    xp = array_namespace(updates)
    num_clients = int(updates.shape[0])
    rows, scale = scaled_for_cosines(updates)
    while start < num_clients:
        # The largest n with n * (start + n) <= most_entries.
        num_new = (math.isqrt(start**2 + 4 * most_entries) - start) // 2
        end = min(num_clients, start + max(1, num_new))
        block = inner_products(rows[start:end, :], rows[:end, :])
        for strip in column_blocks(end - start, max(1, _at_once(updates) // end)):
            similarity = block[strip, :]  # a view
            similarity *= scale[None, :end]
            similarity *= scale[start:end][strip, None]
        here = xp.arange(end - start, device=device(updates))
        block[:, start:][here[None, :] >= here[:, None]] = -math.inf
        yield start, block
        start = end


def _at_once(array: Array) -> int:
    return SIFTED_ON_HOST if is_on_host(array) else SIFTED_ELSEWHERE


def _followed_up(
    above: NDArray[np.intp], strength: Strengths
) -> tuple[NDArray[np.intp], Strengths]:
    """Follow every row up to its end; return the ends and the weakest edges on the way."""
    while not np.array_equal(higher := above[above], above):  # half as many steps each time
        strength = np.minimum(strength, strength[above])
        above = higher
    return above, strength


def _kept_by_rank(edges: NDArray[np.intp], num_rows: int) -> NDArray[np.intp]:
    """Return the edges that a spanning forest keeps; the best edges come first."""
    ranks = np.arange(1, len(edges) + 1, dtype=np.float64)
    graph = coo_array((ranks, (edges[:, 0], edges[:, 1])), shape=(num_rows, num_rows))
    kept = minimum_spanning_tree(graph.tocsr(), overwrite=True).data
    return np.sort(kept).astype(np.intp) - 1


def _chosen_hubs(tree: _Edges) -> NDArray[np.intp]:
    """Choose rows in the middle of large connected groups.

    The weakest edges are cut, more and more of them. Whenever that separates a large group
    without a hub, the group gets a hub at its strongest edge.
    """
    num_rows = len(tree.rows) + 1
    enough = max(FEWEST_AROUND_A_HUB, num_rows // 512)
    hubs = [int(tree.rows[0, 0])] if len(tree.rows) else [0]
    num_cut = 1
    while num_cut < num_rows // 2 and len(hubs) < MOST_HUBS:
        kept = tree.rows[: len(tree.rows) - num_cut]
        graph = coo_array((np.ones(len(kept)), (kept[:, 0], kept[:, 1])), shape=(num_rows,) * 2)
        num_groups, group = connected_components(graph, directed=False)
        sizes = np.bincount(group, minlength=num_groups)
        sizes[group[hubs]] = 0
        # Edges are in descending order, so the first edge of a group is its strongest.
        with_edges, firsts = np.unique(group[kept[:, 0]], return_index=True)
        strongest = dict(zip(with_edges.tolist(), kept[firsts, 0].tolist(), strict=True))
        largest = np.argsort(-sizes, kind="stable")[: MOST_HUBS - len(hubs)]
        hubs += [strongest[number] for number in largest[sizes[largest] >= enough].tolist()]
        num_cut *= 4
    return np.array(hubs, dtype=np.intp)


def _reach_from(hub_rows: NDArray[np.intp], tree: _Edges) -> _Reach:
    """Find the strongest path from every row to a hub, and between the hubs."""
    num_rows, num_hubs = len(tree.rows) + 1, len(hub_rows)
    # A root is joined to all hubs by edges stronger than any other. The best tree has the strongest
    # path from each row to the root; each edge that it drops is the weakest between two hubs.
    to_root = np.stack([hub_rows, np.full(num_hubs, num_rows)], axis=1)
    edges = np.concatenate([to_root, tree.rows])
    strengths = np.concatenate([np.full(num_hubs, np.inf), tree.strengths])
    kept = _kept_by_rank(edges, num_rows + 1)
    graph = coo_array(
        (np.ones(len(kept)), (edges[kept, 0], edges[kept, 1])), shape=(num_rows + 1,) * 2
    )
    above = breadth_first_order(graph.tocsr(), num_rows, directed=False)[1].astype(np.intp)
    strength = np.full(num_rows + 1, np.inf, dtype=strengths.dtype)
    low, high = edges[kept].T
    is_below = above[low] == high
    strength[np.where(is_below, low, high)] = strengths[kept]
    above[hub_rows] = hub_rows  # so that paths end at hubs, not at the root
    above[num_rows] = num_rows
    above, strength = _followed_up(above, strength)
    number = np.zeros(num_rows + 1, dtype=np.intp)
    number[hub_rows] = np.arange(num_hubs)
    hub = number[above[:num_rows]]
    between = np.full((num_hubs, num_hubs), -np.inf, dtype=strengths.dtype)
    np.fill_diagonal(between, np.inf)
    is_dropped = np.ones(len(edges), dtype=bool)
    is_dropped[kept] = False
    for (low_row, high_row), weakest in zip(
        edges[is_dropped].tolist(), strengths[is_dropped], strict=True
    ):
        pair = hub[low_row], hub[high_row]
        between[pair] = between[pair[::-1]] = weakest
    for middle in range(num_hubs):
        through = np.minimum(between[:, middle, None], between[None, middle, :])
        between = np.maximum(between, through)
    return _Reach(strength[:num_rows], hub, between)
