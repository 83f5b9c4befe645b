"""Runs laid over each other: methods, rules and settings as curves, seeds as bands."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedbranch.report.facts.clients import joined_and_left
from fedbranch.report.facts.folding import number, numbers, thinned
from fedbranch.report.facts.metrics import mean_over, measured_in
from fedbranch.report.facts.run import RunFacts
from fedbranch.report.facts.trace import MOST_POINTS
from fedbranch.types import JSON

__all__ = ["Contestant", "overlay"]

# Two runs with the same of these differ by chance only. A seed changes the data and the model.
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
    name
        The name of the run in the report; a baseline has that of its run.
    run
        Its facts.
    ari
        Adjusted Rand index between clusters and true groups; None if those are not known.
    """

    name: str
    run: RunFacts
    ari: float | None

    @property
    def setting(self) -> str:
        """Everything that is the same in runs that differ by their seed only."""
        about = self.run.about
        kept = {name: about.get(name) for name in SETTINGS}
        if isinstance(kept["privacy"], dict):  # every run has a secret of its own
            kept["privacy"] = {k: v for k, v in kept["privacy"].items() if k == "kind"}
        kept["num_clients"] = len(about["clients"])
        kept["experiment"] = {
            name: value
            for name, value in ((about.get("about") or {}).get("experiment") or {}).items()
            if name in ("data", "model")
        }
        return json.dumps(kept, sort_keys=True)

    @property
    def is_plain(self) -> bool:
        """Return whether the run is plain federated learning."""
        return self.run.method == "fedavg"

    def means(self, metric: str) -> dict[int, float]:
        """Return the mean over the clients in every round in which the metric was measured."""
        means = {}
        for entry in self.run.history:
            reported = measured_in(entry, in_training=self.run.in_training)
            values = {i: v for i, m in reported.items() if (v := m.get(metric)) is not None}
            mean = mean_over(values, values)
            if mean is not None and math.isfinite(mean):
                means[entry.record.round] = mean
        return means

    def last_of_present(self) -> dict[str, Mapping[str, float]]:
        """Return the last values of the clients that did not leave: metric -> client -> value.

        What a client reported before it left says nothing about the end of the run.
        """
        _, left = joined_and_left(self.run.history)
        return {
            name: {i: value for i, value in by_client.items() if i not in left}
            for name, by_client in self.run.last.items()
        }


def overlay(contestants: Sequence[Contestant]) -> JSON:
    """Compare runs and their baselines by the main metric of the first one that has any."""
    measured = [c for c in contestants if c.run.metrics]
    metric = measured[0].run.metrics[0].name if measured else "loss"
    groups = _by_setting(measured)
    curves = []
    for group, title in zip(groups, _titles(groups), strict=True):
        curve = _curve(group, metric, title)
        if curve is not None:
            curves.append(curve)
    return {"metric": metric, "curves": curves, "table": [_row(c) for c in contestants]}


def _by_setting(contestants: Sequence[Contestant]) -> list[list[Contestant]]:
    """Group the runs that differ by their seed only."""
    by_setting: dict[str, list[Contestant]] = {}
    seen = set()
    for contestant in contestants:
        # Runs that differ by their rule may have the very same baseline beside them.
        about = contestant.run.about
        identity = contestant.setting, about.get("seed"), about.get("initial_model")
        if contestant.run.method == "cfl" or identity not in seen:
            seen.add(identity)
            by_setting.setdefault(contestant.setting, []).append(contestant)
    return list(by_setting.values())


def _titles(groups: Sequence[Sequence[Contestant]]) -> list[str]:
    """Name curves by their method; if several have it, by the rule, then by the run."""
    titles = [group[0].run.title for group in groups]
    for is_about in ("rule", "run"):
        count = Counter(titles)
        for place, (title, group) in enumerate(zip(titles, groups, strict=True)):
            if count[title] > 1:
                first = group[0]
                addition = first.run.rule if is_about == "rule" else first.name
                titles[place] = f"{first.run.title}, {addition}"
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
        "is_reference": group[0].is_plain,
    }


def _row(contestant: Contestant) -> JSON:
    last, worst = {}, {}
    of_present = contestant.last_of_present()
    for metric in contestant.run.metrics:
        values = of_present[metric.name]
        last[metric.name] = number(mean_over(values, values))
        worst_of = min if metric.is_higher_better else max
        worst[metric.name] = number(worst_of(values.values())) if values else None
    return {
        "run": contestant.name,
        "title": contestant.run.title,
        "seed": contestant.run.about.get("seed"),
        "last": last,
        "worst": worst,
        "clusters": contestant.run.num_clusters,
        "ari": contestant.ari,
        "rounds": len(contestant.run.history),
    }
