"""Compressed updates and the groups that survive them, which the paper leaves open.

    python -m experiments.fig10c_compression --data-dir DEST [--quick] [--jobs N]

20 clients in four groups, each of which swaps two labels of its own, on MNIST and on
Fashion-MNIST. Every client has 450 training examples, of which it holds 45 out for decisions;
an MLP with one hidden layer of 100 (79,510 parameters); 3 epochs of SGD (learning rate 0.1,
batches of 20) in each of 40 rounds. Plain federated learning, and CFL with the default rule,
both with the same compressor. The quick version runs on the embedded digits for 25 rounds,
with groups that permute all labels: with few examples the rule takes longer to see two
swapped ones.

Clients compress what they send, and the server knows nothing of it:

- ``top 10 %``, ``top 1 %``, ``top 0.1 %``: the largest entries; the others become zero. Sent
  are the values, 32 bits each, and where they are, as many bits as such a number needs.
- ``sign``: one bit for each entry, and their mean absolute value.
- ``8 bits``, ``4 bits``, ``2 bits``: every entry rounded at random, without bias, to one of
  evenly spaced levels up to the largest (255, 15 and 3 of them); the levels, and the largest.
- ``sketch 10 %``, ``sketch 1 %``, ``sketch 0.1 %``: that share of the coordinates of a randomised cosine
  transform of the update, other ones in every round but the same for all clients; the server
  applies the transposed transform. ``own sketch``: every client chooses its own.
- ``+ feedback``: what compression left out is added to the client's next update. Not in a
  round with half updates, unless the name says so: ``+ feedback in halves``.

In a round with half updates a client sends two updates and compresses each of them.

The gap is the paper's g of the updates as the server gets them, in the second round, in which
the rule first looks at them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.fft import dct, idct
from sklearn.metrics import adjusted_rand_score

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
from fedbranch.data import digits, fashion_mnist, label_permutations, label_swaps, mnist
from fedbranch.sim import Run, mlp
from fedbranch.training.seeds import stream_seed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Vector = NDArray[np.float32]
Compress = Callable[[Vector, np.random.Generator], Vector]

TITLES = {"mnist": "MNIST", "fashion": "Fashion-MNIST", "digits": "digits"}
NUM_CLIENTS, NUM_GROUPS = 20, 4
FIRST_LOOK = 2  # round
LATE_ROUNDS = 10  # over which the gap under FL is averaged
LEAST_ARI = 0.9  # less: two groups share a cluster, or a client is in the wrong one


def num_kept(num_params: int, share: float) -> int:
    """Compute how many entries are sent."""
    return max(1, round(share * num_params))


def largest(share: float) -> Compress:
    """Keep the largest entries."""

    def compress(update: Vector, _rng: np.random.Generator) -> Vector:
        num = num_kept(len(update), share)
        rows = np.argpartition(np.abs(update), -num)[-num:]
        kept = np.zeros_like(update)
        kept[rows] = update[rows]
        return kept

    return compress


def signs(update: Vector, _rng: np.random.Generator) -> Vector:
    """Keep the signs, and the mean absolute value."""
    return np.sign(update) * np.abs(update).mean()


def rounded(num_bits: int) -> Compress:
    """Round at random, without bias, to evenly spaced levels."""
    most = 2 ** (num_bits - 1) - 1

    def compress(update: Vector, rng: np.random.Generator) -> Vector:
        unit = np.abs(update).max() / most
        if unit == 0:
            return update
        levels = np.floor(update / unit + rng.random(len(update), dtype=np.float32))
        return (unit * np.clip(levels, -most, most)).astype(np.float32)

    return compress


def sketched(share: float) -> Compress:
    """Keep some coordinates of a randomised cosine transform, and transform them back."""

    def compress(update: Vector, rng: np.random.Generator) -> Vector:
        flips = rng.choice(np.array([-1, 1], dtype=np.float32), size=len(update))
        rows = rng.choice(len(update), size=num_kept(len(update), share), replace=False)
        coordinates = np.zeros_like(update)
        coordinates[rows] = dct(flips * update, norm="ortho")[rows]
        back: Vector = flips * idct(coordinates, norm="ortho")
        return back

    return compress


@dataclass(frozen=True)
class Compressor:
    """A way to compress.

    Attributes
    ----------
    compress
        An update and randomness -> what arrives.
    num_bits
        Number of entries -> bits that are sent.
    is_shared
        All clients have the same randomness in a round; otherwise every update has its own.
    feedback, feedback_in_halves
        Whether what was left out is added to the next update, and also to half updates.
    """

    compress: Compress
    num_bits: Callable[[int], int]
    is_shared: bool = False
    feedback: bool = False
    feedback_in_halves: bool = False


def _compressors() -> dict[str, Compressor]:
    """List all, as the figure does: by kind, then by how little they send."""
    found = {"none": Compressor(lambda update, _rng: update, lambda dim: 32 * dim)}
    for num_bits in (8, 4, 2):
        found[f"{num_bits} bits"] = Compressor(
            rounded(num_bits), lambda dim, each=num_bits: each * dim + 32
        )
    found |= _with_feedback("sign", Compressor(signs, lambda dim: dim + 32))
    found |= {f"sign{IN_HALVES}": replace(found["sign + feedback"], feedback_in_halves=True)}
    for share in (0.1, 0.01, 0.001):
        found |= _with_feedback(
            f"top {100 * share:g} %",
            Compressor(
                largest(share),
                lambda dim, share=share: num_kept(dim, share) * (32 + math.ceil(math.log2(dim))),
            ),
        )
    for share in (0.1, 0.01, 0.001):
        own = Compressor(sketched(share), lambda dim, share=share: 32 * num_kept(dim, share))
        found |= _with_feedback(f"sketch {100 * share:g} %", replace(own, is_shared=True))
        found[f"own sketch {100 * share:g} %"] = own
    return found


def _with_feedback(name: str, compressor: Compressor) -> dict[str, Compressor]:
    return {name: compressor, f"{name} + feedback": replace(compressor, feedback=True)}


IN_HALVES = " + feedback in halves"
COMPRESSORS = _compressors()


class Sending:
    """What the clients of a run do before they send, and what they have sent.

    Parameters
    ----------
    compressor
        How they compress.
    seed
        Of the run.
    """

    def __init__(self, compressor: Compressor, seed: int) -> None:
        self.compressor = compressor
        self.seed = seed
        self.left_out: dict[str, Vector] = {}  # client id -> what it owes
        self.sent: dict[str, Vector] = {}  # client id -> its last update as the server got it

    def __call__(self, client_id: str, this_round: int, update: fb.Update) -> fb.Update:
        """Compress a reply; if it is one on halves, each of them by itself."""
        compressor, half = self.compressor, update.half_difference
        updates = [update.vector] if half is None else [update.vector + half, update.vector - half]
        owed = self.left_out.get(client_id, np.zeros_like(update.vector))
        if compressor.feedback if half is None else compressor.feedback_in_halves:
            updates = [own + owed for own in updates]
            owed = np.zeros_like(owed)
        sent = [
            compressor.compress(own, np.random.default_rng(self._seed(this_round, client_id, part)))
            for part, own in enumerate(updates)
        ]
        if compressor.feedback:
            self.left_out[client_id] = owed + np.mean(np.subtract(updates, sent), axis=0)
        self.sent[client_id] = np.mean(sent, axis=0)
        return replace(
            update,
            vector=self.sent[client_id],
            half_difference=None if half is None else (sent[0] - sent[1]) / 2,
        )

    def _seed(self, this_round: int, client_id: str, part: int) -> int:
        where = (this_round,) if self.compressor.is_shared else (this_round, client_id, part)
        return stream_seed(self.seed, "compression", *where)


def measure(part: str, seed: int, how: How) -> JSON:
    """Train with one compressor: one model for all, and CFL."""
    problem, name = part.split(": ")
    groups = label_swaps(NUM_GROUPS, seed=seed)
    rounds, learning_rate, hidden, test_fraction = 40, 0.1, 100, 2 / 11
    if problem == "digits":
        x, y = digits()
        groups = label_permutations(NUM_GROUPS, seed=seed)
        rounds, learning_rate, hidden, test_fraction = 25, 0.2, 32, 0.2
    else:
        images = {"mnist": mnist, "fashion": fashion_mnist}[problem]("train", how.data_dir)
        rows = np.random.default_rng(seed).permutation(len(images.y))[:11_000]
        x, y = images.x[rows], images.y[rows]
    clients = fb.federate(
        x,
        y,
        num_clients=NUM_CLIENTS,
        groups=groups,
        test_fraction=test_fraction,
        validation_fraction=0.1,
        seed=seed,
    )
    truth = [client.group for client in clients.values()]
    model = mlp(x.shape[1:], 10, hidden=[hidden], seed=seed)

    def trained(rule: fb.Rule) -> tuple[Run, list[float]]:
        """Train; also give the gap of every round until the first split."""
        sending = Sending(COMPRESSORS[name], seed)
        gaps: list[float] = []
        is_whole = [True]

        def note(entry: fb.Round) -> None:
            if is_whole[-1]:  # also in the round of the split: of the updates that decided
                matrix = np.stack([sending.sent[client_id] for client_id in clients])
                gaps.append(fb.separation_gap(fb.cosine_similarity(matrix), truth))
            is_whole.append(len(entry.record.cluster_sizes) == 1)

        run = fb.simulate(
            model,
            clients,
            rule=rule,
            rounds=rounds,
            training=fb.LocalTraining(optimizer=fb.sgd(learning_rate), epochs=3, batch_size=20),
            seed=seed,
            evaluate_every=rounds,
            device=how.device,
            before_send=sending,
            on_round=note,
        )
        return run, gaps

    together, gaps = trained(fb.NeverSplit())
    clustered, gaps_until_split = trained(fb.AutoRule())
    splits = [s.round for entry in clustered.history for s in entry.record.splits]
    dim = clustered.tree.num_params
    return {
        "times_fewer_bits": 32 * dim / COMPRESSORS[name].num_bits(dim),
        "gap": gaps_until_split[FIRST_LOOK - 1],
        "gap_at_first_split": gaps_until_split[-1] if splits else None,
        "gap_of_FL_at_the_end": fmean(gaps[-LATE_ROUNDS:]),
        "split_in_rounds": splits,
        "num_clusters": len(clustered.clusters),
        "ari": adjusted_rand_score(truth, [clustered.tree.position(i) for i in clients]),
        "accuracy": {
            "FL": together.overall_mean["accuracy"],
            "CFL": clustered.overall_mean["accuracy"],
        },
    }


# With which of them the groups must be found.
SURVIVES = ("8 bits", "4 bits", "sign", "sign + feedback", "top 10 %", "sketch 10 % + feedback")


def _mean(outcomes: Outcomes, part: str, name: str) -> float:
    return fmean(measured[name] for measured in outcomes.of(part))


def _accuracy(outcomes: Outcomes, part: str, method: str) -> float:
    return 100 * fmean(measured["accuracy"][method] for measured in outcomes.of(part))


def _survives(outcomes: Outcomes, part: str) -> bool:
    return all(measured["ari"] >= LEAST_ARI for measured in outcomes.of(part))


def draw(outcomes: Outcomes) -> Figure:
    """List the compressors: gap, and accuracies of both methods."""
    from matplotlib import pyplot

    problems = list(dict.fromkeys(part.split(": ")[0] for part in outcomes.parts))
    names = [
        name for name in COMPRESSORS if any(f"{p}: {name}" in outcomes.parts for p in problems)
    ]
    figure, panels = pyplot.subplots(
        1,
        1 + len(problems),
        figsize=(8.6, 1.6 + 0.2 * len(names)),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    gap_axes, *accuracy_axes = panels[0]
    _draw_gaps(gap_axes, outcomes, problems, names)
    for axes, problem in zip(accuracy_axes, problems, strict=True):
        _draw_accuracies(axes, outcomes, problem, names)
    ratios = [_ratio(outcomes, problems, name) for name in names]
    gap_axes.set_yticks(
        range(len(names)),
        [f"{name}   {ratio:.0f}×" for name, ratio in zip(names, ratios, strict=True)],
        fontsize=8,
    )
    gap_axes.invert_yaxis()
    gap_axes.annotate(
        "compressor,\ntimes fewer bits",
        (0, 1),
        (-6, 4),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    handles, labels = gap_axes.get_legend_handles_labels()
    more_handles, more_labels = accuracy_axes[0].get_legend_handles_labels()
    figure.legend(
        handles + more_handles,
        labels + more_labels,
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    return figure


def _ratio(outcomes: Outcomes, problems: list[str], name: str) -> float:
    part = next(f"{p}: {name}" for p in problems if f"{p}: {name}" in outcomes.parts)
    return _mean(outcomes, part, "times_fewer_bits")


def _draw_gaps(axes: Axes, outcomes: Outcomes, problems: list[str], names: list[str]) -> None:
    axes.axvline(0, color="0.6", linewidth=0.8)
    for problem, marker in zip(problems, ("D", "v"), strict=False):
        rows = [row for row, name in enumerate(names) if f"{problem}: {name}" in outcomes.parts]
        gaps = [_mean(outcomes, f"{problem}: {names[row]}", "gap") for row in rows]
        axes.plot(
            gaps,
            rows,
            linestyle="none",
            marker=marker,
            markersize=5,
            color=COLOURS[6],
            markerfacecolor="none",
            label=f"gap, {TITLES[problem]}",
        )
    axes.set_xlabel(f"gap g in round {FIRST_LOOK}")


def _draw_accuracies(axes: Axes, outcomes: Outcomes, problem: str, names: list[str]) -> None:
    for method, colour in (("FL", COLOURS[1]), ("CFL", COLOURS[0])):
        uncompressed = _accuracy(outcomes, f"{problem}: none", method)
        axes.axvline(uncompressed, color=colour, linestyle=":", linewidth=1)
    for row, name in enumerate(names):
        part = f"{problem}: {name}"
        if part not in outcomes.parts:
            continue
        fl, cfl = (_accuracy(outcomes, part, method) for method in ("FL", "CFL"))
        survives = _survives(outcomes, part)
        axes.plot([fl, cfl], [row, row], color="0.8", linewidth=2, zorder=1)
        axes.plot(fl, row, color=COLOURS[1], marker="o", markerfacecolor="none", markersize=5)
        axes.plot(cfl, row, color=COLOURS[0], marker="o" if survives else "x", markersize=5)
    for label, style in [
        ("FL", {"marker": "o", "color": COLOURS[1], "markerfacecolor": "none"}),
        ("CFL, groups found", {"marker": "o", "color": COLOURS[0]}),
        ("CFL, groups not found in every run", {"marker": "x", "color": COLOURS[0]}),
    ]:
        axes.plot([], [], linestyle="none", markersize=5, label=label, **style)
    axes.plot([], [], color="0.3", linestyle=":", linewidth=1, label="without compression")
    axes.set(xlabel="accuracy (%)", title=TITLES[problem])
    axes.title.set_fontsize(10)


def claims(outcomes: Outcomes, _quick: bool) -> list[Claim]:
    """Describe which compressors the groups survive, and which not."""
    problems = list(dict.fromkeys(part.split(": ")[0] for part in outcomes.parts))

    def parts(*names: str) -> list[str]:
        return [f"{problem}: {name}" for problem in problems for name in names]

    def found(*names: str) -> tuple[int, int, int]:
        """Count the runs that found the groups, those that found them exactly, and all."""
        ari = [measured["ari"] for part in parts(*names) for measured in outcomes.of(part)]
        return sum(a >= LEAST_ARI for a in ari), sum(a == 1 for a in ari), len(ari)

    def lost(name: str) -> float:
        """How many points of CFL's accuracy compression costs, where it costs most."""
        return max(
            _accuracy(outcomes, f"{p}: none", "CFL") - _accuracy(outcomes, f"{p}: {name}", "CFL")
            for p in problems
        )

    survived, exactly, of_all = found("none", *SURVIVES)
    own, _, of_own = found("own sketch 1 %")
    disturbed, _, of_disturbed = found(f"sign{IN_HALVES}")
    cost = {name: lost(name) for name in ("8 bits", "4 bits", "sign + feedback")}
    gains = [
        _accuracy(outcomes, part, "CFL") - _accuracy(outcomes, part, "FL")
        for part in parts(*SURVIVES)
    ]
    return [
        Claim(
            f"with {', '.join(SURVIVES)} CFL finds the groups",
            survived == of_all,
            f"in {survived} of {of_all} runs, exactly in {exactly}",
        ),
        Claim(
            "and is then more accurate than FL with the same compressor, by 5 points or more",
            min(gains) >= 5,
            f"by {min(gains):.1f} points or more",
        ),
        Claim(
            f"{', '.join(cost)} cost CFL less than 2 points",
            max(cost.values()) < 2,
            ", ".join(f"{name} {points:.1f}" for name, points in cost.items()),
        ),
        Claim(
            "sketches of 1 % that every client draws for itself hide the groups",
            own == 0,
            f"found in {own} of {of_own} runs",
        ),
        Claim(
            "so does feedback, if it is added to both half updates",
            disturbed == 0,
            f"found in {disturbed} of {of_disturbed} runs",
        ),
    ]


def summary(outcomes: Outcomes) -> str:
    """Describe where the groups were found, and the accuracies."""
    told = []
    for problem in dict.fromkeys(part.split(": ")[0] for part in outcomes.parts):
        names = [n for n in COMPRESSORS if f"{problem}: {n}" in outcomes.parts]
        lost = [name for name in names if not _survives(outcomes, f"{problem}: {name}")]
        of = {
            name: mean_and_spread(
                (m["accuracy"]["CFL"] for m in outcomes.of(f"{problem}: {name}")), scale=100
            )
            for name in ("none", "sign + feedback")
        }
        told.append(
            f"{TITLES[problem]}: groups found in every run with {len(names) - len(lost)} of "
            f"{len(names)} ways to send (not with {', '.join(lost) or 'none'}); CFL {of['none']} % "
            f"without compression, {of['sign + feedback']} % with signs and feedback"
        )
    return "; ".join(told)


EXPERIMENT = Experiment(
    name="fig10c_compression",
    title="Compressed updates: do the groups survive?",
    paper="no experiment; an open question",
    measure=measure,
    draw=draw,
    claims=claims,
    summary=summary,
    differs="Not in the paper.",
    parts=tuple(f"{problem}: {name}" for problem in ("mnist", "fashion") for name in COMPRESSORS),
    quick_parts=tuple(
        f"digits: {name}" for name in ("none", *SURVIVES, f"sign{IN_HALVES}", "own sketch 1 %")
    ),
    data=("mnist", "fashion_mnist"),
    quick_data=(),
)


if __name__ == "__main__":
    main(EXPERIMENT)
