"""Figure 6: the norm criteria over 1000 rounds with two clients on MNIST.

    python -m experiments.fig6_norms --data-dir DEST --device cuda

Two clients, plain federated learning, and in every round the norm of the mean update (the
paper's criterion with ε1) and the largest norm of a client's update (with ε2).

Congruent: client one holds digits 0 to 4 and client two 5 to 9; one model can fit both.
Incongruent: both hold random digits, and each has exchanged two labels of its own; no model
can.

Each client has 10,000 digits; that is for a GPU. With a few hundred a network learns the
conflicting labels by heart, and the norms fall. With mini-batches at a constant learning rate
the norms would end at the noise of the batches; ours are the whole data of a client, so that
"to zero" can be seen: 3 steps of gradient descent a round, learning rate 0.1, no momentum. Two
convolutions (8 and 16 channels) and two linear layers.

The quick version has 100 digits for each client and 100 rounds.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import numpy as np

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
from fedbranch.data import label_swaps, mnist
from fedbranch.sim import cnn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("incongruent", "congruent")
NORMS = {"mean_norm": "norm of the mean update", "max_norm": "largest norm of a client's update"}


def measure(part: str, seed: int, how: How) -> JSON:
    """Train, and keep both norms of every round."""
    clients = federation(part, seed, how)
    run = fb.fedavg(
        cnn((1, 28, 28), 10, channels=(8, 16), hidden=32, seed=seed),
        clients,
        rounds=100 if how.quick else 1000,
        training=fb.LocalTraining(
            optimizer=fb.sgd(0.1), epochs=3, batch_size=len(clients["one"].train.y)
        ),
        seed=seed,
        device=how.device,
    )
    measured = [entry.record.decisions[0].measurements for entry in run.history]
    return {name: [measurements[name] for measurements in measured] for name in NORMS}


def federation(part: str, seed: int, how: How) -> dict[str, fb.ClientData]:
    """Make two clients with digits that one model can learn, or cannot."""
    x, y = mnist("train", how.data_dir)
    size = 100 if how.quick else 10_000
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(y))
    if part == "congruent":
        first, second = rows[y[rows] < 5][:size], rows[y[rows] >= 5][:size]
        return {
            "one": fb.ClientData((x[first], y[first])),
            "two": fb.ClientData((x[second], y[second])),
        }
    first, second = rows[:size], rows[size : 2 * size]
    swap_first, swap_second = label_swaps(2, seed=seed)
    return {
        "one": fb.ClientData(swap_first(x[first], y[first], rng)),
        "two": fb.ClientData(swap_second(x[second], y[second], rng)),
    }


def at_the_end(norms: list[float]) -> float:
    """Compute the median of the last tenth of the rounds."""
    return median(norms[-max(1, len(norms) // 10) :])


def ratio(measured: JSON, name: str) -> float:
    """Compare a norm at the end with its largest value."""
    return at_the_end(measured[name]) / max(measured[name])


def claims(outcomes: Outcomes, quick: bool) -> list[Claim]:
    """Judge what the paper reports."""
    small, times = (0.5, 2) if quick else (0.2, 2.5)
    found = []
    for part in PARTS:
        ratios = [ratio(m, "mean_norm") for m in outcomes.of(part)]
        found.append(
            Claim(
                f"{part}: the mean update's norm falls below {small:.0%} of its largest",
                max(ratios) < small,
                f"at most {max(ratios):.1%}",
            )
        )
    falling = [ratio(m, "max_norm") for m in outcomes.of("congruent")]
    staying = [
        at_the_end(m["max_norm"]) / median(m["max_norm"]) for m in outcomes.of("incongruent")
    ]
    longest = {part: [at_the_end(m["max_norm"]) for m in outcomes.of(part)] for part in PARTS}
    return [
        *found,
        Claim(
            "congruent: the longest client update falls along with it, below 20%",
            max(falling) < 0.2,
            f"at most {max(falling):.1%}",
        ),
        Claim(
            "incongruent: it stagnates, above half of what it is in the median round",
            min(staying) > 0.5,
            f"at least {min(staying):.0%}",
        ),
        Claim(
            f"at the end it is {times:g} times as long as that of congruent clients",
            min(longest["incongruent"]) > times * max(longest["congruent"]),
            f"at least {min(longest['incongruent']):.3f}, at most {max(longest['congruent']):.3f}",
        ),
    ]


def summary(outcomes: Outcomes) -> str:
    """Describe what we get."""
    texts = []
    for part in PARTS:
        measured = outcomes.of(part)
        mean, longest = (
            mean_and_spread((ratio(m, name) for m in measured), 1, 100) for name in NORMS
        )
        texts.append(f"{part}: mean norm to {mean} % of its largest, max norm to {longest} %")
    return "; ".join(texts)


def draw(outcomes: Outcomes) -> Figure:
    """Both norms over the rounds, each seed a line."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8.6, 3.8), sharey=True, layout="constrained")
    for one, part in zip(axes, PARTS, strict=True):
        for number, measured in enumerate(outcomes.of(part)):
            for colour, (name, label) in zip(COLOURS, NORMS.items(), strict=False):
                rounds = range(1, len(measured[name]) + 1)
                label = label if number == 0 else None
                one.plot(rounds, measured[name], color=colour, linewidth=1, alpha=0.8, label=label)
        one.set(title=f"{part} clients", xlabel="communication round", yscale="log")
    axes[0].set_ylabel("norm")
    axes[0].legend(frameon=False, loc="lower left", fontsize=9)
    return figure


EXPERIMENT = Experiment(
    name="fig6_norms",
    title="Norm criteria over 1000 rounds, two clients",
    paper=(
        "the mean norm goes to 0 in both cases; the max norm goes to 0 if the clients are "
        "congruent, and stagnates or grows if not"
    ),
    measure=measure,
    draw=draw,
    claims=claims,
    summary=summary,
    differs=(
        "10,000 digits for each client instead of all, and whole-batch steps, so that no noise "
        "of mini-batches stops the norms. Those steps are as long as gradient descent bears: it "
        "overshoots now and then, which are the spikes, and the incongruent mean norm stays at a "
        "tenth of its largest instead of going to 0."
    ),
    parts=PARTS,
    data=("mnist",),
)

if __name__ == "__main__":
    main(EXPERIMENT)
