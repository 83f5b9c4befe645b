"""The metrics that clients report: which there are, their last values, their means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from fedbranch.runs import Evaluation, Round
from fedbranch.types import JSON

__all__ = ["Metric", "is_finite", "latest", "mean_over", "measured_in", "metrics_of"]

MOST_METRICS = 8
IS_LOWER_BETTER = ("loss", "perplexity", "error", "mse", "mae", "nll")
LOG_SCALE_RATIO = 20  # of the largest to the smallest value, for a logarithmic axis


@dataclass(frozen=True)
class Metric:
    """A metric that clients report, and how a figure shows it."""

    name: str
    is_higher_better: bool
    is_log: bool = False

    def to_json(self) -> JSON:
        """Return the metric as the page reads it."""
        return {
            "name": self.name,
            "is_better": "higher" if self.is_higher_better else "lower",
            "is_log": self.is_log,
        }


def measured_in(entry: Round, *, in_training: bool) -> Evaluation:
    """Return what the clients reported in a round: in training, or on held-out data."""
    return entry.record.metrics if in_training else entry.evaluation


def metrics_of(history: Sequence[Round], *, in_training: bool) -> list[Metric]:
    """Find the metrics. The first one that is not a loss, or else the first, comes first."""
    ranges: dict[str, tuple[float, float]] = {}
    for entry in history:
        for reported in measured_in(entry, in_training=in_training).values():
            for name, value in reported.items():
                low, high = ranges.get(name, (math.inf, -math.inf))
                if is_finite(value):
                    low, high = min(low, value), max(high, value)
                ranges[name] = low, high
    names = [name for name, (low, high) in ranges.items() if low <= high]
    main = next((name for name in names if "loss" not in name.lower()), None)
    names.sort(key=lambda name: name != main)
    return [_metric(name, *ranges[name]) for name in names[:MOST_METRICS]]


def latest(
    history: Sequence[Round], metrics: Sequence[Metric], *, in_training: bool
) -> dict[str, dict[str, float]]:
    """Return every client's last known value of every metric: metric -> client id -> value."""
    last: dict[str, dict[str, float]] = {metric.name: {} for metric in metrics}
    for entry in history:
        for client_id, reported in measured_in(entry, in_training=in_training).items():
            for name, by_client in last.items():
                value = reported.get(name)
                if is_finite(value):
                    by_client[client_id] = value
    return last


def mean_over(values: Mapping[str, float], client_ids: Iterable[str]) -> float | None:
    """Average over clients, every client alike; return None if none of their values is known."""
    known = [values[client_id] for client_id in client_ids if client_id in values]
    return math.fsum(v / len(known) for v in known) if known else None


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _metric(name: str, low: float, high: float) -> Metric:
    is_lower_better = any(word in name.lower() for word in IS_LOWER_BETTER)
    return Metric(
        name=name,
        is_higher_better=not is_lower_better,
        is_log=is_lower_better and low > 0 and high / low > LOG_SCALE_RATIO,
    )
