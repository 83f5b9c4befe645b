"""Draw the curves of several runs over each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbranch.report.figures.style import (
    BLACK,
    COLOURS,
    DASHES,
    floats,
    one_axes,
    readable,
    title_of,
)
from fedbranch.types import JSON

if TYPE_CHECKING:
    from matplotlib.gridspec import SubplotSpec

__all__ = ["draw_comparison"]


def draw_comparison(room: SubplotSpec, comparison: JSON) -> None:
    """Draw one curve for each method or setting, with a band where there are several seeds."""
    axes = one_axes(room)
    ours = [curve for curve in comparison["curves"] if not curve["is_reference"]]
    for curve in comparison["curves"]:
        place = ours.index(curve) if curve in ours else 0
        colour = BLACK if curve["is_reference"] else COLOURS[place % len(COLOURS)]
        dashes = ":" if curve["is_reference"] else DASHES[place // len(COLOURS) % len(DASHES)]
        if curve["low"] is not None:
            axes.fill_between(
                curve["rounds"],
                floats(curve["low"]),
                floats(curve["high"]),
                color=colour,
                alpha=0.15,
                lw=0,
            )
        seeds = f" ({curve['num_runs']} runs)" if curve["num_runs"] > 1 else ""
        axes.plot(
            curve["rounds"],
            floats(curve["mean"]),
            color=colour,
            linestyle=dashes,
            label=readable(curve["title"]) + seeds,
        )
    axes.set_xlabel("round")
    axes.set_ylabel(readable(comparison["metric"]))
    has_bands = any(curve["low"] is not None for curve in comparison["curves"])
    band = "; band: all seeds" if has_bands else ""
    axes.set_title(f"{title_of(comparison['metric'])}, mean over clients{band}")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.margins(x=0.01)
