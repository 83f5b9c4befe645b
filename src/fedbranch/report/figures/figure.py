"""Put the parts of a figure below each other and write it to a file.

The same facts give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from fedbranch.errors import CannotWrite, FedbranchError
from fedbranch.report.figures.comparison import draw_comparison
from fedbranch.report.figures.similarity import draw_similarities, similarities_height
from fedbranch.report.figures.style import our_style
from fedbranch.report.figures.training import draw_training, draw_training_and_gap
from fedbranch.report.figures.tree import draw_tree, tree_height
from fedbranch.types import JSON

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

__all__ = ["FORMATS", "What", "draw", "save_figure"]

What = Literal["training", "tree", "similarity", "gap", "all"]
FORMATS = ("pdf", "png", "svg")
WIDTH = 6.9  # inches: both columns of a paper


def save_figure(facts: JSON, path: Path, what: What = "all") -> None:
    """Draw runs and write the figure to a file.

    Parameters
    ----------
    facts
        What :func:`fedbranch.report.facts.facts.read_facts` returned.
    path
        Ends with ``.pdf``, ``.png`` or ``.svg``.
    what
        A part, or all of them. Of several runs, the comparison of their training is drawn;
        the other parts are those of the first run.

    Raises
    ------
    ValueError
        If the file would have another format.
    FedbranchError
        If matplotlib is not installed, or the runs have nothing of that kind to draw.
    CannotWrite
        If the disk refuses the file.
    """
    form = path.suffix.removeprefix(".").lower()
    if form not in FORMATS:
        raise ValueError(
            f"{path.name} has no format that can be drawn; let it end with "
            f"{', '.join('.' + known for known in FORMATS)}"
        )
    # Without dates and versions, so that the same facts give the same bytes.
    no_date: dict[str, dict[str, str | None]] = {
        "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
        "svg": {"Date": None, "Creator": None},
        "png": {"Software": None},
    }
    with our_style():
        figure = draw(facts, what)
        try:
            figure.savefig(path, format=form, metadata=no_date[form])
        except OSError as error:
            raise CannotWrite(
                error.errno, f"{path} cannot be written: {error.strerror}", str(path)
            ) from error


def draw(facts: JSON, what: What = "all") -> Figure:
    """Draw a part of a report, or all parts below each other."""
    if what not in get_args(What):
        raise ValueError(f"what is {what!r}; it is one of {', '.join(get_args(What))}")
    with our_style():
        from matplotlib.figure import Figure

        run = facts["runs"][0]
        parts = _parts(facts, what)
        figure = Figure(figsize=(WIDTH, sum(height for height, _ in parts)), layout="constrained")
        rows = figure.add_gridspec(len(parts), 1, height_ratios=[height for height, _ in parts])
        for row, (_, fill) in enumerate(parts):
            fill(rows[row, 0], run)
        _settle(figure)
        return figure


def _parts(facts: JSON, what: What) -> list[tuple[float, Callable[[SubplotSpec, JSON], None]]]:
    """Return the parts to draw, each with its height in inches."""
    run = facts["runs"][0]
    has_training, has_norms = bool(run["series"]["rounds"]), bool(run["norms"])
    parts: list[tuple[float, Callable[[SubplotSpec, JSON], None]]] = []
    if what in ("training", "all") and has_training:
        if len(facts["runs"]) > 1 and facts["comparison"]:
            parts.append((2.3, lambda room, _: draw_comparison(room, facts["comparison"])))
        if what == "training" or not has_norms:
            parts.append((2.5, draw_training))
    if what in ("gap", "all") and has_norms:
        parts.append((4.9 if has_training else 2.6, draw_training_and_gap))
    if what in ("tree", "all"):
        parts.append((tree_height(run), draw_tree))
    if what in ("similarity", "all") and run["similarities"]:
        parts.append((similarities_height(run), draw_similarities))
    if not parts:
        raise FedbranchError(
            f"run {run['name']} has nothing to draw of {what!r}: "
            + {
                "training": "no metric was measured",
                "gap": "no norms were measured",
                "similarity": "no updates of a split were kept",
            }.get(what, "nothing was measured")
        )
    return parts


def _settle(figure: Figure) -> None:
    """Round the layout that was found: its last digits differ from run to run."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        left, bottom, width, height = axes.get_position(original=True).bounds
        axes.set_position((round(left, 5), round(bottom, 5), round(width, 5), round(height, 5)))
