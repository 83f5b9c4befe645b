"""Figure 5: the separation gap after each of the first 50 rounds.

    python -m experiments.fig5_rounds --data-dir DEST

20 clients in four groups of five, each of which has exchanged two labels of its own. Every
client has 100 random images of MNIST, or 1500 of CIFAR-10. Plain federated learning with 3
local epochs; after every round the clients' weight-updates, and their full-batch gradients,
are compared at the parameters that the round ended with. The gap is g = (smallest similarity
within a group) - (largest similarity between the two sides of the optimal bipartition).

Networks and training are those of figure 4, also the paper's silence about them: on MNIST two
convolutions (16 and 32 channels) and two linear layers, SGD with learning rate 0.03 on batches
of 10; on CIFAR-10 three convolutions (32, 64, 64) and two linear layers, learning rate 0.02,
batches of 100. CIFAR-10 is for a GPU: ``--parts cifar10 --device cuda``.

The quick version has MNIST only, smaller convolutions and 15 rounds.
"""

from __future__ import annotations

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
SIZES = {"mnist": 100, "cifar10": 1500}
NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
SIGNALS = ("weight-update", "gradient")
PAPER_ROUNDS = 10  # until g > 0, with weight-updates, on both data sets


class BothGaps:
    """Never splits, and measures the gaps of all gradients and of all weight-updates."""

    def __init__(self, groups: list[str]) -> None:
        self.groups = groups
        self.gaps: dict[str, list[float]] = {signal: [] for signal in SIGNALS}
        self.averaged_last = 0.0

    def examine(self, evidence: fb.Evidence) -> fb.Decision:
        """Train on. What the server is shown are gradients: clients send them."""
        self.gaps["gradient"].append(self._gap(evidence.updates))
        return fb.NeverSplit().examine(evidence)

    def aggregate(self, updates: Array, weights: Array) -> Array:
        """Average. What is averaged last in a round are the updates that the model moves by."""
        self.averaged_last = self._gap(updates)
        return fb.weighted_mean(updates, weights)

    def on_round(self, _: fb.Round) -> None:
        """Note the gap of the updates."""
        self.gaps["weight-update"].append(self.averaged_last)

    def _gap(self, vectors: Array) -> float:
        return fb.separation_gap(fb.cosine_similarity(vectors), self.groups)


def measure(part: str, seed: int, how: How) -> JSON:
    """Train, and compare in every round."""
    clients = federation(part, seed, how)
    both = BothGaps([str(client.group) for client in clients.values()])
    fb.simulate(
        network(part, seed, how),
        clients,
        rule=both,
        aggregate=both.aggregate,
        on_round=both.on_round,
        # What is sent in a round was computed after the round before: the first says how it
        # is after none, and one more is needed for the last.
        rounds=1 + (15 if how.quick else 50),
        training=fb.LocalTraining(
            optimizer=fb.sgd(0.03 if part == "mnist" else 0.02),
            epochs=3,
            batch_size=10 if part == "mnist" else 100,
            send_gradient=True,
        ),
        seed=seed,
        device=how.device,
    )
    return both.gaps


def federation(data_set: str, seed: int, how: How) -> dict[str, fb.ClientData]:
    """Draw some images for every client, with two labels exchanged as its group does."""
    x, y = (mnist if data_set == "mnist" else cifar10)("train", how.data_dir, raw=True)
    rng = np.random.default_rng(seed)
    swaps = label_swaps(NUM_GROUPS, seed=seed)
    clients = {}
    for number, rows in enumerate(iid(y, NUM_CLIENTS, seed=seed)):
        own = rng.permutation(rows)[: SIZES[data_set]]
        group = number % NUM_GROUPS
        clients[f"client-{number:02d}"] = fb.ClientData(
            swaps[group](x[own], y[own], rng), group=str(group)
        )
    return clients


def network(data_set: str, seed: int, how: How) -> nn.Module:
    """Make the model: bytes to numbers, then the network."""
    if data_set == "mnist":
        channels, hidden = ((8, 16), 32) if how.quick else ((16, 32), 64)
        return nn.Sequential(
            Normalised((0.131,), (0.308,)),
            cnn((1, 28, 28), 10, channels=channels, hidden=hidden, seed=seed),
        )
    return nn.Sequential(
        Normalised((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
        cnn((3, 32, 32), 10, channels=(32, 64, 64), hidden=64, seed=seed),
    )


def mean_gaps(outcomes: Outcomes, data_set: str, signal: str) -> list[float]:
    """Compute the mean gap after 0, 1, 2, ... rounds."""
    runs = (measured[signal] for measured in outcomes.of(data_set))
    return [fmean(values) for values in zip(*runs, strict=True)]


def positive_from(gaps: list[float]) -> int | None:
    """Return the number of rounds from which on the gap is positive."""
    not_yet = [rounds for rounds, gap in enumerate(gaps) if gap <= 0]
    first = max(not_yet, default=-1) + 1
    return first if first < len(gaps) else None


def claims(outcomes: Outcomes, quick: bool) -> list[Claim]:
    """Judge what the paper reports."""
    found = []
    for data_set in ("mnist",) if quick else SIZES:
        name = NAMES[data_set]
        update, gradient = (mean_gaps(outcomes, data_set, signal) for signal in SIGNALS)
        first = {s: positive_from(mean_gaps(outcomes, data_set, s)) for s in SIGNALS}
        needed, in_all = (
            first["weight-update"],
            [positive_from(measured["weight-update"]) for measured in outcomes.of(data_set)],
        )
        growth = float(spearmanr(range(len(gradient)), gradient).statistic)
        found += [
            Claim(
                f"{name}: the gap is larger after training than before",
                min(update[-1] - update[0], gradient[-1] - gradient[0]) > 0.3,
                f"weight-updates {update[0]:+.2f} to {update[-1]:+.2f}, gradients "
                f"{gradient[0]:+.2f} to {gradient[-1]:+.2f} after {len(update) - 1} rounds",
            ),
            Claim(
                f"{name}: the gradients' gap grows all the way",
                growth > 0.7,
                f"rank correlation {growth:.2f}; the weight-updates' is largest after "
                f"{update.index(max(update))} rounds",
            ),
            Claim(
                f"{name}: there is no gap before the first round",
                update[0] < 0 and gradient[0] < 0,
                f"weight-updates {update[0]:+.2f}, gradients {gradient[0]:+.2f}",
            ),
            Claim(
                f"{name}: the weight-updates' gap is positive after {PAPER_ROUNDS} rounds",
                needed is not None and needed <= PAPER_ROUNDS,
                f"from round {needed} on in the mean, seeds: {', '.join(map(str, in_all))}; "
                f"paper: about {PAPER_ROUNDS}",
            ),
            Claim(
                f"{name}: weight-updates separate earlier than gradients",
                needed is not None and needed < (first["gradient"] or len(update)),
                f"from round {needed} on, gradients from {first['gradient']} on",
            ),
            Claim(
                f"{name}: in the first {PAPER_ROUNDS} rounds weight-updates separate better",
                fmean(update[: PAPER_ROUNDS + 1]) > fmean(gradient[: PAPER_ROUNDS + 1]),
                f"{fmean(update[: PAPER_ROUNDS + 1]):+.2f} against "
                f"{fmean(gradient[: PAPER_ROUNDS + 1]):+.2f} in the mean; "
                f"at the end {update[-1]:+.2f} against {gradient[-1]:+.2f}",
            ),
        ]
    return found


def summary(outcomes: Outcomes) -> str:
    """Describe what we get."""
    lines = []
    for data_set in outcomes.parts:
        update, gradient = (
            positive_from(mean_gaps(outcomes, data_set, signal)) for signal in SIGNALS
        )
        at_the_end = " and ".join(
            mean_and_spread((m[signal][-1] for m in outcomes.of(data_set)), 2) for signal in SIGNALS
        )
        lines.append(
            f"{NAMES[data_set]}: g > 0 after {update} rounds with weight-updates, "
            f"{'never' if gradient is None else f'after {gradient}'} with gradients; "
            f"at the end {at_the_end}"
        )
    return ". ".join(lines)


def draw(outcomes: Outcomes) -> Figure:
    """Gap against rounds, a panel for each data set."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(outcomes.parts), figsize=(9, 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, data_set in zip(panels[0], outcomes.parts, strict=True):
        _draw_panel(axes, outcomes, data_set)
    panels[0, 0].set_ylabel("separation gap g")
    panels[0, 0].legend(loc="lower right", frameon=False, fontsize=9)
    return figure


def _draw_panel(axes: Axes, outcomes: Outcomes, data_set: str) -> None:
    for colour, signal in zip(COLOURS, SIGNALS, strict=False):
        runs = [measured[signal] for measured in outcomes.of(data_set)]
        rounds = range(len(runs[0]))
        axes.fill_between(
            rounds,
            [min(values) for values in zip(*runs, strict=True)],
            [max(values) for values in zip(*runs, strict=True)],
            color=colour,
            alpha=0.2,
            linewidth=0,
        )
        axes.plot(rounds, mean_gaps(outcomes, data_set, signal), color=colour, label=f"{signal}s")
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.axvline(PAPER_ROUNDS, color="grey", linestyle=":")
    axes.annotate(
        "paper: g > 0 from here on",
        (PAPER_ROUNDS, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        va="top",
        fontsize=8,
    )
    axes.set_xlabel("communication rounds")
    num_seeds = len(outcomes.of(data_set))
    spread = f"; mean and range of {num_seeds} seeds" if num_seeds > 1 else ""
    axes.set_title(f"{NAMES[data_set]}, {SIZES[data_set]} per client{spread}", fontsize=10)


EXPERIMENT = Experiment(
    name="fig5_rounds",
    title="Separation gap against communication rounds",
    paper=(
        "g grows monotonically; g > 0 after about 10 rounds on MNIST and CIFAR-10 with "
        "weight-updates, earlier than with gradients"
    ),
    measure=measure,
    draw=draw,
    claims=claims,
    summary=summary,
    differs=(
        "As figure 4. Weight-updates separate earlier, as in the paper; later gradients have the "
        "larger gap, and on CIFAR-10 the weight-updates' falls again from round 20 on."
    ),
    parts=tuple(SIZES),
    quick_parts=("mnist",),
    data=("mnist", "cifar10"),
    quick_data=("mnist",),
)

if __name__ == "__main__":
    main(EXPERIMENT)
