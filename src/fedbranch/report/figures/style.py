"""The look that all figures share: type, colours, dashes, readable names.

Colours are those of Okabe and Ito, which colour-blind people tell apart. Lines and labels show
the same without colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fedbranch.errors import FedbranchError
from fedbranch.types import JSON

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.gridspec import SubplotSpec

__all__ = [
    "BLACK",
    "COLOURS",
    "DASHES",
    "GREY",
    "Looks",
    "floats",
    "mark_splits",
    "one_axes",
    "our_style",
    "readable",
    "title_of",
]

# Okabe and Ito's, without yellow, which is lost on white paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY, BLACK = "#767676", "#000000"
DASHES = ("-", (0, (5, 1.5)), (0, (3, 1.2, 1, 1.2)), (0, (1, 1)))
LONGEST_NAME = 60  # characters of a metric or a curve

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "figure.constrained_layout.hspace": 0.06,
    "figure.dpi": 100,
    "savefig.dpi": 250,
    "svg.hashsalt": "fedbranch",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}


@contextmanager
def our_style() -> Iterator[None]:
    """Draw in the style of all figures inside a ``with`` block.

    Raises
    ------
    FedbranchError
        If matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise FedbranchError(
            "figures need matplotlib; install it with: pip install 'fedbranch[report]'"
        ) from error
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]  # it wants literal names
        yield


class Looks:
    """The colour and dashes of every cluster, the same in all parts of a figure.

    Parameters
    ----------
    run
        The facts of the run.
    """

    def __init__(self, run: JSON) -> None:
        self.leaf_ids = [node["id"] for node in run["nodes"] if not node["children"]]

    def colour(self, node_id: int) -> str:
        """Return the colour of a leaf; grey for other nodes."""
        if node_id not in self.leaf_ids:
            return GREY
        return COLOURS[self.leaf_ids.index(node_id) % len(COLOURS)]

    def dashes(self, node_id: int) -> Any:
        """Return the line style of a leaf; a full line for other nodes."""
        if node_id not in self.leaf_ids:
            return "-"
        return DASHES[self.leaf_ids.index(node_id) // len(COLOURS) % len(DASHES)]


def one_axes(room: SubplotSpec) -> Axes:
    """Make axes that fill a part of the figure."""
    axes: Axes = room.subgridspec(1, 1).subplots(squeeze=False)[0, 0]
    return axes


def floats(values: Sequence[float | None]) -> list[float]:
    """Replace None by NaN, which leaves a gap in a line."""
    return [math.nan if value is None else value for value in values]


def readable(text: str) -> str:
    r"""Escape and shorten a text that clients may have chosen, so that matplotlib draws it as is.

    Examples
    --------
    >>> print(readable("$x$"))
    \$x\$
    """
    shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    if len(shown) > LONGEST_NAME:
        shown = shown[: LONGEST_NAME - 1] + "…"
    return shown.replace("$", r"\$")  # two of them would begin a formula


def title_of(name: str) -> str:
    """Write the first letter as a capital and keep the others: AUC stays AUC."""
    return readable(name[:1].upper() + name[1:])


def mark_splits(axes: Axes, run: JSON, *, are_named: bool) -> None:
    """Draw a vertical line in every round with a split."""
    rounds = sorted({d["round"] for d in run["decisions"] if d["verdict"] == "split"})
    for number in rounds:
        axes.axvline(number, color=BLACK, linewidth=0.6, linestyle=(0, (1, 2)), zorder=0)
    if are_named and rounds:
        axes.annotate(
            "split" if len(rounds) == 1 else "splits",
            (rounds[0], 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -2),
            textcoords="offset points",
            fontsize=6.5,
            color=GREY,
            va="top",
        )
