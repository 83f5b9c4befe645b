"""What a client's reply says, if it says it properly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.app import MetricRecordValues as Metric

from fedbranch.errors import InvalidUpdate

__all__ = ["Reported", "arrays_in", "merged", "reported_in", "weighted_mean_of_metrics"]

LONGEST_REASON = 300  # characters of a client's error that are worth keeping


@dataclass(frozen=True)
class Reported:
    """The numbers in a reply.

    Attributes
    ----------
    num_examples
        The client's weight.
    metrics
        All numbers but the weight.
    content
        The reply without its arrays, for a user's own aggregation.
    """

    num_examples: float
    metrics: Mapping[str, Metric]
    content: RecordDict

    @property
    def scalars(self) -> dict[str, float]:
        """The metrics that are single numbers."""
        return {n: float(v) for n, v in self.metrics.items() if not isinstance(v, list)}

    @property
    def finite_scalars(self) -> dict[str, float | None]:
        """The metrics that are single numbers; None for those that are not finite."""
        return {n: v if math.isfinite(v) else None for n, v in self.scalars.items()}


def reported_in(reply: Message, weighted_by_key: str, max_examples: float) -> Reported:
    """Read the numbers of a reply.

    Raises
    ------
    InvalidUpdate
        If the client failed, or does not say sensibly how much it weighs.
    """
    if reply.has_error():
        reason = " ".join((reply.error.reason or "no reason given").split())
        shown = reason if len(reason) <= LONGEST_REASON else reason[: LONGEST_REASON - 3] + "..."
        raise InvalidUpdate(f"the client failed (error {reply.error.code}): {shown}")
    if not reply.has_content():
        raise InvalidUpdate("the reply is empty")
    content = reply.content
    with_weight = [
        record for record in content.metric_records.values() if weighted_by_key in record
    ]
    if len(with_weight) != 1:
        raise InvalidUpdate(
            f"the reply has {len(with_weight)} metric records with {weighted_by_key!r}; send one"
        )
    weight = with_weight[0][weighted_by_key]
    if isinstance(weight, list) or not 0 < weight <= max_examples:
        raise InvalidUpdate(
            f"{weighted_by_key!r} is {str(weight)[:80]}; it must be a number above 0 and at most "
            f"{max_examples:g}"
        )
    metrics = {
        name: value
        for record in content.metric_records.values()
        for name, value in record.items()
        if name != weighted_by_key
    }
    without_arrays = RecordDict(
        {n: record for n, record in content.items() if not isinstance(record, ArrayRecord)}
    )
    return Reported(float(weight), metrics, without_arrays)


def arrays_in(reply: Message, arrayrecord_key: str) -> ArrayRecord:
    """Find the model in a reply: under the key that it was sent with, or the only one there."""
    records = reply.content.array_records
    if arrayrecord_key in records:
        return records[arrayrecord_key]
    if len(records) != 1:
        raise InvalidUpdate(
            f"the reply has {len(records)} array records, none under {arrayrecord_key!r}; "
            "send the model's arrays under the key they came with"
        )
    return next(iter(records.values()))


def weighted_mean_of_metrics(contents: list[RecordDict], weighted_by_key: str) -> MetricRecord:
    """Average every metric over the clients that have a finite value of it, by their weight.

    Lists are averaged entry by entry; where their lengths differ, the metric is left out.
    """
    columns: dict[str, list[tuple[float, list[float], bool]]] = {}
    for content in contents:
        records = list(content.metric_records.values())
        weight = next(float(r[weighted_by_key]) for r in records if weighted_by_key in r)  # type: ignore[arg-type]  # a list was refused before
        for name, value in ((n, v) for r in records for n, v in r.items() if n != weighted_by_key):
            numbers = [float(v) for v in value] if isinstance(value, list) else [float(value)]
            if all(map(math.isfinite, numbers)):
                columns.setdefault(name, []).append((weight, numbers, isinstance(value, list)))
    means = MetricRecord()
    for name, column in columns.items():
        weights = [weight for weight, _, _ in column]
        if len({(len(numbers), is_list) for _, numbers, is_list in column}) > 1:
            continue
        mean = [
            math.fsum(w * v for w, v in zip(weights, entries, strict=True)) / math.fsum(weights)
            for entries in zip(*(numbers for _, numbers, _ in column), strict=True)
        ]
        means[name] = mean if column[0][2] else mean[0]
    return means


def merged(overall: MetricRecord, at_leaves: Mapping[int, MetricRecord]) -> MetricRecord:
    """Put the metrics of every cluster beside those of all clients: ``leaf-3/accuracy``."""
    together = MetricRecord(dict(overall.items()))
    for leaf, metrics in at_leaves.items():
        for name, value in metrics.items():
            together[f"leaf-{leaf}/{name}"] = value
    return together
