"""Optimisation paths of two clients, with incongruent and with congruent risks.

    python -m experiments.fig2_paths [--quick]

Each client has a risk over two parameters and sends one step of gradient descent on it
(learning rate 0.1) in every round; the server averages the two. Plain federated learning goes
the same way whatever the rule until it is stationary; there the paper's rule (ε1 = 1e-5, ε2 =
0.01, γ_max = 0.5, on updates) decides whether the clients part.

- ``incongruent``: two quadratic risks with different minima and curvatures.
- ``congruent``: each risk is zero in an ellipse and grows outside it; the ellipses overlap
  (grey). A client with a gradient of zero has nothing to send.

The figure shows the risks' contours, the path from several starting points (one for each
seed), the clients' descent directions at the end of the common path, how CFL goes on from there
where it splits (dotted), and the norms of the gradients. The quick version is the full one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

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

CASES = ("incongruent", "congruent")
CLIENTS = ("first", "second")
LEARNING_RATE = 0.1
EPS_MEAN, EPS_MAX, GAMMA_MAX = 1e-5, 0.01, 0.5
ROUNDS, ROUNDS_AFTER = 400, 150
EDGE = 3.0  # of the plots

Point = NDArray[np.float64]
CENTRES = {
    "incongruent": (np.array([-1.3, 0.8]), np.array([1.4, -0.6])),
    "congruent": (np.array([-0.7, 0.35]), np.array([0.8, -0.25])),
}
# Curvature of the quadratic risks, and shape of the ellipses: long in different directions.
SHAPES = (np.array([[1.0, 0.5], [0.5, 0.7]]), np.array([[0.5, -0.2], [-0.2, 1.1]]))


def quadratic(point: Point, centre: Point, shape: NDArray) -> tuple[NDArray, NDArray]:
    """Compute a quadratic risk and its gradient at points of shape (..., 2)."""
    away = point - centre
    slope = away @ shape
    return 0.5 * (away * slope).sum(-1), slope


def flat_inside(point: Point, centre: Point, shape: NDArray) -> tuple[NDArray, NDArray]:
    """Compute a risk that is zero in an ellipse, and its gradient, at points of shape (..., 2).

    Outside it is the 3/2th power of the distance by which a point is too far away, in the
    ellipse's own measure; so descent reaches the ellipse and does not only approach it.
    """
    away = point - centre
    slope = away @ shape
    distance = np.sqrt((away * slope).sum(-1))
    excess = np.maximum(0.0, distance - 1.0)
    return excess**1.5, (1.5 * np.sqrt(excess) / np.maximum(distance, 1e-9))[..., None] * slope


RISKS: dict[str, Callable[..., tuple[NDArray, NDArray]]] = {
    "incongruent": quadratic,
    "congruent": flat_inside,
}


def risk(case: str, client: str, point: Point) -> tuple[NDArray, NDArray]:
    """Compute a client's risk and its gradient."""
    which = CLIENTS.index(client)
    return RISKS[case](point, CENTRES[case][which], SHAPES[which])


def start_of(seed: int) -> Point:
    """Choose where to begin: on a circle around the middle, by turns of the golden angle."""
    angle = np.pi * (0.55 + seed * (3 - np.sqrt(5)))
    return 2.6 * np.array([np.cos(angle), np.sin(angle)])


def measure(part: str, seed: int, _how: How) -> JSON:
    """Follow the server from a starting point."""
    start = start_of(seed)
    rule = fb.Thresholds(eps_mean=EPS_MEAN, eps_max=EPS_MAX, gamma_max=GAMMA_MAX)
    server = fb.Server(2, rule=rule)
    paths: dict[str, list[list[float]]] = {"together": [], **{client: [] for client in CLIENTS}}
    norms: dict[str, list[float]] = {"mean": [], **{client: [] for client in CLIENTS}}
    at_the_end: dict[str, Point] = {}
    split_in_round = None
    for _ in range(ROUNDS):
        updates = {}
        gradients = {}
        for client, task in server.plan(CLIENTS).items():
            here = start + task.params
            _, gradients[client] = risk(part, client, here)
            if split_in_round is not None:
                paths[client].append(here.tolist())
            if gradients[client].any():
                step = -LEARNING_RATE * gradients[client]
                updates[client] = fb.Update(step.astype(np.float32), 1, base=task.base)
        if split_in_round is None:
            paths["together"].append(here.tolist())
            at_the_end = gradients
            mean = sum(gradients.values()) / len(CLIENTS)
            for name, gradient in (("mean", mean), *gradients.items()):
                norms[name].append(float(np.linalg.norm(gradient)))
        record = server.step(updates)
        if record.splits:
            split_in_round = record.round
        if not updates or record.round - (split_in_round or record.round) == ROUNDS_AFTER:
            break
    first, second = at_the_end.values()
    lengths = np.linalg.norm(first) * np.linalg.norm(second)
    return {
        "split_in_round": split_in_round,
        "cosine": float(first @ second / lengths) if lengths > 0 else None,
        "risk_together": [
            float(risk(part, c, np.array(paths["together"][-1]))[0]) for c in CLIENTS
        ],
        "risk_at_the_end": [
            float(risk(part, c, np.array((paths[c] or paths["together"])[-1]))[0]) for c in CLIENTS
        ],
        "gradients": [first.tolist(), second.tolist()],
        "norms": norms,
        "paths": {
            name: {"first": [p[0] for p in path], "second": [p[1] for p in path]}
            for name, path in paths.items()
        },
    }


def draw(outcomes: Outcomes) -> Figure:
    """Draw both landscapes with their paths, and the norms."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, 3, figsize=(9.5, 4.1), layout="constrained", width_ratios=(1, 1, 0.9)
    )
    for axes, case in zip(panels, CASES, strict=False):
        _draw_risks(axes, case)
        for number, measured in enumerate(outcomes.of(case)):
            _draw_path(axes, measured, is_first=number == 0)
        axes.set_title(f"{case} risks", fontsize=10)
        axes.set(xlim=(-EDGE, EDGE), ylim=(-EDGE, EDGE), xlabel="first parameter θ₁")
    panels[0].set_ylabel("second parameter θ₂")
    _draw_norms(panels[2], outcomes)
    handles, labels = panels[0].get_legend_handles_labels()
    grey = pyplot.Rectangle((0, 0), 1, 1, color="0.75")
    nothing = pyplot.Line2D([], [], linestyle="none")
    figure.legend(
        [*handles, grey, nothing],
        [*labels, "both risks are minimal", "arrows: descent of each client's risk"],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    return figure


def _draw_risks(axes: Axes, case: str) -> None:
    line = np.linspace(-EDGE, EDGE, 601)
    grid = np.stack(np.meshgrid(line, line), axis=-1)
    values = [risk(case, client, grid)[0] for client in CLIENTS]
    for value, colour in zip(values, COLOURS[:2], strict=True):
        levels = [1e-9, 0.2, 0.7, 1.5, 3, 5] if case == "congruent" else [0.1, 0.4, 1, 2, 4, 7]
        axes.contour(line, line, value, levels, colors=colour, linewidths=0.8, alpha=0.55)
    if case == "congruent":
        both = np.maximum(*values) <= 0
        axes.contourf(line, line, both, [0.5, 1.5], colors=["0.75"])


def _draw_path(axes: Axes, measured: JSON, *, is_first: bool) -> None:
    def label(text: str) -> str | None:
        return text if is_first else None

    x, y = measured["paths"]["together"].values()
    axes.plot(x, y, color="black", linewidth=1.6, label=label("path of FL"))
    axes.plot(x[0], y[0], "o", color="black", markersize=4)
    axes.plot(
        x[-1], y[-1], "*", color="black", markersize=9, label=label("where it ends"), zorder=4
    )
    for client, colour, gradient in zip(CLIENTS, COLOURS[:2], measured["gradients"], strict=True):
        own_x, own_y = measured["paths"][client].values()
        axes.plot(
            own_x,
            own_y,
            ":",
            color=colour,
            linewidth=2,
            label=label(f"CFL after the split, {client} client"),
        )
        if np.any(gradient):
            tip = np.array([x[-1], y[-1]]) - 1.3 * np.array(gradient)
            axes.annotate(
                "",
                xytext=(x[-1], y[-1]),
                xy=tip,
                arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 2.2},
                zorder=3,
            ).set_in_layout(False)


def _draw_norms(axes: Axes, outcomes: Outcomes) -> None:
    for case, style in zip(CASES, ("-", "--"), strict=True):
        norms = outcomes.of(case)[0]["norms"]
        largest = np.maximum(*(norms[client] for client in CLIENTS))
        for values, colour, name in (
            (norms["mean"], COLOURS[6], "mean"),
            (largest, COLOURS[2], "longest client's"),
        ):
            axes.plot(
                np.arange(1, len(values) + 1),
                np.maximum(values, 1e-6),
                style,
                color=colour,
                linewidth=1.6,
                label=f"{name}, {case}",
            )
    axes.set_title("norms of the gradients", fontsize=10)
    axes.set(yscale="log", ylim=(1e-5, 2e3), xlabel="round", ylabel="norm")
    axes.legend(frameon=False, fontsize=7.5, loc="upper right")


def claims(outcomes: Outcomes, _quick: bool) -> list[Claim]:
    """Judge the norms, the angle, the split and where the paths end."""
    apart, joint = outcomes.of("incongruent"), outcomes.of("congruent")
    last_means = [m["norms"]["mean"][-1] for m in apart]
    smallest = [min(m["norms"][client][-1] for client in CLIENTS) for m in apart]
    cosines = [m["cosine"] for m in apart]
    ends = np.array([[m["paths"]["together"][axis][-1] for axis in CLIENTS] for m in apart])
    last_norms = [max(m["norms"][client][-1] for client in CLIENTS) for m in joint]
    return [
        Claim(
            "incongruent: the mean gradient vanishes",
            max(last_means) < EPS_MEAN / LEARNING_RATE,
            f"at most {max(last_means):.1e}",
        ),
        Claim(
            "incongruent: no client's gradient does",
            min(smallest) > 0.1,
            f"at least {min(smallest):.2f}",
        ),
        Claim(
            "incongruent: the two gradients are opposite, cosine -1 within 1e-6",
            all(cosine is not None and cosine < -1 + 1e-6 for cosine in cosines),
            f"{cosines}",
        ),
        Claim(
            "incongruent: all starting points lead to the same stationary point",
            float(np.ptp(ends, axis=0).max()) < 1e-3,
            f"within {float(np.ptp(ends, axis=0).max()):.0e}",
        ),
        Claim(
            "incongruent: the clients are split, and each reaches its own minimum",
            all(
                m["split_in_round"] is not None and max(m["risk_at_the_end"]) < 1e-3 for m in apart
            ),
            f"risks {min(min(m['risk_together']) for m in apart):.2f} or more before, "
            f"{max(max(m['risk_at_the_end']) for m in apart):.0e} or less after",
        ),
        Claim(
            "congruent: both gradients vanish",
            max(last_norms) < 1e-6,
            f"at most {max(last_norms):.1e}",
        ),
        Claim(
            "congruent: the path ends in the grey region, where both risks are zero",
            all(max(m["risk_together"]) == 0 for m in joint),
            f"risks at most {max(max(m['risk_together']) for m in joint):.1e}",
        ),
        Claim(
            "congruent: nobody is split",
            all(m["split_in_round"] is None for m in joint),
            f"{[m['split_in_round'] for m in joint]}",
        ),
    ]


def summary(outcomes: Outcomes) -> str:
    """Describe what we get."""
    apart, joint = outcomes.of("incongruent"), outcomes.of("congruent")
    rounds = mean_and_spread([m["split_in_round"] or ROUNDS for m in apart], digits=0)
    cosine = max(m["cosine"] for m in apart)
    norm = mean_and_spread([m["norms"]["first"][-1] for m in apart], digits=2)
    return (
        f"incongruent: gradients of norm {norm}, cosine {cosine:.6f}, split in round {rounds}; "
        f"congruent: both norms 0 after "
        f"{mean_and_spread([len(m['norms']['mean']) for m in joint], digits=0)} rounds, no split"
    )


EXPERIMENT = Experiment(
    name="fig2_paths",
    title="Optimisation paths of two clients, incongruent and congruent",
    paper="incongruent: positive norms, opposite directions; congruent: both norms go to zero",
    measure=measure,
    draw=draw,
    claims=claims,
    summary=summary,
    differs="The paper gives no formulas; the two risks are ours.",
    parts=CASES,
    seeds=range(4),
    quick_seeds=range(3),
)

if __name__ == "__main__":
    main(EXPERIMENT)
