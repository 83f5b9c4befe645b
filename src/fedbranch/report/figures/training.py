"""Draw the metric of every cluster over the rounds, and below it norms and separation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedbranch.report.figures.style import (
    BLACK,
    GREY,
    Looks,
    floats,
    mark_splits,
    one_axes,
    readable,
    title_of,
)
from fedbranch.types import JSON

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.gridspec import SubplotSpec

__all__ = ["draw_training", "draw_training_and_gap"]

MOST_NAMED_LINES = 12  # curves in a legend


def draw_training(room: SubplotSpec, run: JSON) -> None:
    """Draw the main metric of every cluster."""
    axes = one_axes(room)
    _fill_training(axes, run)
    axes.set_xlabel("round")


def draw_training_and_gap(room: SubplotSpec, run: JSON) -> None:
    """Draw training, the two norms and the separation below each other, aligned in time."""
    has_training = bool(run["series"]["rounds"])
    has_gap = any(
        value is not None for line in run["norms"].values() for value in line["gap"] + line["cross"]
    )
    heights = [2.2] * has_training + [1.5] + [1.2] * has_gap
    rows = iter(
        room.subgridspec(len(heights), 1, height_ratios=heights).subplots(
            sharex=True, squeeze=False
        )[:, 0]
    )
    axes = next(rows)
    if has_training:
        _fill_training(axes, run)
        axes = next(rows)
    _fill_norms(axes, run)
    if has_gap:
        axes = next(rows)
        _fill_gap(axes, run)
    axes.set_xlabel("round")


def _fill_training(axes: Axes, run: JSON) -> None:
    """Draw the main metric of every cluster, with the band of its clients."""
    looks = Looks(run)
    metric, series = run["metrics"][0], run["series"]
    lines = series["nodes"][metric["name"]]
    for name, line in lines.items():
        node_id = int(name)
        is_named = node_id in looks.leaf_ids and len(looks.leaf_ids) <= MOST_NAMED_LINES
        rounds = series["rounds"][line["first"] :][: len(line["mean"])]
        colour = looks.colour(node_id)
        axes.fill_between(
            rounds, floats(line["low"]), floats(line["high"]), color=colour, alpha=0.15, lw=0
        )
        count = next((n["num_clients"] for n in run["nodes"] if n["id"] == node_id), 0)
        label = f"cluster {node_id} ({count} client{'s' * (count != 1)})" if is_named else None
        if node_id == 0 and run["nodes"][0]["children"]:
            label = "before the first split"
        axes.plot(
            rounds,
            floats(line["mean"]),
            color=colour,
            linestyle=looks.dashes(node_id),
            label=label,
            marker="o" if len(rounds) == 1 else None,
            markersize=2.5,
        )
    plain = series["plain"]
    if plain is not None:
        values = floats(plain["nodes"][metric["name"]]["0"])
        axes.plot(plain["rounds"], values, color=BLACK, linestyle=":", label="plain FL")
    mark_splits(axes, run, are_named=True)
    if metric["is_log"]:
        axes.set_yscale("log")
    axes.set_ylabel(readable(metric["name"]))
    axes.set_title(f"{title_of(metric['name'])} of each cluster; band: 80% of its clients")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.margins(x=0.01)


def _fill_norms(axes: Axes, run: JSON) -> None:
    """Draw the lengths of the mean update and of the longest one."""
    looks = Looks(run)
    has_legend = False
    for name, line in run["norms"].items():
        colour = looks.colour(int(name))
        for key, linestyle, width in (("max", (0, (1, 1)), 0.9), ("mean", "-", 1.2)):
            values = [v if v is not None and v > 0 else math.nan for v in floats(line[key])]
            label = {"mean": "mean update", "max": "longest update"}[key]
            axes.plot(line["rounds"], values, color=colour, linestyle=linestyle, linewidth=width)
            if not has_legend:
                axes.plot([], [], color=GREY, linestyle=linestyle, linewidth=width, label=label)
        has_legend = True
    mark_splits(axes, run, are_named=False)
    axes.set_yscale("log")
    axes.set_ylabel("length")
    axes.set_title("Length of the mean update, and of the longest")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def _fill_gap(axes: Axes, run: JSON) -> None:
    """Draw the separation gap and the cross-similarity where they were measured."""
    looks = Looks(run)
    for key, marker, label in (("gap", "o", "separation gap"), ("cross", "x", "cross-similarity")):
        for name, line in run["norms"].items():
            points = [
                (r, v) for r, v in zip(line["rounds"], line[key], strict=True) if v is not None
            ]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    color=looks.colour(int(name)),
                    marker=marker,
                    markersize=3.5,
                    linewidth=0.8,
                    linestyle="-" if len(points) > 1 else "none",
                )
        axes.plot([], [], color=GREY, marker=marker, markersize=3.5, linestyle="none", label=label)
    axes.axhline(0, color=GREY, linewidth=0.6)
    mark_splits(axes, run, are_named=False)
    axes.set_ylabel("cosine")
    axes.set_title("How far groups are apart, when examined")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
