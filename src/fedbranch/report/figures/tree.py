"""Draw the tree of clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbranch.report.figures.style import GREY, Looks, one_axes, readable
from fedbranch.types import JSON

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.gridspec import SubplotSpec

__all__ = ["draw_tree", "tree_height"]

MOST_LABELLED_LEAVES = 24
MOST_LARGE_LABELS = 8  # leaves; more get smaller type


def tree_height(run: JSON) -> float:
    """Return the height of the tree, in inches."""
    return 0.45 + 0.62 * (1 + max(_depths(run).values()))


def draw_tree(room: SubplotSpec, run: JSON) -> None:
    """Draw nodes as discs whose areas are their numbers of clients, children below parents."""
    axes = one_axes(room)
    looks, depths = Looks(run), _depths(run)
    nodes = {node["id"]: node for node in run["nodes"]}
    x_of = _columns(nodes)
    most = max(1, max(node["num_clients"] for node in run["nodes"]))
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
        if len(looks.leaf_ids) <= MOST_LABELLED_LEAVES or node["children"] or node_id == 0:
            _label(axes, (x, y), run, node, len(looks.leaf_ids))
    axes.set_xlim(-0.6, max(x_of.values()) + 0.6)
    axes.set_ylim(-max(depths.values()) - 0.75, 0.5)
    axes.set_title("Clusters")
    axes.axis("off")


def _label(axes: Axes, place: tuple[float, float], run: JSON, node: JSON, num_leaves: int) -> None:
    """Write the id into a node, and its clients and split, or metric, beside it."""
    axes.annotate(
        str(node["id"]), place, ha="center", va="center", color="white", fontsize=6.5, zorder=3
    )
    metric = run["metrics"][0]["name"] if run["metrics"] else None
    lines = [f"{node['num_clients']} client{'s' * (node['num_clients'] != 1)}"]
    if node["split_in_round"] is not None:
        lines.append(f"split in round {node['split_in_round']}")
    elif metric is not None and node["last"].get(metric) is not None:
        lines.append(f"{readable(metric)} {node['last'][metric]:.3g}")
    is_leaf = not node["children"]
    axes.annotate(
        "\n".join(lines) if is_leaf else ", ".join(lines),
        place,
        xytext=(0, -12) if is_leaf else (12, 4),
        textcoords="offset points",
        ha="center" if is_leaf else "left",
        va="top" if is_leaf else "bottom",
        fontsize=6.5 if num_leaves <= MOST_LARGE_LABELS else 5.5,
    )


def _columns(nodes: dict[int, JSON]) -> dict[int, float]:
    """Return node -> horizontal place: leaves side by side, parents above their middle."""
    x_of: dict[int, float] = {}

    def place(node_id: int) -> float:
        children = [place(child_id) for child_id in nodes[node_id]["children"]]
        num_leaves = sum(1 for known in x_of if not nodes[known]["children"])
        x_of[node_id] = sum(children) / len(children) if children else float(num_leaves)
        return x_of[node_id]

    place(0)
    return x_of


def _depths(run: JSON) -> dict[int, int]:
    """Return node -> number of nodes above it."""
    depths: dict[int, int] = {}
    for node in run["nodes"]:  # parents come before their children
        depths[node["id"]] = 0 if node["parent"] is None else depths[node["parent"]] + 1
    return depths
