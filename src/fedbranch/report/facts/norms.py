"""The lengths of updates and the separation of groups, in the rounds that measured them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedbranch.report.facts.folding import numbers, thinned
from fedbranch.report.facts.run import RunFacts
from fedbranch.report.facts.series import largest_nodes
from fedbranch.report.facts.trace import MOST_LINES, MOST_POINTS
from fedbranch.types import JSON

__all__ = ["norms"]

MOST_NORM_NUMBERS = 25_000
LINES = ("mean", "max", "gap", "cross")  # in this order in every point


def norms(run: RunFacts, matrices: Sequence[JSON]) -> JSON:
    """Return the two norms, the gap and the cross-similarity of every cluster.

    Parameters
    ----------
    run
        The run.
    matrices
        What :func:`fedbranch.report.facts.similarities.similarities` returned: the gap of a
        split is in there if the rule did not measure it.
    """
    points = _points(run, matrices)
    num_lines = max((len(entry.record.cluster_sizes) for entry in run.history), default=1)
    numbers_per_point = 1 + len(LINES)  # with the round
    most = MOST_NORM_NUMBERS // (numbers_per_point * min(max(1, num_lines), MOST_LINES))
    return {
        str(node_id): _lines(by_round, min(MOST_POINTS, most))
        for node_id, by_round in points.items()
        if by_round
    }


def _points(run: RunFacts, matrices: Sequence[JSON]) -> dict[int, dict[int, list[float | None]]]:
    """Return node -> round -> the numbers of a point."""
    at_splits = {(m["node"], m["round"]): m for m in matrices}
    points: dict[int, dict[int, list[float | None]]] = {i: {} for i in largest_nodes(run)}
    for entry in run.history:
        for decision in entry.record.decisions:
            if "mean_norm" not in decision.measurements or decision.node_id not in points:
                continue
            split = at_splits.get((decision.node_id, decision.round), {})
            measured = decision.measurements.get
            points[decision.node_id][decision.round] = [
                measured("mean_norm"),
                measured("max_norm"),
                measured("separation_gap", measured("gap", split.get("gap"))),
                measured("cross_similarity", split.get("cross")),
            ]
    return points


def _lines(by_round: Mapping[int, Sequence[float | None]], most: int) -> JSON:
    """Return the points of a node as lines. Rounds with a gap or a cross-similarity stay."""
    examined = {r for r, p in by_round.items() if p[2] is not None or p[3] is not None}
    rounds = thinned(sorted(by_round), examined, most)
    columns = zip(*(by_round[r] for r in rounds), strict=True)
    lines = dict(zip(LINES, columns, strict=True))
    return {"rounds": rounds, **{name: numbers(line) for name, line in lines.items()}}
