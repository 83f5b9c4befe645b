"""What a client's reply says, if it says it properly."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app import MetricRecordValues as Metric

from fedbranch.errors import InvalidUpdate
from fedbranch.protocol.plain_text import one_line, shortened
from fedbranch.server.replies.checks import MOST_METRICS, SMALLEST_WEIGHT, check_metric_name

__all__ = [
    "CLUSTER_METRIC",
    "Reported",
    "arrays_in",
    "loss_in",
    "merged",
    "reported_in",
    "weighted_mean_of_metrics",
    "why_unreadable",
]

Record: TypeAlias = ArrayRecord | MetricRecord | ConfigRecord

MOST_OTHER_BYTES = 2**20  # of all that is no array: names, metrics, configurations
CLUSTER_METRIC = re.compile(r"leaf-\d+/")
# What client apps call the loss on held-out data; the first of these that is there.
USUAL_LOSSES = ("loss", "eval_loss", "eval-loss", "val_loss", "val-loss", "test_loss", "test-loss")


@dataclass(frozen=True)
class Reported:
    """The numbers in a reply.

    Attributes
    ----------
    num_examples
        The client's weight.
    scalars
        The metrics that are single numbers, without the weight.
    records
        The reply without its arrays.
    """

    num_examples: float
    scalars: dict[str, float]
    records: Mapping[str, MetricRecord | ConfigRecord]

    @cached_property
    def content(self) -> RecordDict:
        """The reply without its arrays, for a user's own aggregation."""
        return RecordDict(dict(self.records))

    @property
    def finite_scalars(self) -> dict[str, float | None]:
        """The metrics that are single numbers; None for those that are not finite."""
        return {n: v if math.isfinite(v) else None for n, v in self.scalars.items()}


def reported_in(
    reply: Message, weighted_by_key: str, max_examples: float, most_array_bytes: int
) -> Reported:
    """Read the numbers of a reply.

    Parameters
    ----------
    reply
        What came.
    weighted_by_key
        The metric that is the weight.
    max_examples
        The largest weight.
    most_array_bytes
        How much all arrays of the reply together may take.

    Raises
    ------
    InvalidUpdate
        If the client failed, sends too much, or does not say sensibly how much it weighs.
    """
    if reply.has_error():
        reason = one_line(reply.error.reason or "no reason given")
        raise InvalidUpdate(f"the client failed (error {reply.error.code}): {reason}")
    if not reply.has_content():
        raise InvalidUpdate("the reply is empty")
    records = reply.content.items()
    _check_size(records, most_array_bytes)
    of_records = [record for _, record in records if isinstance(record, MetricRecord)]
    with_weight = [record for record in of_records if weighted_by_key in record]
    if len(with_weight) != 1:
        there = sorted(name for record in of_records for name in record)
        raise InvalidUpdate(
            f"the reply has {len(with_weight)} metric records with {weighted_by_key!r} (the "
            f"strategy's weighted_by_key); send one. Its metrics are {there[:10]}"
        )
    weight = with_weight[0][weighted_by_key]
    if isinstance(weight, list) or not SMALLEST_WEIGHT <= weight <= max_examples:
        raise InvalidUpdate(
            f"{weighted_by_key!r} is {shortened(weight)}; it must be a number from "
            f"{SMALLEST_WEIGHT:g} to {max_examples:g}"
        )
    metrics = _metrics_of(of_records, weighted_by_key)
    for name in metrics:
        check_metric_name(name)
        if CLUSTER_METRIC.match(name):
            raise InvalidUpdate(
                f"a metric is called {name!r}; call it something that does not look like a "
                "cluster's metric (leaf-3/...)"
            )
    try:
        scalars = {n: float(v) for n, v in metrics.items() if not isinstance(v, list)}
    except OverflowError:
        raise InvalidUpdate("a metric is too large for a float") from None
    return Reported(
        float(weight),
        scalars,
        {n: record for n, record in records if not isinstance(record, ArrayRecord)},
    )


def _check_size(records: Collection[tuple[str, Record]], most_array_bytes: int) -> None:
    """Refuse a reply that is too large, before anything in it is copied or converted."""
    array_bytes = num_metrics = other_bytes = 0
    for name, record in records:
        other_bytes += len(name)
        if isinstance(record, ArrayRecord):
            array_bytes += sum([len(array.data) for array in record.values()])
            other_bytes += sum(map(len, record.keys()))
            continue
        for key, value in record.items():
            other_bytes += len(key) + _num_bytes(value)
        if isinstance(record, MetricRecord):
            num_metrics += len(record)
    if array_bytes > most_array_bytes or other_bytes > MOST_OTHER_BYTES:
        what, num_bytes, limit = "arrays", array_bytes, most_array_bytes
        if array_bytes <= most_array_bytes:
            what, num_bytes = "names, metrics and configurations", other_bytes
            limit = MOST_OTHER_BYTES
        raise InvalidUpdate(f"the reply's {what} take {num_bytes:,} bytes; the limit is {limit:,}")
    if num_metrics > MOST_METRICS:
        raise InvalidUpdate(f"the reply has {num_metrics:,} metrics; the limit is {MOST_METRICS:,}")


def _num_bytes(value: object) -> int:
    if type(value) is float:  # nearly always
        return 8
    if isinstance(value, list):
        return sum(map(_num_bytes, value))
    if isinstance(value, str | bytes):
        return len(value)
    return max(8, value.bit_length() // 8) if isinstance(value, int) else 8


def metrics_in(content: RecordDict, weighted_by_key: str) -> dict[str, Metric]:
    """Give all metrics of a reply but the weight; of two with one name the last."""
    return _metrics_of(content.metric_records.values(), weighted_by_key)


def _metrics_of(records: Iterable[Mapping[str, Metric]], weighted_by_key: str) -> dict[str, Metric]:
    return {
        name: value
        for record in records
        for name, value in record.items()
        if name != weighted_by_key
    }


def loss_in(metrics: Mapping[str, float], loss_key: str | None) -> float | None:
    """Find the loss among a reply's metrics: under its key, or else the one that is called so.

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


def arrays_in(reply: Message, arrayrecord_key: str) -> ArrayRecord:
    """Find the model in a reply: under the key that it was sent with, or the only one there."""
    content = reply.content
    found = dict(content.items()).get(arrayrecord_key)  # Flower's own get() is slow
    if isinstance(found, ArrayRecord):
        return found
    records = content.array_records
    if len(records) != 1:
        raise InvalidUpdate(
            f"the reply has {len(records)} array records, none under {arrayrecord_key!r}; "
            "send the model's arrays under the key they came with"
        )
    return next(iter(records.values()))


def why_unreadable(error: Exception) -> str:
    """Say why a reply cannot be used, of which reading raised something."""
    known = isinstance(error, InvalidUpdate)
    return one_line(str(error) if known else f"the reply cannot be read: {shortened(error)}")


def weighted_mean_of_metrics(contents: list[RecordDict], weighted_by_key: str) -> MetricRecord:
    """Average every metric over the clients that have a finite value of it, by their weight.

    Lists are averaged entry by entry; where their lengths differ, the metric is left out.
    """
    columns: dict[str, list[tuple[float, Metric]]] = {}
    for content in contents:
        records = content.metric_records.values()
        weight = next(r[weighted_by_key] for r in records if weighted_by_key in r)
        assert not isinstance(weight, list)
        for name, value in metrics_in(content, weighted_by_key).items():
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


def merged(overall: MetricRecord, at_leaves: Mapping[int, MetricRecord]) -> MetricRecord:
    """Put the metrics of every cluster beside those of all clients: ``leaf-3/accuracy``."""
    together = MetricRecord(dict(overall.items()))
    for leaf, metrics in at_leaves.items():
        for name, value in metrics.items():
            together[f"leaf-{leaf}/{name}"] = value
    return together
