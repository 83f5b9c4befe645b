"""Aggregates that a few hostile clients cannot move far, to use in place of the mean.

Pass one as ``aggregate`` to :class:`fedbranch.Server` or :func:`fedbranch.simulate`: it then
averages inside every cluster. Its guarantee holds for clients of one distribution, as inside a
true cluster. If a cluster has several groups, clients of the minority look hostile.

The functions take arrays of any Array API library, like those of
:mod:`fedbranch.core.geometry`, and walk over blocks of columns.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TypeAlias

import numpy as np
from array_api_compat import array_namespace, device

from fedbranch.core.geometry import norms, take_rows, to_numpy, weighted_mean
from fedbranch.core.products import column_blocks
from fedbranch.types import JSON, Array

__all__ = [
    "RobustAggregate",
    "aggregate_from_state",
    "aggregate_to_state",
    "median",
    "multi_krum",
    "trimmed_mean",
]

RobustAggregate: TypeAlias = Callable[[Array, Array], Array]

ENTRIES_AT_ONCE = 2**22


def median(updates: Array, weights: Array) -> Array:
    """Take the median of every coordinate.

    Parameters
    ----------
    updates
        Shape (num_clients, dim), floating and finite.
    weights
        Shape (num_clients,). Ignored: every client counts alike, whatever weight it claims.

    Returns
    -------
    Array
        Shape (dim,), of the updates' dtype. For an even number of clients it is the mean of the
        two in the middle. The order of the clients changes no bit.

    Examples
    --------
    >>> median(np.array([[1.0, 2.0], [3.0, 0.0], [999.0, -999.0]]), np.ones(3))
    array([3., 0.])
    """
    xp = _checked_namespace(updates, weights)
    num_clients = int(updates.shape[0])
    lower, upper = (num_clients - 1) // 2, num_clients // 2
    blocks = []
    for block in _blocks_at_hand(updates):
        ordered = xp.sort(updates[:, block], axis=0)
        blocks.append((xp.astype(ordered[lower], xp.float64) + ordered[upper]) / 2)
    middle: Array = xp.astype(xp.concat(blocks), updates.dtype)
    return middle


def trimmed_mean(share: float) -> RobustAggregate:
    """Make an aggregate that leaves the largest and the smallest values out of every mean.

    Parameters
    ----------
    share
        Share of the clients to leave out at either end, in [0, 0.5), rounded down to whole
        clients: of 9 clients a share of 0.1 leaves out none. Take at least the share of clients
        that may be hostile.

    Returns
    -------
    callable
        Maps updates (num_clients, dim), finite, and weights (num_clients,) to the mean of every
        coordinate over the clients left in, each counted with its weight. Of equal values those
        with smaller weights count as smaller. The order of the clients changes no bit.

    Examples
    --------
    >>> updates = np.array([[1.0], [2.0], [3.0], [999.0]])
    >>> trimmed_mean(0.25)(updates, np.array([1.0, 1.0, 3.0, 1.0]))
    array([2.75])
    """
    if not 0 <= share < 0.5:
        raise ValueError(
            f"share is {share!r}; it must be at least 0 and below 0.5, or no client would be left"
        )

    return _TrimmedMean(float(share))


def multi_krum(num_attackers: int, num_kept: int | None = None) -> RobustAggregate:
    """Make an aggregate of those updates that have the nearest neighbours (Blanchard et al., 2017).

    An update's score is the sum of the squared distances to its n - f - 2 nearest neighbours,
    of n clients and f attackers; the updates with the smallest scores are averaged.

    Parameters
    ----------
    num_attackers
        f: the number of hostile clients to withstand in every cluster.
    num_kept
        The number of updates to average; by default n - f. With 1 it is Krum.

    Returns
    -------
    callable
        Maps updates (num_clients, dim), finite, and weights (num_clients,) to the weighted mean
        of those kept. Of updates with equal scores the shorter one is kept; the order of the
        clients decides nothing.

    Notes
    -----
    The paper's guarantee needs n >= 2 f + 3. Clusters shrink when they split, so fewer clients
    are no error: at least one neighbour counts, and at least one update is kept. Attackers can
    win then.

    Distances are formed from inner products in float64: O(n**2 dim) time in matrix products,
    and exact to about 1e-15 of the squared lengths.

    Examples
    --------
    >>> updates = np.array([[1.0], [1.1], [1.2], [1.3], [-9.0]])
    >>> multi_krum(1)(updates, np.ones(5))
    array([1.15])
    """
    if operator.index(num_attackers) < 0:
        raise ValueError(f"num_attackers is {num_attackers}; it must be at least 0")
    if num_kept is not None and operator.index(num_kept) < 1:
        raise ValueError(f"num_kept is {num_kept}; it must be at least 1")

    return _MultiKrum(num_attackers, num_kept)


@dataclass(frozen=True)
class _TrimmedMean:
    share: float

    def __call__(self, updates: Array, weights: Array) -> Array:
        xp = _checked_namespace(updates, weights)
        num_clients = int(updates.shape[0])
        num_cut = math.floor(self.share * num_clients + 1e-9)  # 0.29 * 100 is below 29
        kept = slice(num_cut, num_clients - num_cut)
        wide = xp.astype(xp.asarray(weights, device=device(updates)), xp.float64)
        by_weight = xp.argsort(wide)
        wide = xp.take(wide, by_weight, axis=0)
        blocks = []
        for block in _blocks_at_hand(updates):
            columns = xp.take(updates[:, block], by_weight, axis=0)
            values = xp.astype(xp.sort(columns, axis=0)[kept], xp.float64)
            shares = wide[xp.argsort(columns, axis=0, stable=True)[kept]]
            blocks.append(xp.sum(values * shares, axis=0) / xp.sum(shares, axis=0))
        mean: Array = xp.astype(xp.concat(blocks), updates.dtype)
        return mean


@dataclass(frozen=True)
class _MultiKrum:
    num_attackers: int
    num_kept: int | None

    def __call__(self, updates: Array, weights: Array) -> Array:
        _checked_namespace(updates, weights)
        num_clients = int(updates.shape[0])
        wanted = num_clients - self.num_attackers if self.num_kept is None else self.num_kept
        num_rows = min(max(1, wanted), num_clients)
        shares = to_numpy(weights)
        rows = _nearest_rows(updates, shares, self.num_attackers, num_rows)
        return weighted_mean(take_rows(updates, rows), shares[rows])


def aggregate_to_state(aggregate: RobustAggregate) -> JSON:
    """Describe an aggregate as JSON; one that is not fedbranch's is only named.

    Examples
    --------
    >>> aggregate_to_state(trimmed_mean(0.1))
    {'name': 'trimmed_mean', 'settings': {'share': 0.1}}
    """
    for name, plain in _WITHOUT_SETTINGS.items():
        if aggregate is plain:
            return {"name": name, "settings": {}}
    for name, (kind, _) in _WITH_SETTINGS.items():
        if isinstance(aggregate, kind):
            return {"name": name, "settings": asdict(aggregate)}  # type: ignore[call-overload]  # a dataclass
    name = getattr(aggregate, "__qualname__", type(aggregate).__qualname__)
    return {"name": str(name), "settings": None}


def aggregate_from_state(state: JSON) -> RobustAggregate:
    """Rebuild an aggregate that :func:`aggregate_to_state` described.

    Raises
    ------
    ValueError
        If it is not one of fedbranch's.
    """
    name, settings = state["name"], state["settings"]
    if settings is None or name not in {**_WITHOUT_SETTINGS, **_WITH_SETTINGS}:
        raise ValueError(
            f"the aggregate {name!r} is not part of fedbranch and was not saved; pass it when "
            "loading: Server.load(folder, aggregate=...)"
        )
    return (
        _WITH_SETTINGS[name][1](**settings) if name in _WITH_SETTINGS else _WITHOUT_SETTINGS[name]
    )


# What checkpoints, run folders and experiments know by name: functions, and those that are made
# with settings, by their class and their maker.
_WITHOUT_SETTINGS: dict[str, RobustAggregate] = {"weighted_mean": weighted_mean, "median": median}
_WITH_SETTINGS: dict[str, tuple[type, Callable[..., RobustAggregate]]] = {
    "trimmed_mean": (_TrimmedMean, trimmed_mean),
    "multi_krum": (_MultiKrum, multi_krum),
}


def _nearest_rows(
    updates: Array, weights: np.ndarray, num_attackers: int, num_rows: int
) -> list[int]:
    """Return the rows with the smallest scores, ascending."""
    num_clients = int(updates.shape[0])
    if num_rows == num_clients:
        return list(range(num_clients))
    num_neighbours = min(max(1, num_clients - num_attackers - 2), num_clients - 1)
    distances = _squared_distances(updates)
    np.fill_diagonal(distances, np.inf)
    scores = np.sort(distances, axis=1)[:, :num_neighbours].sum(axis=1)
    lengths = to_numpy(norms(updates))

    def place(row: int) -> tuple[float, float]:
        return float(scores[row]), float(lengths[row])

    ordered = sorted(range(num_clients), key=place)
    last = place(ordered[num_rows - 1])
    chosen = [row for row in ordered if place(row) < last]
    tied = [row for row in ordered if place(row) == last]
    if len(chosen) + len(tied) > num_rows:  # ties go by content, not by row
        tied.sort(key=lambda row: (to_numpy(updates[row]).tobytes(), float(weights[row])))
    return sorted([*chosen, *tied[: num_rows - len(chosen)]])


def _squared_distances(updates: Array) -> np.ndarray:
    xp = array_namespace(updates)
    num_clients = int(updates.shape[0])
    shape = (num_clients, num_clients)
    products = xp.zeros(shape, dtype=xp.float64, device=device(updates))
    for block in _blocks_at_hand(updates):
        wide = xp.astype(updates[:, block], xp.float64)
        products = products + xp.matmul(wide, xp.permute_dims(wide, (1, 0)))
    gram = to_numpy(products)
    gram = (gram + gram.T) / 2
    squares = np.diag(gram)
    distances: np.ndarray = np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0.0)
    return distances


def _checked_namespace(updates: Array, weights: Array):  # type: ignore[no-untyped-def]  # a module
    xp = array_namespace(updates)
    if updates.ndim != 2 or 0 in updates.shape:
        raise ValueError(
            f"updates have shape {tuple(updates.shape)}; stack at least one to (num_clients, dim) "
            "with dim > 0"
        )
    if not xp.isdtype(updates.dtype, "real floating"):
        raise TypeError(f"updates are {updates.dtype}; convert them to float32 or float64")
    if tuple(weights.shape) != (updates.shape[0],):
        raise ValueError(
            f"weights have shape {tuple(weights.shape)}; pass one weight for each of the "
            f"{updates.shape[0]} updates"
        )
    return xp


def _blocks_at_hand(updates: Array) -> Iterator[slice]:
    num_clients, dim = (int(length) for length in updates.shape)
    return column_blocks(dim, max(1, ENTRIES_AT_ONCE // num_clients))
