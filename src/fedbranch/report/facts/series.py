"""Curves over the rounds: of every cluster, of every client, and of the run without clusters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedbranch.report.facts.folding import number, numbers, thinned
from fedbranch.report.facts.run import RunFacts
from fedbranch.report.facts.trace import LEAST_POINTS, MOST_LINES, Trace, trace
from fedbranch.types import JSON

__all__ = ["largest_nodes", "quantile", "series"]

MOST_CLIENT_NUMBERS = 60_000
MOST_PLAIN_NUMBERS = 20_000
BAND = (0.1, 0.9)  # quantiles of the clients of a cluster


def series(run: RunFacts) -> JSON:
    """Return all curves of a run: of all clients, of clusters, of single clients, of plain FL.

    The curves of single clients are None where they have more than 60,000 numbers.
    """
    traced = trace(run.history, run.all_client_ids, run.metrics, in_training=run.in_training)
    node_ids = largest_nodes(run)
    num_numbers = len(traced.rounds) * len(run.all_client_ids) * len(run.metrics)
    return {
        "rounds": traced.rounds,
        "num_clusters": [len(leaf_ids) for leaf_ids in traced.leaf_ids],
        "overall": {name: numbers(_known_means(values)) for name, values in traced.values.items()},
        "nodes": {
            metric.name: _node_series(traced, metric.name, node_ids) for metric in run.metrics
        },
        "clients": None
        if num_numbers > MOST_CLIENT_NUMBERS
        else {
            metric.name: [numbers(line) for line in traced.values[metric.name].T.tolist()]
            for metric in run.metrics
        },
        "plain": _plain_series(run, node_ids),
    }


def largest_nodes(run: RunFacts) -> list[int]:
    """Return the ids of the clusters that once had the most clients, ascending."""
    largest: dict[int, int] = {}
    for entry in run.history:
        for node_id, size in entry.record.cluster_sizes.items():
            largest[node_id] = max(size, largest.get(node_id, 0))
        for split in entry.record.splits:  # a node that was split in round 1 has no size
            largest.setdefault(split.node_id, sum(map(len, split.groups)))
    ranked = sorted(largest, key=lambda node_id: (-largest[node_id], node_id))
    return sorted(ranked[:MOST_LINES])


def quantile(ascending: NDArray[np.float64], share: float) -> float:
    """Return the value below which a share of the numbers lies, as NumPy's quantile does.

    Examples
    --------
    >>> quantile(np.array([0.0, 1.0, 3.0]), 0.75)
    2.0
    """
    place = share * (len(ascending) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ascending) - 1)
    return float(ascending[below] + (place - below) * (ascending[above] - ascending[below]))


def _node_series(traced: Trace, metric: str, node_ids: Iterable[int]) -> JSON:
    """Return a metric's mean and band over the clients of each cluster, while it trained."""
    values = traced.values[metric]
    curves: JSON = {}
    for node_id in node_ids:
        rows = [row for row, leaf_ids in enumerate(traced.leaf_ids) if node_id in leaf_ids]
        if not rows:
            continue
        first, last = rows[0], rows[-1]
        lines: dict[str, list[float | None]] = {"mean": [], "low": [], "high": []}
        for row in range(first, last + 1):
            at_node = values[row][traced.positions[row] == node_id]
            known = np.sort(at_node[~np.isnan(at_node)])
            if node_id not in traced.leaf_ids[row] or not len(known):
                point: tuple[float | None, ...] = (None, None, None)
            else:
                point = float(known.mean()), *(quantile(known, share) for share in BAND)
            for line, value in zip(lines.values(), point, strict=True):
                line.append(number(value))
        curves[str(node_id)] = {"first": first, **lines}
    return curves


def _plain_series(run: RunFacts, node_ids: Sequence[int]) -> JSON | None:
    """Return the mean of every metric over the clients of each node, in plain FL."""
    plain = run.baselines.get("fedavg")
    if plain is None:
        return None
    traced = trace(plain.history, run.all_client_ids, run.metrics, in_training=run.in_training)
    clients_at = {i: ids for i, ids in run.clients_at.items() if i in {0, *node_ids}}
    num_lines = max(1, len(clients_at) * len(traced.values))
    rounds = thinned(traced.rounds, (), max(LEAST_POINTS, MOST_PLAIN_NUMBERS // num_lines))
    if not rounds:
        return None
    rows = np.searchsorted(traced.rounds, rounds)
    columns = _columns(clients_at, run.index_of)
    return {
        "rounds": rounds,
        "nodes": {
            name: {
                str(node_id): numbers(_known_means(values[np.ix_(rows, of_node)]))
                for node_id, of_node in columns.items()
            }
            for name, values in traced.values.items()
        },
    }


def _columns(
    clients_at: Mapping[int, Sequence[str]], column_of: Mapping[str, int]
) -> dict[int, NDArray[np.intp]]:
    return {
        node_id: np.array([column_of[i] for i in client_ids], dtype=np.intp)
        for node_id, client_ids in clients_at.items()
    }


def _known_means(values: NDArray[np.float64]) -> list[float]:
    """Average the known values of every row; NaN where none is known."""
    is_known = ~np.isnan(values)
    sums, counts = np.where(is_known, values, 0.0).sum(1), is_known.sum(1)
    means: list[float] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan).tolist()
    return means
