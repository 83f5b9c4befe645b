"""Figures for papers: training, tree, similarities and the separation, drawn from facts.

Colours are those of Okabe and Ito, which colour-blind people tell apart; lines and labels say
the same without them. The same facts give the same bytes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from fedbranch.errors import CannotWrite, FedbranchError
from fedbranch.types import JSON

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

__all__ = ["FORMATS", "What", "draw", "save_figure"]

What = Literal["training", "tree", "similarity", "gap", "all"]
FORMATS = ("pdf", "png", "svg")

# Okabe and Ito's, without yellow, which is lost on white paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY, BLACK = "#767676", "#000000"
DASHES = ("-", (0, (5, 1.5)), (0, (3, 1.2, 1, 1.2)), (0, (1, 1)))
WIDTH = 6.9  # inches: both columns of a paper
MOST_NAMED_LINES = 12  # curves in a legend
MOST_MATRICES = 6
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


def save_figure(facts: JSON, path: Path, what: What = "all") -> None:
    """Draw runs and write the figure to a file.

    Parameters
    ----------
    facts
        What :func:`fedbranch.report.facts.facts.read_facts` gave.
    path
        Ends with ``.pdf``, ``.png`` or ``.svg``. Of several runs, the comparison of their
        training is drawn, and the rest of the first one.
    what
        A part, or all of them.

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
    # A date in the file would be another one every time.
    no_date: dict[str, dict[str, str | None]] = {
        "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
        "svg": {"Date": None, "Creator": None},
        "png": {"Software": None},
    }
    with _our_style():
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
    with _our_style():
        from matplotlib.figure import Figure

        run = facts["runs"][0]
        parts = _parts(facts, what)
        figure = Figure(figsize=(WIDTH, sum(height for height, _ in parts)), layout="constrained")
        rows = figure.add_gridspec(len(parts), 1, height_ratios=[height for height, _ in parts])
        for row, (_, fill) in enumerate(parts):
            fill(rows[row, 0], run)
        _settle(figure)
        return figure


def _settle(figure: Figure) -> None:
    """Keep the layout that was found, rounded: its last digits are different every time."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        left, bottom, width, height = axes.get_position(original=True).bounds
        axes.set_position((round(left, 5), round(bottom, 5), round(width, 5), round(height, 5)))


def _parts(facts: JSON, what: What) -> list[tuple[float, Callable[[SubplotSpec, JSON], None]]]:
    """Give what is to be drawn, each part with its height in inches."""
    run = facts["runs"][0]
    has_training, has_norms = bool(run["series"]["rounds"]), bool(run["norms"])
    num_matrices = min(MOST_MATRICES, len(run["similarities"]))
    parts: list[tuple[float, Callable[[SubplotSpec, JSON], None]]] = []
    if what in ("training", "all") and has_training:
        if len(facts["runs"]) > 1 and facts["comparison"]:
            parts.append((2.3, lambda room, _: _draw_comparison(room, facts["comparison"])))
        if what == "training" or not has_norms:
            parts.append((2.5, _draw_training))
    if (what == "all" and has_norms) or (what == "gap" and has_norms):
        parts.append((4.9 if has_training else 2.6, _draw_training_and_gap))
    if what in ("tree", "all"):
        num_levels = 1 + max(_depths(run).values())
        parts.append((0.45 + 0.62 * num_levels, _draw_tree))
    if what in ("similarity", "all") and num_matrices:
        parts.append((2.5 * math.ceil(num_matrices / 3), _draw_similarities))
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


@contextmanager
def _our_style() -> Iterator[None]:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise FedbranchError(
            "figures need matplotlib; install it with: pip install 'fedbranch[report]'"
        ) from error
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]  # it wants literal names
        yield


class _Looks:
    """The colour and dashes of every cluster, the same in all parts of a figure."""

    def __init__(self, run: JSON) -> None:
        self.leaf_ids = [node["id"] for node in run["nodes"] if not node["children"]]

    def colour(self, node_id: int) -> str:
        if node_id not in self.leaf_ids:
            return GREY
        return COLOURS[self.leaf_ids.index(node_id) % len(COLOURS)]

    def dashes(self, node_id: int) -> Any:
        if node_id not in self.leaf_ids:
            return "-"
        return DASHES[self.leaf_ids.index(node_id) // len(COLOURS) % len(DASHES)]


def _one(room: SubplotSpec) -> Axes:
    axes: Axes = room.subgridspec(1, 1).subplots(squeeze=False)[0, 0]
    return axes


def _floats(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _readable(text: str) -> str:
    r"""Give a text that clients may have chosen so that matplotlib draws it as it is.

    Examples
    --------
    >>> print(_readable("$x$"))
    \$x\$
    """
    shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    if len(shown) > LONGEST_NAME:
        shown = shown[: LONGEST_NAME - 1] + "…"
    return shown.replace("$", r"\$")  # two of them would begin a formula


def _as_title(name: str) -> str:
    """Begin with a capital and leave the others: AUC stays AUC."""
    return _readable(name[:1].upper() + name[1:])


def _mark_splits(axes: Axes, run: JSON, *, are_named: bool) -> None:
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


def _draw_training(room: SubplotSpec, run: JSON) -> None:
    axes = _one(room)
    _fill_training(axes, run)
    axes.set_xlabel("round")


def _fill_training(axes: Axes, run: JSON) -> None:
    """Draw the main metric of every cluster, with the band of its clients."""
    looks = _Looks(run)
    metric, series = run["metrics"][0], run["series"]
    lines = series["nodes"][metric["name"]]
    for name, line in lines.items():
        node_id = int(name)
        is_named = node_id in looks.leaf_ids and len(looks.leaf_ids) <= MOST_NAMED_LINES
        rounds = series["rounds"][line["first"] :][: len(line["mean"])]
        colour = looks.colour(node_id)
        axes.fill_between(
            rounds, _floats(line["low"]), _floats(line["high"]), color=colour, alpha=0.15, lw=0
        )
        count = next((n["num_clients"] for n in run["nodes"] if n["id"] == node_id), 0)
        label = f"cluster {node_id} ({count} client{'s' * (count != 1)})" if is_named else None
        if node_id == 0 and run["nodes"][0]["children"]:
            label = "before the first split"
        axes.plot(
            rounds,
            _floats(line["mean"]),
            color=colour,
            linestyle=looks.dashes(node_id),
            label=label,
            marker="o" if len(rounds) == 1 else None,
            markersize=2.5,
        )
    plain = series["plain"]
    if plain is not None:
        values = _floats(plain["nodes"][metric["name"]]["0"])
        axes.plot(plain["rounds"], values, color=BLACK, linestyle=":", label="plain FL")
    _mark_splits(axes, run, are_named=True)
    if metric["is_log"]:
        axes.set_yscale("log")
    axes.set_ylabel(_readable(metric["name"]))
    axes.set_title(f"{_as_title(metric['name'])} of each cluster; band: 80% of its clients")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.margins(x=0.01)


def _draw_training_and_gap(room: SubplotSpec, run: JSON) -> None:
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


def _fill_norms(axes: Axes, run: JSON) -> None:
    looks = _Looks(run)
    has_legend = False
    for name, line in run["norms"].items():
        colour = looks.colour(int(name))
        for key, linestyle, width in (("max", (0, (1, 1)), 0.9), ("mean", "-", 1.2)):
            values = [v if v is not None and v > 0 else math.nan for v in _floats(line[key])]
            label = {"mean": "mean update", "max": "longest update"}[key]
            axes.plot(line["rounds"], values, color=colour, linestyle=linestyle, linewidth=width)
            if not has_legend:
                axes.plot([], [], color=GREY, linestyle=linestyle, linewidth=width, label=label)
        has_legend = True
    _mark_splits(axes, run, are_named=False)
    axes.set_yscale("log")
    axes.set_ylabel("length")
    axes.set_title("Length of the mean update, and of the longest")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def _fill_gap(axes: Axes, run: JSON) -> None:
    looks = _Looks(run)
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
    _mark_splits(axes, run, are_named=False)
    axes.set_ylabel("cosine")
    axes.set_title("How far groups are apart, when examined")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def _draw_comparison(room: SubplotSpec, comparison: JSON) -> None:
    axes = _one(room)
    ours = [curve for curve in comparison["curves"] if not curve["is_reference"]]
    for curve in comparison["curves"]:
        place = ours.index(curve) if curve in ours else 0
        colour = BLACK if curve["is_reference"] else COLOURS[place % len(COLOURS)]
        dashes = ":" if curve["is_reference"] else DASHES[place // len(COLOURS) % len(DASHES)]
        if curve["low"] is not None:
            axes.fill_between(
                curve["rounds"],
                _floats(curve["low"]),
                _floats(curve["high"]),
                color=colour,
                alpha=0.15,
                lw=0,
            )
        seeds = f" ({curve['num_runs']} runs)" if curve["num_runs"] > 1 else ""
        axes.plot(
            curve["rounds"],
            _floats(curve["mean"]),
            color=colour,
            linestyle=dashes,
            label=_readable(curve["title"]) + seeds,
        )
    axes.set_xlabel("round")
    axes.set_ylabel(_readable(comparison["metric"]))
    has_bands = any(curve["low"] is not None for curve in comparison["curves"])
    band = "; band: all seeds" if has_bands else ""
    axes.set_title(f"{_as_title(comparison['metric'])}, mean over clients{band}")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.margins(x=0.01)


def _depths(run: JSON) -> dict[int, int]:
    depths: dict[int, int] = {}
    for node in run["nodes"]:  # parents come before their children
        depths[node["id"]] = 0 if node["parent"] is None else depths[node["parent"]] + 1
    return depths


def _draw_tree(room: SubplotSpec, run: JSON) -> None:
    """Draw nodes as discs whose areas are their numbers of clients, children below parents."""
    axes = _one(room)
    looks, depths = _Looks(run), _depths(run)
    nodes = {node["id"]: node for node in run["nodes"]}
    x_of: dict[int, float] = {}

    def place(node_id: int) -> float:
        children = [place(child_id) for child_id in nodes[node_id]["children"]]
        num_leaves = sum(1 for known in x_of if not nodes[known]["children"])
        x_of[node_id] = sum(children) / len(children) if children else float(num_leaves)
        return x_of[node_id]

    place(0)
    most = max(1, max(node["num_clients"] for node in run["nodes"]))
    metric = run["metrics"][0]["name"] if run["metrics"] else None
    num_leaves = len(looks.leaf_ids)
    for node_id, node in nodes.items():
        x, y = x_of[node_id], -depths[node_id]
        if node["parent"] is not None:
            axes.plot(
                [x_of[node["parent"]], x],
                [y + 1, y],
                color=GREY,
                linewidth=0.5 + 2.5 * node["num_clients"] / most,
                zorder=1,
                solid_capstyle="round",
            )
        axes.scatter(
            [x], [y], s=40 + 260 * node["num_clients"] / most, color=looks.colour(node_id), zorder=2
        )
        if num_leaves > 24 and node["children"] == [] and node_id != 0:
            continue
        axes.annotate(
            str(node_id), (x, y), ha="center", va="center", color="white", fontsize=6.5, zorder=3
        )
        told = [f"{node['num_clients']} client{'s' * (node['num_clients'] != 1)}"]
        if node["split_in_round"] is not None:
            told.append(f"split in round {node['split_in_round']}")
        elif metric is not None and node["last"].get(metric) is not None:
            told.append(f"{_readable(metric)} {node['last'][metric]:.3g}")
        is_leaf = not node["children"]
        axes.annotate(
            "\n".join(told) if is_leaf else ", ".join(told),
            (x, y),
            xytext=(0, -12) if is_leaf else (12, 4),
            textcoords="offset points",
            ha="center" if is_leaf else "left",
            va="top" if is_leaf else "bottom",
            fontsize=6.5 if num_leaves <= 8 else 5.5,
        )
    axes.set_xlim(-0.6, max(x_of.values()) + 0.6)
    axes.set_ylim(-max(depths.values()) - 0.75, 0.5)
    axes.set_title("Clusters")
    axes.axis("off")


def _draw_similarities(room: SubplotSpec, run: JSON) -> None:
    """Draw the matrices of the first splits, clients in the order of the dendrogram."""
    matrices = run["similarities"][:MOST_MATRICES]
    num_columns = 3
    num_rows = math.ceil(len(matrices) / num_columns)
    grid = room.subgridspec(num_rows, num_columns).subplots(squeeze=False)
    image = None
    for axes, matrix in zip(grid.flat, matrices, strict=False):
        size, num_clients = matrix["size"], matrix["num_clients"]
        cells = np.frombuffer(base64.b64decode(matrix["matrix"]), dtype=np.int8)
        image = axes.imshow(
            cells.reshape(size, size) / 127,
            cmap="PuOr_r",
            vmin=-1,
            vmax=1,
            extent=(0, num_clients, num_clients, 0),
            interpolation="nearest",
        )
        children = matrix["children"]
        for place in range(1, num_clients):
            if children[place] != children[place - 1]:
                axes.axhline(place, color=BLACK, linewidth=0.7)
                axes.axvline(place, color=BLACK, linewidth=0.7)
        middles = {
            child: (children.index(child) + children.count(child) / 2)
            for child in dict.fromkeys(children)
        }
        is_legible = len(middles) <= 12
        axes.set_yticks(list(middles.values()) if is_legible else [])
        axes.set_yticklabels([f"→ {child}" for child in middles] if is_legible else [])
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.set_title(f"Node {matrix['node']}, round {matrix['round']}")
        for side in axes.spines.values():
            side.set_visible(False)
    for axes in grid.flat[len(matrices) :]:
        axes.axis("off")
    shown = grid.flat[0] if len(matrices) < num_columns else grid[:, -1]
    figure = grid.flat[0].figure
    figure.colorbar(image, ax=shown, shrink=0.8, label="cosine similarity", ticks=[-1, 0, 1])
