"""Runs laid over each other: methods, rules and settings as curves, seeds as bands."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedbranch.report.facts.series import (
    MOST_POINTS,
    Metric,
    mean_over,
    measured_in,
    number,
    numbers,
    thinned,
)
from fedbranch.runs import Round
from fedbranch.types import JSON

__all__ = ["Contestant", "overlay"]

# What makes two runs the same but for chance. Seeds change the clients' data and the model.
SETTINGS = (
    "method",
    "driver",
    "rule",
    "training",
    "participation",
    "weighting",
    "guard",
    "cache",
    "before_send",
    "privacy",
    "num_params",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Contestant:
    """A run, or a baseline of one, that is compared with others.

    Attributes
    ----------
    run
        What the run is called in the report.
    title
        What its method is called.
    rule
        By which it splits, as text.
    about
        Its settings.
    metrics, history, in_training
        What was measured, and on which data.
    last
        Metric -> client id -> value at the end.
    num_clusters
        At the end.
    ari
        Adjusted Rand index between clusters and true groups; None if those are not known.
    """

    run: str
    title: str
    rule: str
    about: JSON
    metrics: Sequence[Metric]
    history: Sequence[Round]
    in_training: bool
    last: Mapping[str, Mapping[str, float]]
    num_clusters: int
    ari: float | None

    @property
    def setting(self) -> str:
        """Everything that is the same in runs that differ by their seed only."""
        kept = {name: self.about.get(name) for name in SETTINGS}
        if isinstance(kept["privacy"], dict):  # every run has a secret of its own
            kept["privacy"] = {k: v for k, v in kept["privacy"].items() if k == "kind"}
        kept["num_clients"] = len(self.about["clients"])
        kept["experiment"] = {
            name: value
            for name, value in ((self.about.get("about") or {}).get("experiment") or {}).items()
            if name in ("data", "model")
        }
        return json.dumps(kept, sort_keys=True)

    def means(self, metric: str) -> dict[int, float]:
        """Give the mean over the clients in every round in which it was measured."""
        means = {}
        for entry in self.history:
            reported = measured_in(entry, in_training=self.in_training)
            values = {i: v for i, m in reported.items() if (v := m.get(metric)) is not None}
            mean = mean_over(values, values)
            if mean is not None and math.isfinite(mean):
                means[entry.record.round] = mean
        return means


def overlay(contestants: Sequence[Contestant]) -> JSON:
    """Compare runs and their baselines by the main metric of the first one that has any."""
    measured = [c for c in contestants if c.metrics]
    metric = measured[0].metrics[0].name if measured else "loss"
    by_setting: dict[str, list[Contestant]] = {}
    seen = set()
    for contestant in measured:
        # Runs that differ by their rule may have the very same baseline beside them.
        who = (
            contestant.setting,
            contestant.about.get("seed"),
            contestant.about.get("initial_model"),
        )
        if contestant.about["method"] == "cfl" or who not in seen:
            seen.add(who)
            by_setting.setdefault(contestant.setting, []).append(contestant)
    groups = list(by_setting.values())
    curves = []
    for group, title in zip(groups, _titles(groups), strict=True):
        curve = _curve(group, metric, title)
        if curve is not None:
            curves.append(curve)
    return {"metric": metric, "curves": curves, "table": [_row(c) for c in contestants]}


def _titles(groups: Sequence[Sequence[Contestant]]) -> list[str]:
    """Name curves by their method; where that is not enough, by the rule, or else by their runs."""
    titles = [group[0].title for group in groups]
    for is_about in ("rule", "run"):
        count = Counter(titles)
        for place, (title, group) in enumerate(zip(titles, groups, strict=True)):
            if count[title] > 1:
                first = group[0]
                titles[place] = f"{first.title}, {first.rule if is_about == 'rule' else first.run}"
    return titles


def _curve(group: Sequence[Contestant], metric: str, title: str) -> JSON | None:
    """Average runs that differ by their seed, over the rounds that all of them have."""
    means = [of_run for c in group if (of_run := c.means(metric))]
    if not means:
        return None
    shared = sorted(set(means[0]).intersection(*means[1:]))
    rounds = thinned(shared, (), MOST_POINTS)
    points = [[of_run[r] for of_run in means] for r in rounds]
    has_band = len(means) > 1
    return {
        "title": title,
        "num_runs": len(means),
        "rounds": rounds,
        "mean": numbers(math.fsum(values) / len(values) for values in points),
        "low": numbers(map(min, points)) if has_band else None,
        "high": numbers(map(max, points)) if has_band else None,
        "is_reference": group[0].about["method"] == "fedavg",
    }


def _row(contestant: Contestant) -> JSON:
    last, worst = {}, {}
    for metric in contestant.metrics:
        values = contestant.last[metric.name]
        last[metric.name] = number(mean_over(values, values))
        worst_of = min if metric.is_higher_better else max
        worst[metric.name] = number(worst_of(values.values())) if values else None
    return {
        "run": contestant.run,
        "title": contestant.title,
        "seed": contestant.about.get("seed"),
        "last": last,
        "worst": worst,
        "clusters": contestant.num_clusters,
        "ari": contestant.ari,
        "rounds": len(contestant.history),
    }
