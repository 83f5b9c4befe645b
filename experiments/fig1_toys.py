"""Two toys in which no single model fits all clients (the paper's first figure).

    python -m experiments.fig1_toys [--quick]

Points in the plane, two classes, 12 clients in two groups, a linear classifier.

- ``xor``: four clouds around (±1, ±1), of which the first group holds the upper two and the
  second the lower two. The class is that of an exclusive or, which no line separates; each
  group's two clouds alone are easy.
- ``labels``: all clients hold the same two clouds, around (-1, 0) and (1, 0), and the groups
  disagree about which one is the first class.

Every client has 40 points for training and 200 for testing, and trains for 3 epochs of SGD
(learning rate 0.1, batches of 20) in each of 30 rounds: plain federated learning, and CFL with
the default rule, which is told neither the groups nor how many there are. The quick version
has 15 rounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import fedbranch as fb
from experiments.figure import (
    COLOURS,
    JSON,
    Claim,
    Experiment,
    How,
    Outcomes,
    main,
    mean_and_spread,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {
    "xor": "XOR: the model is too weak",
    "labels": "The groups disagree about the labels",
}
GROUPS = ("0", "1")
CLIENTS_PER_GROUP = 6
NUM_TRAIN, NUM_TEST = 40, 200
POINTS_SHOWN = 6  # of each client
SPREAD = 0.3  # of the clouds: neighbours are more than six of it apart
EDGE = 2.1  # of the plots


def points(part: str, group: int, rng: np.random.Generator) -> tuple[NDArray, NDArray]:
    """Draw what one client holds: training points, then test points, with their classes."""
    num_points = NUM_TRAIN + NUM_TEST
    sides = rng.choice([-1.0, 1.0], size=num_points)
    height = {"xor": 1.0 - 2.0 * group, "labels": 0.0}[part]
    centres = np.stack([sides, np.full(num_points, height)], axis=1)
    classes = (sides > 0).astype(np.int64)
    x = centres + rng.normal(0, SPREAD, centres.shape)
    return x.astype(np.float32), 1 - classes if group == 1 else classes


def measure(part: str, seed: int, how: How) -> JSON:
    """Train one model for all, and CFL, on one of the toys."""
    rng = np.random.default_rng([seed, list(TITLES).index(part)])
    clients = {}
    for i in range(len(GROUPS) * CLIENTS_PER_GROUP):
        x, y = points(part, i % 2, rng)
        train, test = slice(NUM_TRAIN), slice(NUM_TRAIN, None)
        clients[f"client-{i:02}"] = fb.ClientData(
            (x[train], y[train]), (x[test], y[test]), group=GROUPS[i % 2]
        )
    torch.manual_seed(seed)
    model = nn.Linear(2, 2)
    rounds = 15 if how.quick else 30
    together = fb.fedavg(model, clients, rounds=rounds, seed=seed, device=how.device)
    clustered = fb.simulate(model, clients, rounds=rounds, seed=seed, device=how.device)
    of_group = {g: [i for i, client in clients.items() if client.group == g] for g in GROUPS}
    splits = [s.round for entry in clustered.history for s in entry.record.splits]
    return {
        "split_in_round": splits[0] if splits else None,
        "is_exact": sorted(map(sorted, clustered.clusters.values())) == sorted(of_group.values()),
        "num_clusters": len(clustered.clusters),
        "accuracy": {
            name: {g: [run.evaluation[i]["accuracy"] for i in of_group[g]] for g in GROUPS}
            for name, run in (("FL", together), ("CFL", clustered))
        },
        "boundary": {
            "FL": boundary(together.model("client-00")),
            **{g: boundary(clustered.model(of_group[g][0])) for g in GROUPS},
        },
        "points": {g: shown([clients[i] for i in of_group[g]]) for g in GROUPS},
    }


def shown(clients: list[fb.ClientData]) -> dict[str, list[float]]:
    """Return the first points of each client: both coordinates and the class."""
    x, y = (np.concatenate([client.train[i][:POINTS_SHOWN] for client in clients]) for i in (0, 1))
    return {"first": x[:, 0].tolist(), "second": x[:, 1].tolist(), "class": y.tolist()}


def boundary(model: nn.Module) -> list[float]:
    """Return a, b, c: the model says class 1 where a x + b y + c > 0."""
    weight, bias = (param.detach().cpu() for param in model.parameters())
    return [*(weight[1] - weight[0]).tolist(), float(bias[1] - bias[0])]


def draw(outcomes: Outcomes) -> Figure:
    """Draw the points of the first seed and the models' boundaries."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(8, 5), layout="constrained", sharey=True)
    for axes, part in zip(panels, TITLES, strict=True):
        _draw_toy(axes, outcomes.of(part)[0])
        fl, cfl = _accuracies(outcomes, part)
        axes.set_title(f"{TITLES[part]}\naccuracy: FL {fl} %, CFL {cfl} %", fontsize=10)
    panels[0].set_ylabel("second coordinate")
    panels[0].plot([], [], linestyle="none", label="arrows: the side of class 1")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_toy(axes: Axes, measured: JSON) -> None:
    for group, colour in zip(GROUPS, COLOURS[:2], strict=True):
        x, y, labels = map(np.array, measured["points"][group].values())
        for label, marker in ((0, "x"), (1, "o")):
            axes.scatter(
                x[labels == label],
                y[labels == label],
                s=22,
                marker=marker,
                facecolors=colour if label == 0 else "none",
                edgecolors=None if label == 0 else colour,
                alpha=0.8,
                label=f"group {int(group) + 1}, class {label}",
            )
    colours = {"FL": "black", **dict(zip(GROUPS, COLOURS[:2], strict=True))}
    names = {"FL": "one model (FL)", "0": "CFL, first cluster", "1": "CFL, second cluster"}
    for name, coefficients in measured["boundary"].items():
        _draw_boundary(axes, coefficients, colours[name], names[name], dashed=name == "FL")
    axes.set(xlim=(-EDGE, EDGE), ylim=(-EDGE, EDGE), xlabel="first coordinate")


def _draw_boundary(
    axes: Axes, coefficients: list[float], colour: str, name: str, *, dashed: bool
) -> None:
    """Draw a line, with an arrow to the side of class 1."""
    normal, offset = np.array(coefficients[:2]), coefficients[2]
    length = np.linalg.norm(normal)
    foot = -offset * normal / length**2
    direction = np.array([-normal[1], normal[0]]) / length
    style = "--" if dashed else "-"
    axes.axline(foot, foot + direction, color=colour, linestyle=style, linewidth=2, label=name)
    # Arrows of several lines through one point would hide each other.
    start = foot + {"black": 0.0, COLOURS[0]: 1.75, COLOURS[1]: -1.75}[colour] * direction
    arrow = axes.annotate(
        "",
        xytext=start,
        xy=start + 0.5 * normal / length,
        arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.5},
        annotation_clip=True,
    )
    arrow.set_in_layout(False)


def _mean_accuracy(measured: JSON, name: str) -> float:
    return float(np.mean([measured["accuracy"][name][group] for group in GROUPS]))


def _accuracies(outcomes: Outcomes, part: str) -> list[str]:
    return [
        mean_and_spread([_mean_accuracy(m, name) for m in outcomes.of(part)], scale=100)
        for name in ("FL", "CFL")
    ]


def claims(outcomes: Outcomes, _quick: bool) -> list[Claim]:
    """Judge: one model fails on both toys, CFL finds the two groups and serves both."""
    judged = []
    # Of the four clouds of an exclusive or, a line has at most three on the right side.
    for part, limit in (("xor", 0.77), ("labels", 0.6)):
        every = outcomes.of(part)
        together = [_mean_accuracy(measured, "FL") for measured in every]
        worst = [
            min(min(measured["accuracy"]["CFL"][group]) for group in GROUPS) for measured in every
        ]
        exact = [measured["is_exact"] for measured in every]
        judged += [
            Claim(
                f"{part}: one model has an accuracy of at most {limit:.0%}",
                max(together) <= limit,
                mean_and_spread(together, scale=100) + " %",
            ),
            Claim(
                f"{part}: CFL finds the two groups exactly, with every seed",
                all(exact),
                f"{sum(exact)} of {len(exact)}, split in rounds "
                f"{[measured['split_in_round'] for measured in every]}",
            ),
            Claim(
                f"{part}: CFL's accuracy is at least 97 % for every client",
                min(worst) >= 0.97,
                f"worst client {100 * min(worst):.1f} %",
            ),
        ]
    return judged


def summary(outcomes: Outcomes) -> str:
    """Describe what we get."""
    texts = []
    for part in TITLES:
        fl, cfl = _accuracies(outcomes, part)
        exact = sum(measured["is_exact"] for measured in outcomes.of(part))
        texts.append(
            f"{part}: FL {fl} %, CFL {cfl} %, groups exact in {exact} of {len(outcomes.of(part))}"
        )
    return "; ".join(texts)


EXPERIMENT = Experiment(
    name="fig1_toys",
    title="Toys: XOR with a linear model, and conflicting labels",
    paper="no single model fits all clients; each cluster's data are easy to separate",
    measure=measure,
    draw=draw,
    claims=claims,
    summary=summary,
    differs="The paper draws the data only; the boundaries and the accuracies are ours.",
    parts=tuple(TITLES),
    seeds=range(5),
    quick_seeds=(0, 1, 2),
)

if __name__ == "__main__":
    main(EXPERIMENT)
