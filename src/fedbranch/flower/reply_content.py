"""The content of a client's reply: weight, metrics and arrays, read and checked."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedbranch.errors import InvalidUpdate
from fedbranch.flower.asking import Asked
from fedbranch.flower.federation import Federation
from fedbranch.flower.half_updates import HALF_DIFFERENCE
from fedbranch.flower.metrics import CLUSTER_METRIC, metrics_of
from fedbranch.protocol.plain_text import one_line, shortened
from fedbranch.server.replies.checks import MOST_METRICS, SMALLEST_WEIGHT, check_metric_name
from fedbranch.types import Vector

__all__ = [
    "Answer",
    "OpenedReply",
    "Reported",
    "arrays_in",
    "open_reply",
    "read_reported",
    "reported_in",
    "why_unreadable",
]

Record: TypeAlias = ArrayRecord | MetricRecord | ConfigRecord

MOST_OTHER_BYTES = 2**20  # of all that is no array: names, metrics, configurations


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


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A reply that could be read: the message that it answers, and its numbers."""

    asked: Asked
    reported: Reported

    @property
    def leaf(self) -> int | None:
        """The leaf at which the client stood; None if it was at an inner node."""
        return self.asked.model.position if self.asked.model.is_at_leaf else None


@dataclass(frozen=True, kw_only=True)
class OpenedReply:
    """A reply to a message to train; its arrays are not yet compared with the model's.

    Attributes
    ----------
    answer
        The message that it answers, and its numbers.
    arrays
        The model that came back.
    half_difference
        Shape (num_params,); None if none was asked for or none came.
    """

    answer: Answer
    arrays: ArrayRecord
    half_difference: Vector | None


def open_reply(federation: Federation, one: Asked, reply: Message) -> OpenedReply:
    """Read all of a reply but the update.

    Raises
    ------
    InvalidUpdate
        If the client failed, or the reply lacks something or has too much.
    """
    key = federation.keys.arrays
    reported = read_reported(federation, reply)
    arrays = arrays_in(reply, key)
    half_difference = None
    if one.model.halves is not None:
        half = reply.content.array_records.get(HALF_DIFFERENCE.format(key))
        half_difference = None if half is None else federation.layout.params_in(half)
    return OpenedReply(
        answer=Answer(asked=one, reported=reported), arrays=arrays, half_difference=half_difference
    )


def read_reported(federation: Federation, reply: Message) -> Reported:
    """Read the numbers of a reply within the limits of a federation; see :func:`reported_in`."""
    return reported_in(
        reply,
        federation.keys.weight,
        federation.server.options.max_examples,
        federation.layout.most_reply_bytes,
    )


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
        The most bytes that all arrays of the reply together may take.

    Raises
    ------
    InvalidUpdate
        If the client failed, the reply is too large, or its weight or metrics make no sense.
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
    metrics = metrics_of(of_records, weighted_by_key)
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
    """Word the reason for a reply that cannot be used, from the error that reading it raised."""
    known = isinstance(error, InvalidUpdate)
    return one_line(str(error) if known else f"the reply cannot be read: {shortened(error)}")
