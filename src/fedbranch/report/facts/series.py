"""Metrics over the rounds: of every cluster, of every client, folded to what a page can carry."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from fedbranch.report.facts.growth import Growth, Saved, grow
from fedbranch.runs import Evaluation, Round
from fedbranch.types import JSON

__all__ = [
    "Metric",
    "Trace",
    "latest",
    "mean_over",
    "measured_in",
    "metrics_of",
    "node_series",
    "number",
    "numbers",
    "overall_series",
    "plain_series",
    "quantile",
    "thinned",
    "trace",
]

MOST_METRICS = 8
MOST_POINTS = 400  # rounds on one curve
LEAST_POINTS = 20
MOST_LINES = 200  # clusters with a curve
MOST_CLIENT_NUMBERS = 60_000
MOST_NODE_NUMBERS = 45_000
MOST_PLAIN_NUMBERS = 20_000
IS_LOWER_BETTER = ("loss", "perplexity", "error", "mse", "mae", "nll")


@dataclass(frozen=True)
class Metric:
    """A measure that clients report, and how to look at it."""

    name: str
    is_higher_better: bool
    is_log: bool = False

    def to_json(self) -> JSON:
        """Give it as the page wants it."""
        return {
            "name": self.name,
            "is_better": "higher" if self.is_higher_better else "lower",
            "is_log": self.is_log,
        }


@dataclass(frozen=True, eq=False)
class Trace:
    """What was measured in some rounds, and where everybody stood.

    Attributes
    ----------
    rounds
        Numbers of the rounds, ascending.
    client_ids
        One column each.
    positions
        Shape (rounds, clients): the node at which a client stood; -1 if it was not there.
    leaf_ids
        For each round, the clusters in training.
    values
        Metric -> shape (rounds, clients); NaN where nothing is known.
    """

    rounds: list[int]
    client_ids: list[str]
    positions: NDArray[np.int64]
    leaf_ids: list[frozenset[int]]
    values: dict[str, NDArray[np.float64]]


def number(value: float | None) -> float | None:
    """Round to four digits, which is more than can be seen; None if it is not finite.

    Examples
    --------
    >>> number(0.123456), number(math.nan), number(12)
    (0.1235, None, 12)
    """
    if value is None or not math.isfinite(value):
        return None
    if isinstance(value, int):
        return value
    rounded = float(f"{value:.4g}")
    return rounded if math.isfinite(rounded) else value  # the largest floats round to infinity


def numbers(values: Iterable[float | None]) -> list[float | None]:
    """Round many."""
    return [number(value) for value in values]


def measured_in(entry: Round, *, in_training: bool) -> Evaluation:
    """Give what the clients reported in a round: on held-out data, or in training."""
    return entry.record.metrics if in_training else entry.evaluation


def metrics_of(history: Sequence[Round], *, in_training: bool) -> list[Metric]:
    """Find the measures, the main one first: the first that is not a loss, or else the first."""
    ranges: dict[str, tuple[float, float]] = {}
    for entry in history:
        for reported in measured_in(entry, in_training=in_training).values():
            for name, value in reported.items():
                low, high = ranges.get(name, (math.inf, -math.inf))
                if _is_finite(value):
                    low, high = min(low, value), max(high, value)
                ranges[name] = low, high
    names = [name for name, (low, high) in ranges.items() if low <= high]
    main = next((name for name in names if "loss" not in name.lower()), None)
    names.sort(key=lambda name: name != main)
    return [_metric(name, *ranges[name]) for name in names[:MOST_METRICS]]


def _metric(name: str, low: float, high: float) -> Metric:
    is_lower_better = any(word in name.lower() for word in IS_LOWER_BETTER)
    return Metric(
        name=name,
        is_higher_better=not is_lower_better,
        is_log=is_lower_better and low > 0 and high / low > 20,
    )


def latest(
    history: Sequence[Round], metrics: Sequence[Metric], *, in_training: bool
) -> dict[str, dict[str, float]]:
    """Give every client's last known value of every metric: metric -> client id -> value."""
    last: dict[str, dict[str, float]] = {metric.name: {} for metric in metrics}
    for entry in history:
        for client_id, reported in measured_in(entry, in_training=in_training).items():
            for name, by_client in last.items():
                value = reported.get(name)
                if _is_finite(value):
                    by_client[client_id] = value
    return last


def trace(
    history: Sequence[Round],
    saved: Saved | None,
    growth: Growth,
    client_ids: Sequence[str],
    metrics: Sequence[Metric],
    *,
    in_training: bool,
) -> Trace:
    """Follow a run, and keep what was measured in as many rounds as can be shown.

    ``growth`` is, afterwards, the tree at the end.
    """
    rounds = _shown_rounds(history, len(metrics), in_training=in_training)
    row_of = {number: row for row, number in enumerate(rounds)}
    column_of = {client_id: column for column, client_id in enumerate(client_ids)}
    shape = len(rounds), len(client_ids)
    positions = np.full(shape, -1, dtype=np.int64)
    values = {metric.name: np.full(shape, np.nan) for metric in metrics}
    leaf_ids = []
    for entry, tree in grow(history, saved, growth):
        row = row_of.get(entry.record.round)
        if row is None:
            continue
        for client_id, node_id in tree.positions.items():
            if client_id in column_of:
                positions[row, column_of[client_id]] = node_id
        for client_id, reported in measured_in(entry, in_training=in_training).items():
            if client_id not in column_of:
                continue
            for name, of_metric in values.items():
                value = reported.get(name)
                if _is_finite(value):
                    of_metric[row, column_of[client_id]] = value
        leaf_ids.append(frozenset(entry.record.cluster_sizes))
    return Trace(rounds, list(client_ids), positions, leaf_ids, values)


def _shown_rounds(history: Sequence[Round], num_metrics: int, *, in_training: bool) -> list[int]:
    if not num_metrics:  # clients may have reported nothing but NaN
        return []
    measured = [e.record.round for e in history if measured_in(e, in_training=in_training)]
    splits = [entry.record.round for entry in history if entry.record.splits]
    num_lines = max((len(entry.record.cluster_sizes) for entry in history), default=1)
    per_round = 3 * num_metrics * max(1, min(num_lines, MOST_LINES))
    # A split that was not measured at once shows when it was.
    shown = [next((r for r in measured if r >= split), None) for split in splits]
    most = min(MOST_POINTS, max(LEAST_POINTS, MOST_NODE_NUMBERS // per_round))
    return thinned(measured, {r for r in shown if r is not None}, most)


def thinned(rounds: Sequence[int], kept: Collection[int], most: int) -> list[int]:
    """Leave rounds out, evenly, until there are no more than so many.

    Parameters
    ----------
    rounds
        Ascending.
    kept
        Rounds that stay, like the first and the last; if they are too many, evenly chosen ones.
    most
        At least 2.

    Examples
    --------
    >>> thinned(range(1, 101), {50}, 5)
    [1, 26, 50, 75, 100]
    """
    if len(rounds) <= most:
        return list(rounds)
    chosen = {rounds[0], rounds[-1]}
    chosen |= set(_evenly(sorted(set(rounds) & set(kept) - chosen), most - 2))
    chosen |= set(_evenly(sorted(set(rounds) - chosen), most - len(chosen)))
    return sorted(chosen)


def _evenly(rounds: Sequence[int], most: int) -> list[int]:
    """Choose so many, at equal distances from each other and from both ends."""
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[(2 * i + 1) * len(rounds) // (2 * most)] for i in range(most)]


def node_series(traced: Trace, metric: str, node_ids: Iterable[int]) -> JSON:
    """Give a metric's mean and spread over the clients of each cluster, while it trained."""
    values = traced.values[metric]
    series: JSON = {}
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
                told: tuple[float | None, ...] = (None, None, None)
            else:
                told = float(known.mean()), quantile(known, 0.1), quantile(known, 0.9)
            for line, value in zip(lines.values(), told, strict=True):
                line.append(number(value))
        series[str(node_id)] = {"first": first, **lines}
    return series


def overall_series(traced: Trace) -> JSON:
    """Give the mean of every metric over all clients, in every round."""
    return {name: numbers(_known_means(values)) for name, values in traced.values.items()}


def plain_series(traced: Trace, clients_at: Mapping[int, Sequence[str]]) -> JSON | None:
    """Give the mean of every metric over the clients of each node, in a run without clusters.

    Parameters
    ----------
    traced
        The run without clusters.
    clients_at
        Node -> its clients.
    """
    num_lines = max(1, len(clients_at) * len(traced.values))
    rounds = thinned(traced.rounds, (), max(LEAST_POINTS, MOST_PLAIN_NUMBERS // num_lines))
    if not rounds:
        return None
    rows = np.searchsorted(traced.rounds, rounds)
    column_of = {client_id: column for column, client_id in enumerate(traced.client_ids)}
    columns = {
        node_id: np.array([column_of[i] for i in client_ids], dtype=np.intp)
        for node_id, client_ids in clients_at.items()
    }
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


def _known_means(values: NDArray[np.float64]) -> list[float]:
    """Average every row over what is known in it; NaN where nothing is."""
    is_known = ~np.isnan(values)
    sums, counts = np.where(is_known, values, 0.0).sum(1), is_known.sum(1)
    means: list[float] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan).tolist()
    return means


def quantile(ascending: NDArray[np.float64], share: float) -> float:
    """Give the value below which a share of the numbers lies, as NumPy's quantile does.

    Examples
    --------
    >>> quantile(np.array([0.0, 1.0, 3.0]), 0.75)
    2.0
    """
    place = share * (len(ascending) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ascending) - 1)
    return float(ascending[below] + (place - below) * (ascending[above] - ascending[below]))


def mean_over(values: Mapping[str, float], client_ids: Iterable[str]) -> float | None:
    """Average over clients, every client alike; None if no value of theirs is known."""
    known = [values[client_id] for client_id in client_ids if client_id in values]
    return math.fsum(v / len(known) for v in known) if known else None


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)
