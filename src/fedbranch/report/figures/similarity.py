"""Draw the similarity matrices of the first splits."""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbranch.report.figures.style import BLACK
from fedbranch.types import JSON

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.gridspec import SubplotSpec

__all__ = ["draw_similarities", "similarities_height"]

MOST_MATRICES = 6
NUM_COLUMNS = 3
MOST_LEGIBLE_CHILDREN = 12


def similarities_height(run: JSON) -> float:
    """Return the height of the matrices, in inches; 0 if there are none."""
    return 2.5 * _num_rows(run)


def draw_similarities(room: SubplotSpec, run: JSON) -> None:
    """Draw the matrices of the first splits, clients in the order of the dendrogram."""
    matrices = run["similarities"][:MOST_MATRICES]
    grid = room.subgridspec(_num_rows(run), NUM_COLUMNS).subplots(squeeze=False)
    image = None
    for axes, matrix in zip(grid.flat, matrices, strict=False):
        image = _draw_matrix(axes, matrix)
    for axes in grid.flat[len(matrices) :]:
        axes.axis("off")
    beside = grid.flat[0] if len(matrices) < NUM_COLUMNS else grid[:, -1]
    figure = grid.flat[0].figure
    figure.colorbar(image, ax=beside, shrink=0.8, label="cosine similarity", ticks=[-1, 0, 1])


def _num_rows(run: JSON) -> int:
    return math.ceil(min(MOST_MATRICES, len(run["similarities"])) / NUM_COLUMNS)


def _draw_matrix(axes: Axes, matrix: JSON) -> Any:
    """Draw one matrix with lines between the children; return the image."""
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
    is_legible = len(middles) <= MOST_LEGIBLE_CHILDREN
    axes.set_yticks(list(middles.values()) if is_legible else [])
    axes.set_yticklabels([f"→ {child}" for child in middles] if is_legible else [])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.set_title(f"Node {matrix['node']}, round {matrix['round']}")
    for side in axes.spines.values():
        side.set_visible(False)
    return image
