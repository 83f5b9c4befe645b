"""Metrics of clients: names, the loss among them, means over all and over each cluster."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from flwr.app import MetricRecord, RecordDict
from flwr.app import MetricRecordValues as Metric

__all__ = [
    "CLUSTER_METRIC",
    "MetricsAggregation",
    "aggregate_by_leaf",
    "loss_in",
    "mean_over_leaves",
    "metrics_of",
    "weighted_mean_of_metrics",
]

# Maps the records of replies, without arrays, and the weight's key to one record.
MetricsAggregation: TypeAlias = Callable[[list[RecordDict], str], MetricRecord]

CLUSTER_METRIC = re.compile(r"leaf-\d+/")
# What client apps call the loss on held-out data; the first of these that is there.
USUAL_LOSSES = ("loss", "eval_loss", "eval-loss", "val_loss", "val-loss", "test_loss", "test-loss")


def metrics_of(records: Iterable[Mapping[str, Metric]], weighted_by_key: str) -> dict[str, Metric]:
    """Return all metrics in some records but the weight; of two with one name the last."""
    return {
        name: value
        for record in records
        for name, value in record.items()
        if name != weighted_by_key
    }


def loss_in(metrics: Mapping[str, float], loss_key: str | None) -> float | None:
    """Find the loss among a reply's metrics: under its key, or else by the usual names.

    Examples
    --------
    >>> loss_in({"accuracy": 0.9, "cross-entropy-loss": 0.3}, loss_key=None)
    0.3
    >>> loss_in({"loss": 0.3, "train_loss": 0.1}, loss_key=None)
    0.3
    >>> loss_in({"loss-a": 0.3, "loss-b": 0.1}, loss_key=None)  # one as good as the other: None
    """
    if loss_key is not None:
        return metrics.get(loss_key)
    for name in USUAL_LOSSES:
        if name in metrics:
            return metrics[name]
    losses = [value for name, value in metrics.items() if "loss" in name.lower()]
    return losses[0] if len(losses) == 1 else None


def weighted_mean_of_metrics(contents: list[RecordDict], weighted_by_key: str) -> MetricRecord:
    """Average every metric over the clients that have a finite value of it, by their weight.

    Lists are averaged entry by entry. Where lists differ in length, the metric is left out.
    """
    columns: dict[str, list[tuple[float, Metric]]] = {}
    for content in contents:
        records = list(content.metric_records.values())
        weight = next(r[weighted_by_key] for r in records if weighted_by_key in r)
        assert not isinstance(weight, list)
        for name, value in metrics_of(records, weighted_by_key).items():
            numbers = value if isinstance(value, list) else [value]
            if all(math.isfinite(number) for number in numbers):
                columns.setdefault(name, []).append((float(weight), value))
    means = MetricRecord()
    for name, column in columns.items():
        shapes = {len(value) if isinstance(value, list) else None for _, value in column}
        if len(shapes) == 1:
            total = math.fsum(weight for weight, _ in column)
            # Shares first: a product of what clients claim could leave the range of floats.
            shares = [weight / total for weight, _ in column]
            rows = [value if isinstance(value, list) else [value] for _, value in column]
            mean = [
                math.fsum(share * number for share, number in zip(shares, entries, strict=True))
                for entries in zip(*rows, strict=True)
            ]
            means[name] = mean[0] if shapes == {None} else mean
    return means


def aggregate_by_leaf(
    contents: Sequence[tuple[int | None, RecordDict]],
    aggregation: MetricsAggregation,
    weighted_by_key: str,
) -> MetricRecord | None:
    """Aggregate metrics over all clients and, beside that, over the clients of each leaf.

    Parameters
    ----------
    contents
        For every client its leaf, or None if it stands at an inner node, and its reply without
        arrays.
    aggregation
        Makes one record of several.
    weighted_by_key
        The metric that is the weight.

    Returns
    -------
    MetricRecord or None
        Metrics of all clients under their own names, those of leaf 3 as ``leaf-3/accuracy``.
        None without any client.
    """
    if not contents:
        return None
    at_leaves: dict[int, list[RecordDict]] = defaultdict(list)
    for leaf, content in contents:
        if leaf is not None:
            at_leaves[leaf].append(content)
    overall = aggregation([content for _, content in contents], weighted_by_key)
    return _merged(
        overall,
        {leaf: aggregation(own, weighted_by_key) for leaf, own in sorted(at_leaves.items())},
    )


def mean_over_leaves(
    at_leaves: Mapping[int, MetricRecord], num_clients: Mapping[int, int]
) -> MetricRecord | None:
    """Average the metrics of leaves, each weighted by its number of clients.

    Returns
    -------
    MetricRecord or None
        The means, and the metrics of each leaf beside them. None without any leaf.
    """
    if not at_leaves:
        return None
    contents = [
        RecordDict({"metrics": metrics, "weight": MetricRecord({"": max(1, num_clients[leaf])})})
        for leaf, metrics in at_leaves.items()
    ]
    return _merged(weighted_mean_of_metrics(contents, ""), at_leaves)


def _merged(overall: MetricRecord, at_leaves: Mapping[int, MetricRecord]) -> MetricRecord:
    """Put the metrics of every cluster beside those of all clients: ``leaf-3/accuracy``."""
    together = MetricRecord(dict(overall.items()))
    for leaf, metrics in at_leaves.items():
        for name, value in metrics.items():
            together[f"leaf-{leaf}/{name}"] = value
    return together
