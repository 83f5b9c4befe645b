"""What was measured in the rounds that a page shows, and where the clients stood then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedbranch.report.facts.folding import thinned
from fedbranch.report.facts.growth import Growth, grow
from fedbranch.report.facts.metrics import Metric, is_finite, measured_in
from fedbranch.runs import Round

__all__ = ["LEAST_POINTS", "MOST_LINES", "MOST_POINTS", "Trace", "trace"]

MOST_POINTS = 400  # rounds on one curve
LEAST_POINTS = 20
MOST_LINES = 200  # clusters with a curve
MOST_NODE_NUMBERS = 45_000
NUMBERS_PER_POINT = 3  # the mean and both ends of the band


@dataclass(frozen=True, eq=False)
class Trace:
    """What was measured in some rounds, and where every client stood.

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


def trace(
    history: Sequence[Round],
    client_ids: Sequence[str],
    metrics: Sequence[Metric],
    *,
    in_training: bool,
) -> Trace:
    """Follow a run, and keep what was measured in as many rounds as a page can show.

    Parameters
    ----------
    history
        All rounds.
    client_ids
        The clients to keep, one column each.
    metrics
        The metrics to keep.
    in_training
        Whether they are those that clients report in training.
    """
    rounds = _shown_rounds(history, len(metrics), in_training=in_training)
    row_of = {number: row for row, number in enumerate(rounds)}
    column_of = {client_id: column for column, client_id in enumerate(client_ids)}
    shape = len(rounds), len(client_ids)
    positions = np.full(shape, -1, dtype=np.int64)
    values = {metric.name: np.full(shape, np.nan) for metric in metrics}
    leaf_ids = []
    for entry, growth in grow(history, Growth()):
        row = row_of.get(entry.record.round)
        if row is None:
            continue
        for client_id, node_id in growth.positions.items():
            if client_id in column_of:
                positions[row, column_of[client_id]] = node_id
        for client_id, reported in measured_in(entry, in_training=in_training).items():
            if client_id not in column_of:
                continue
            for name, of_metric in values.items():
                value = reported.get(name)
                if is_finite(value):
                    of_metric[row, column_of[client_id]] = value
        leaf_ids.append(frozenset(entry.record.cluster_sizes))
    return Trace(rounds, list(client_ids), positions, leaf_ids, values)


def _shown_rounds(history: Sequence[Round], num_metrics: int, *, in_training: bool) -> list[int]:
    """Choose the rounds to show: the first, the last, those of splits, and others evenly."""
    if not num_metrics:  # clients may have reported nothing but NaN
        return []
    measured = [e.record.round for e in history if measured_in(e, in_training=in_training)]
    splits = [entry.record.round for entry in history if entry.record.splits]
    num_lines = max((len(entry.record.cluster_sizes) for entry in history), default=1)
    per_round = NUMBERS_PER_POINT * num_metrics * max(1, min(num_lines, MOST_LINES))
    # Where the round of a split was not measured, the next measured round shows the split.
    shown = [next((r for r in measured if r >= split), None) for split in splits]
    most = min(MOST_POINTS, max(LEAST_POINTS, MOST_NODE_NUMBERS // per_round))
    return thinned(measured, {r for r in shown if r is not None}, most)
