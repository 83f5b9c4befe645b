"""Figure 4: the separation gap after 50 rounds against the data points per client.

    python -m experiments.fig4_data_size --data-dir DEST

20 clients in four groups of five, each of which has exchanged two labels of its own. Every
client draws its data points at random, from MNIST 10 to 200 and from CIFAR-10 100 to 2400; the
fewer are a part of the more. Plain federated learning for 50 rounds, each of 3 local epochs;
then the clients' weight-updates and their full-batch gradients are compared at the same
parameters. The gap is g = (smallest similarity within a group) - (largest similarity between
the two sides of the optimal bipartition); g > 0 says that the bipartition divides no group.

The paper gives neither network, learning rate nor batch size. Ours are: on MNIST two
convolutions (16 and 32 channels) and two linear layers, SGD with learning rate 0.03 on batches
of 10; on CIFAR-10 three convolutions (32, 64, 64) and two linear layers, learning rate 0.02,
batches of 100. CIFAR-10 is for a GPU: ``--parts 'cifar10*' --device cuda``.

One part more, ``mnist-20-balanced``: 20 data points again, but two of each digit. Of 20 random
ones some clients lack one of the two digits that their group has exchanged.

The quick version has MNIST only, smaller convolutions and 15 rounds.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from scipy.stats import spearmanr
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
from fedbranch.data import cifar10, iid, label_swaps, mnist
from fedbranch.sim import Normalised, cnn
from fedbranch.types import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_CLIENTS, NUM_GROUPS = 20, 4
SIZES = {"mnist": (10, 20, 50, 100, 150, 200), "cifar10": (100, 300, 500, 1000, 1500, 2400)}
QUICK_SIZES = (10, 50, 100)
NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
SIGNALS = ("weight-update", "gradient")
PAPER_ENOUGH = {"mnist": 20, "cifar10": 500}  # data points, with weight-updates
BALANCED = "mnist-20-balanced"
OUR_ENOUGH = {"mnist": 50, "cifar10": 500}


class BothSimilarities:
    """Never splits, and keeps the similarities of all gradients and of all weight-updates."""

    def __init__(self) -> None:
        self.similarity: dict[str, Array] = {}

    def examine(self, evidence: fb.Evidence) -> fb.Decision:
        """Train on. What the server is shown are gradients: clients send them."""
        self.similarity["gradient"] = fb.cosine_similarity(evidence.updates)
        return fb.NeverSplit().examine(evidence)

    def aggregate(self, updates: Array, weights: Array) -> Array:
        """Average. What is averaged last in a round are the updates that the model moves by."""
        self.similarity["weight-update"] = fb.cosine_similarity(updates)
        return fb.weighted_mean(updates, weights)


def measure(part: str, seed: int, how: How) -> JSON:
    """Train for 50 rounds, then compare."""
    data_set, size, *_ = part.split("-")
    clients = federation(data_set, int(size), seed, how, is_balanced=part == BALANCED)
    training = fb.LocalTraining(
        optimizer=fb.sgd(0.03 if data_set == "mnist" else 0.02),
        epochs=3,
        batch_size=10 if data_set == "mnist" else 100,
    )
    run = fb.fedavg(
        network(data_set, seed, how),
        clients,
        rounds=15 if how.quick else 50,
        training=training,
        seed=seed,
        device=how.device,
    )
    both = BothSimilarities()
    fb.simulate(
        run.model_at(run.tree.root.id),
        clients,
        rule=both,
        aggregate=both.aggregate,
        rounds=1,
        training=replace(training, send_gradient=True),
        seed=seed,
        device=how.device,
    )
    groups = [str(client.group) for client in clients.values()]
    return {
        signal: {
            "gap": fb.separation_gap(similarity, groups),
            "is_correct": divides_no_group(fb.bipartition(similarity), groups),
        }
        for signal, similarity in both.similarity.items()
    }


def federation(
    data_set: str, size: int, seed: int, how: How, *, is_balanced: bool = False
) -> dict[str, fb.ClientData]:
    """Draw some images for every client, with two labels exchanged as its group does."""
    x, y = (mnist if data_set == "mnist" else cifar10)("train", how.data_dir, raw=True)
    rng = np.random.default_rng(seed)
    swaps = label_swaps(NUM_GROUPS, seed=seed)
    clients = {}
    for number, rows in enumerate(iid(y, NUM_CLIENTS, seed=seed)):
        own = rng.permutation(rows)
        if is_balanced:
            own = np.concatenate([own[y[own] == label][: size // 10] for label in range(10)])
        own = own[:size]
        group = number % NUM_GROUPS
        clients[f"client-{number:02d}"] = fb.ClientData(
            swaps[group](x[own], y[own], rng), group=str(group)
        )
    return clients


def network(data_set: str, seed: int, how: How) -> nn.Module:
    """Make the model: bytes to numbers, then the network."""
    if data_set == "mnist":
        channels, hidden = ((8, 16), 32) if how.quick else ((16, 32), 64)
        scale = Normalised((0.131,), (0.308,))
        return nn.Sequential(
            scale, cnn((1, 28, 28), 10, channels=channels, hidden=hidden, seed=seed)
        )
    return nn.Sequential(
        Normalised((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
        cnn((3, 32, 32), 10, channels=(32, 64, 64), hidden=64, seed=seed),
    )


def divides_no_group(split: fb.Bipartition, groups: list[str]) -> bool:
    """Return whether the clients of every group are on one side."""
    left = {groups[row] for row in split.left_rows}
    return left.isdisjoint(groups[row] for row in split.right_rows)


def sizes_of(outcomes: Outcomes, data_set: str) -> list[int]:
    """Return the numbers of data points that were measured, ascending."""
    parts = (part.split("-") for part in outcomes.parts if part != BALANCED)
    return sorted(int(size) for name, size in parts if name == data_set)


def gaps(outcomes: Outcomes, data_set: str, size: int, signal: str) -> list[float]:
    """Return the gap for each seed."""
    return [measured[signal]["gap"] for measured in outcomes.of(f"{data_set}-{size}")]


def mean_gaps(outcomes: Outcomes, data_set: str, signal: str) -> list[float]:
    """Compute the mean gap for each number of data points."""
    return [fmean(gaps(outcomes, data_set, size, signal)) for size in sizes_of(outcomes, data_set)]


def enough(outcomes: Outcomes, data_set: str, signal: str) -> int | None:
    """Return the number of data points from which on the mean gap is positive."""
    first = None
    for size in reversed(sizes_of(outcomes, data_set)):
        if fmean(gaps(outcomes, data_set, size, signal)) <= 0:
            break
        first = size
    return first


def always_correct(outcomes: Outcomes, data_set: str, signal: str) -> int | None:
    """Return the number of data points from which on the bipartition is correct in all seeds."""
    first = None
    for size in reversed(sizes_of(outcomes, data_set)):
        if not all(m[signal]["is_correct"] for m in outcomes.of(f"{data_set}-{size}")):
            break
        first = size
    return first


def claims(outcomes: Outcomes, quick: bool) -> list[Claim]:
    """Judge what the paper reports."""
    found = []
    for data_set in ("mnist",) if quick else SIZES:
        sizes = sizes_of(outcomes, data_set)
        update, gradient = (mean_gaps(outcomes, data_set, signal) for signal in SIGNALS)
        name = NAMES[data_set]
        growth = float(spearmanr(sizes, gradient).statistic)
        num_few = sum(size <= OUR_ENOUGH[data_set] for size in sizes)
        first = {signal: enough(outcomes, data_set, signal) for signal in SIGNALS}
        needed = first["weight-update"]
        found += [
            Claim(
                f"{name}: many data points separate better than few",
                min(update[-1] - update[0], gradient[-1] - gradient[0]) > 0.3,
                f"from {sizes[0]} to {sizes[-1]}: weight-updates {update[0]:+.2f} to "
                f"{update[-1]:+.2f}, gradients {gradient[0]:+.2f} to {gradient[-1]:+.2f}",
            ),
            Claim(
                f"{name}: the gradients' gap grows all the way",
                growth > 0.9,
                f"rank correlation {growth:.2f}; the weight-updates' is largest at "
                f"{sizes[update.index(max(update))]}",
            ),
            Claim(
                f"{name}: too few data points do not separate",
                update[0] < 0 and gradient[0] < 0,
                f"at {sizes[0]}: weight-updates {update[0]:+.2f}, gradients {gradient[0]:+.2f}",
            ),
            Claim(
                f"{name}: the weight-updates' gap is positive from "
                f"{OUR_ENOUGH[data_set]} data points on",
                needed is not None and needed <= OUR_ENOUGH[data_set],
                f"from {needed} on in the mean; paper: about {PAPER_ENOUGH[data_set]}",
            ),
            Claim(
                f"{name}: gradients need at least as many data points as weight-updates",
                needed is not None and needed <= (first["gradient"] or 1_000_000),
                f"weight-updates {needed}, gradients {first['gradient']}",
            ),
            Claim(
                f"{name}: with few data points, up to {OUR_ENOUGH[data_set]}, weight-updates "
                "separate better than gradients",
                fmean(update[:num_few]) > fmean(gradient[:num_few]),
                f"{fmean(update[:num_few]):+.2f} against {fmean(gradient[:num_few]):+.2f} in the "
                f"mean; with {sizes[-1]} {update[-1]:+.2f} against {gradient[-1]:+.2f}",
            ),
        ]
    if not quick:
        random, balanced = (
            fmean(m["weight-update"]["gap"] for m in outcomes.of(part))
            for part in ("mnist-20", BALANCED)
        )
        found.append(
            Claim(
                "MNIST: 20 data points suffice if they are two of each digit",
                balanced > 0 and balanced > random,
                f"{balanced:+.2f} in the mean, of random digits {random:+.2f}",
            )
        )
    return found


def summary(outcomes: Outcomes) -> str:
    """Describe what we get."""
    lines = []
    for data_set, name in NAMES.items():
        sizes = sizes_of(outcomes, data_set)
        if not sizes:
            continue
        needed = enough(outcomes, data_set, "weight-update")
        lines.append(
            f"{name}: g > 0 from {needed} points on with weight-updates "
            f"({mean_and_spread(gaps(outcomes, data_set, needed or sizes[-1], SIGNALS[0]), 2)}), "
            f"from {enough(outcomes, data_set, 'gradient')} on with gradients; "
            f"at {sizes[-1]} "
            + " and ".join(
                mean_and_spread(gaps(outcomes, data_set, sizes[-1], signal), 2)
                for signal in SIGNALS
            )
            + "; bipartition correct in all seeds from "
            f"{always_correct(outcomes, data_set, 'weight-update')} on"
        )
    if BALANCED in outcomes.parts:
        balanced = (m["weight-update"]["gap"] for m in outcomes.of(BALANCED))
        lines.append(f"MNIST with two of each digit at 20: {mean_and_spread(balanced, 2)}")
    return ". ".join(lines)


def draw(outcomes: Outcomes) -> Figure:
    """Gap against data points, a panel for each data set."""
    from matplotlib import pyplot

    data_sets = [data_set for data_set in SIZES if sizes_of(outcomes, data_set)]
    figure, panels = pyplot.subplots(
        1, len(data_sets), figsize=(9, 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, data_set in zip(panels[0], data_sets, strict=True):
        _draw_panel(axes, outcomes, data_set)
    panels[0, 0].set_ylabel("separation gap g")
    for filled, text in (("grey", "no group divided"), ("white", "a group divided")):
        panels[0, 0].plot(
            [], [], "o", markersize=5, markeredgecolor="grey", markerfacecolor=filled, label=text
        )
    panels[0, 0].legend(loc="lower right", frameon=False, fontsize=9)
    return figure


def _draw_panel(axes: Axes, outcomes: Outcomes, data_set: str) -> None:
    sizes = sizes_of(outcomes, data_set)
    for colour, signal in zip(COLOURS, SIGNALS, strict=False):
        means = mean_gaps(outcomes, data_set, signal)
        axes.plot(sizes, means, color=colour, label=f"{signal}s")
        for size in sizes:
            for measured in outcomes.of(f"{data_set}-{size}"):
                axes.plot(
                    size,
                    measured[signal]["gap"],
                    "o",
                    markersize=5,
                    markeredgecolor=colour,
                    markerfacecolor=colour if measured[signal]["is_correct"] else "white",
                )
    if data_set == "mnist":
        balanced = [m["weight-update"]["gap"] for m in outcomes.of(BALANCED)]
        label = "weight-updates, two of each digit" if balanced else None
        axes.plot([20] * len(balanced), balanced, "D", color=COLOURS[2], markersize=5, label=label)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.axvline(PAPER_ENOUGH[data_set], color="grey", linestyle=":")
    axes.annotate(
        "paper: g > 0\nfrom here on",
        (PAPER_ENOUGH[data_set], 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        va="top",
        fontsize=8,
    )
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("data points per client")
    axes.set_title(NAMES[data_set], fontsize=10)


EXPERIMENT = Experiment(
    name="fig4_data_size",
    title="Separation gap against data points per client",
    paper=(
        "g grows with the data; g > 0 from about 20 points per client on MNIST and 500 on "
        "CIFAR-10 with weight-updates, which need fewer than gradients"
    ),
    measure=measure,
    draw=draw,
    claims=claims,
    summary=summary,
    differs=(
        "Network, learning rate and batch size are ours; the paper gives none. Weight-updates are "
        "ahead where data are few. Where they are many, gradients have the larger gap, perhaps "
        "because more data are more local steps, in which clients learn what they have in common."
    ),
    parts=[
        *(f"{data_set}-{size}" for data_set, sizes in SIZES.items() for size in sizes),
        BALANCED,
    ],
    quick_parts=[f"mnist-{size}" for size in QUICK_SIZES],
    data=("mnist", "cifar10"),
    quick_data=("mnist",),
)

if __name__ == "__main__":
    main(EXPERIMENT)
