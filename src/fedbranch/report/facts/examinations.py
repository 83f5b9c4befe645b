"""Every examination of a run in words: what was measured, what followed, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fedbranch.rules import Decision

__all__ = ["VERDICTS", "WORDS", "Episode", "episodes", "measured_in_words"]

VERDICTS = {
    "train": "trains on",
    "hold": "stands still",
    "split": "splits",
    "keep": "stays split",
    "merge": "is merged back",
}

# Measurement -> how it is worded.
WORDS: dict[str, Callable[[float], str]] = {
    "num_answered": lambda v: f"{v:g} clients answered",
    "num_halved": lambda v: f"{v:g} of them with half updates",
    "num_members": lambda v: f"{v:g} clients are in the cluster",
    "mean_norm": lambda v: f"the mean update is {v:.3g} long",
    "max_norm": lambda v: f"the longest update {v:.3g}",
    "noise": lambda v: f"noise is {v:.2f} times a client's signal (the paper's γ)",
    "length_left": lambda v: f"updates are {v:.0%} as long as at first",
    "num_groups": lambda v: f"the best cut has {v:g} groups",
    "gap": lambda v: f"similarities within and between them are {v:.2f} apart",
    "scatter": lambda v: f"clients of a group differ by {max(v, 0):.0%} of what groups differ by",
    "loosest_scatter": lambda v: f"in the loosest group by {max(v, 0):.0%}",
    "p_structure": lambda v: f"the other half of the data shows the same groups with p = {v:.1g}",
    "p_structure_needed": lambda v: f"needed: {v:.1g}",
    "num_misplaced": lambda v: f"{v:g} client(s) nearer to another group there",
    "in_common": lambda v: f"the updates have {v:.0%} in common",
    "norm_left": lambda v: f"over the last third of the rounds they shrank to {v:.0%}",
    "loss_left": lambda v: f"and the training loss fell to {v:.0%}",
    "mean_gain": lambda v: f"apart, a client's loss is lower by {v:.3g}",
    "share_better": lambda v: f"{v:.0%} of the clients are better off",
    "worst_group_gain": lambda v: f"the group that gains least gains {v:.3g}",
    "num_overruled": lambda v: f"the claims of {v:g} clients to lose do not count",
    "p_pays": lambda v: f"p = {v:.1g} that it only seems to pay",
    "p_worse": lambda v: f"p = {v:.1g} that it only seems to be worse",
    "cross_similarity": lambda v: f"the best split has cross-similarity {v:.3f}",
    "separation_gap": lambda v: f"the groups' separation gap is {v:.2f} (the paper's g)",
    "tolerated_noise": lambda v: f"and would tolerate noise up to {v:.3f}",
    "smaller_side": lambda v: f"its smaller side has {v:g} clients",
    "similarity_error": lambda v: f"similarities of sketches are off by about {v:.2g}",
    "num_compared_in_full": lambda v: f"{v:g} pairs of updates were compared in full",
}


@dataclass(frozen=True)
class Episode:
    """Examinations of one cluster in a row that ended for the same reason."""

    decisions: tuple[Decision, ...]

    @property
    def last(self) -> Decision:
        """The last decision, which stands for all of them."""
        return self.decisions[-1]


def episodes(decisions: Iterable[Decision]) -> Iterator[Episode]:
    """Group the decisions on a cluster that differ in their numbers only."""
    runs: list[list[Decision]] = []
    open_runs: dict[int, list[Decision]] = {}
    for decision in decisions:
        run = open_runs.get(decision.node_id)
        if run is None or _kind(run[-1]) != _kind(decision):
            run = open_runs[decision.node_id] = []
            runs.append(run)
        run.append(decision)
    return (Episode(tuple(run)) for run in runs)


def measured_in_words(decision: Decision) -> list[str]:
    """Return every measurement of a decision as a phrase."""
    return [
        worded(value)
        for name, worded in WORDS.items()
        if (value := decision.measurements.get(name)) is not None
    ]


def _kind(decision: Decision) -> tuple[str, str]:
    """Return the verdict and the reason without its numbers."""
    return decision.verdict, re.sub(r"[\d.,%+e-]+", "#", decision.reason)
