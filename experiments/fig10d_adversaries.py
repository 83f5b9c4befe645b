"""Adversaries: which ones clustering isolates, and what honest clients gain by it.

    python -m experiments.fig10d_adversaries --data-dir DEST [--quick] [--jobs N]

The paper expects that clients which work against the others end up in clusters of their own.
Here 10, 20, 30 and 40 % of 20 clients attack:

- ``labels``: they train on labels y replaced by 9 - y, and send what they learned.
- ``sign``: they train as they should and send the opposite of their update.
- ``noise``: they send Gaussian noise as long as their update, new in every round.
- ``lies``: as ``labels``, and when the default rule asks for their losses after a step of all
  together and after one of their group, they exchange the two. The others answer truthfully,
  on the data that they hold.

All other clients are of one group; in the parts named ``two groups`` they are of two, each of
which swaps two labels of its own, and the attackers come from both.

An MLP with one hidden layer of 100 on MNIST; every client has 450 training examples, of which
it holds 45 out for decisions; 3 epochs of SGD (learning rate 0.1, batches of 20) in each of 40
rounds. The quick version runs on the embedded digits, for 25 rounds.

Four methods: plain federated learning over all clients (FL); CFL with the default rule; CFL
with the paper's thresholds, set with hindsight from the norms of that very FL run; and the
oracle, which knows the attackers, leaves them out and trains the honest groups each by itself.

An attacker is isolated if its cluster holds no honest client. Shown is the mean accuracy of
the honest clients, each under the model of its cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median, stdev
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
from fedbranch.data import Relabel, Transform, digits, label_swaps, mnist
from fedbranch.sim import Run, mlp
from fedbranch.training.seeds import stream_seed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_CLIENTS = 20
ATTACKS = {
    "labels": "flipped labels",
    "sign": "flipped sign",
    "noise": "noise",
    "lies": "flipped labels, and lies",
}
SHARES = (10, 20, 30, 40)  # %
MOST = SHARES[-1]
FLIPPED = tuple(reversed(range(10)))
FL, CFL, THRESHOLDS, ORACLE = METHODS = ("FL", "CFL", "CFL, thresholds", "oracle")


@dataclass(frozen=True)
class Part:
    """What a part is about: its name says all of it."""

    attack: str
    percent: int
    num_groups: int

    @classmethod
    def of(cls, name: str) -> Part:
        """Read a name such as ``sign 20`` or ``two groups, sign 20``."""
        rest = name.removeprefix("two groups, ")
        attack, percent = rest.split()
        return cls(attack, int(percent), 1 if rest == name else 2)

    def attackers(self, seed: int) -> list[int]:
        """Draw the attackers, by number."""
        rng = np.random.default_rng(seed)
        return sorted(rng.permutation(NUM_CLIENTS)[: NUM_CLIENTS * self.percent // 100].tolist())

    def transforms(self, seed: int) -> list[Transform]:
        """Return what each honest group does to its data, and then each group's attackers."""
        honest = label_swaps(2, seed=seed) if self.num_groups == 2 else [Relabel(tuple(range(10)))]
        flipped = [Relabel(tuple(FLIPPED[y] for y in own.new_labels)) for own in honest]
        return [*honest, *(flipped if self.attack in ("labels", "lies") else honest)]

    def group_of(self, seed: int) -> list[int]:
        """Return each client's transform, by number."""
        attackers = self.attackers(seed)
        return [
            i % self.num_groups + self.num_groups * (i in attackers) for i in range(NUM_CLIENTS)
        ]


def opposite(_client_id: str, _this_round: int, update: fb.Update) -> fb.Update:
    """Send the opposite of an update."""
    half = update.half_difference
    return replace(update, vector=-update.vector, half_difference=None if half is None else -half)


def noise(seed: int) -> Callable[[str, int, fb.Update], fb.Update]:
    """Send noise as long as an update, in both halves if it has halves."""

    def send(client_id: str, this_round: int, update: fb.Update) -> fb.Update:
        rng = np.random.default_rng(stream_seed(seed, "noise", this_round, client_id))
        half = update.half_difference
        updates = [update.vector] if half is None else [update.vector + half, update.vector - half]
        drawn = [rng.normal(size=len(own)).astype(np.float32) for own in updates]
        sent = [
            noise * np.linalg.norm(own) / np.linalg.norm(noise)
            for noise, own in zip(drawn, updates, strict=True)
        ]
        return replace(
            update,
            vector=np.mean(sent, axis=0),
            half_difference=None if half is None else (sent[0] - sent[1]) / 2,
        )

    return send


@dataclass(frozen=True)
class Deceived:
    """The default rule, when some clients exchange the losses that it asks them for."""

    liars: frozenset[str]
    rule: fb.AutoRule = field(default_factory=fb.AutoRule)

    @property
    def review_after(self) -> tuple[int, ...]:
        """When the rule looks at a split again."""
        return self.rule.review_after

    def examine(self, evidence: fb.Evidence) -> fb.Decision:
        """Decide on what the clients say."""
        said = {
            client_id: _exchanged(losses) if client_id in self.liars else losses
            for client_id, losses in evidence.losses.items()
        }
        return self.rule.examine(replace(evidence, losses=said))

    def review(self, review: fb.Review) -> fb.Decision:
        """Look at a split again."""
        return self.rule.review(review)


def _exchanged(losses: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(losses[place ^ 1] for place in range(len(losses)))  # they come in pairs


def measure(part: str, seed: int, how: How) -> JSON:
    """Train with all methods under one attack."""
    about = Part.of(part)
    if how.quick:
        x, y = digits()
        optimizer, rounds, hidden, test_fraction = fb.sgd(0.2), 25, 32, 0.2
    else:
        images = mnist("train", how.data_dir)
        rows = np.random.default_rng(seed).permutation(len(images.y))[:11_000]
        x, y = images.x[rows], images.y[rows]
        optimizer, rounds, hidden, test_fraction = fb.sgd(0.1), 40, 100, 2 / 11
    clients = fb.federate(
        x,
        y,
        num_clients=NUM_CLIENTS,
        groups=about.transforms(seed),
        group_of=about.group_of(seed),
        test_fraction=test_fraction,
        validation_fraction=0.1,
        seed=seed,
    )
    ids = list(clients)
    attackers = {ids[number] for number in about.attackers(seed)}
    attack = {"sign": opposite, "noise": noise(seed)}.get(about.attack)

    def send(client_id: str, this_round: int, update: fb.Update) -> fb.Update:
        if attack is None or client_id not in attackers:
            return update
        return attack(client_id, this_round, update)

    model = mlp(x.shape[1:], 10, hidden=[hidden], seed=seed)
    settings = {
        "rounds": rounds,
        "training": fb.LocalTraining(optimizer=optimizer, epochs=3, batch_size=20),
        "seed": seed,
        "evaluate_every": rounds,
        "device": how.device,
        "before_send": send,
    }
    together = fb.fedavg(model, clients, **settings)
    honest = {i: client for i, client in clients.items() if i not in attackers}
    liars = frozenset(attackers if about.attack == "lies" else ())
    tuned = thresholds_with_hindsight(together)
    runs = {
        FL: together,
        CFL: fb.simulate(model, clients, rule=Deceived(liars), **settings),
        THRESHOLDS: fb.simulate(model, clients, rule=tuned, **settings),
        ORACLE: fb.oracle(model, honest, **settings),
    }
    home = {i: str(number % about.num_groups) for number, i in enumerate(ids)}
    return {
        "num_attackers": len(attackers),
        "methods": {
            name: {
                "accuracy": fmean(run.evaluation[i]["accuracy"] for i in honest),
                "worst_accuracy": min(run.evaluation[i]["accuracy"] for i in honest),
                "num_clusters": len(run.clusters),
                "split_in_rounds": [s.round for e in run.history for s in e.record.splits],
                **isolation(run, attackers, {i: home[i] for i in honest}),
            }
            for name, run in runs.items()
        },
    }


def thresholds_with_hindsight(plain: Run) -> fb.Thresholds:
    """Set the paper's thresholds between the norms that plain federated learning ended with."""
    late = plain.history[len(plain.history) // 2 :]
    norms = [entry.record.decisions[0].measurements for entry in late]
    return fb.Thresholds(
        eps_mean=1.5 * median(m["mean_norm"] for m in norms),
        eps_max=0.7 * median(m["max_norm"] for m in norms),
        gamma_max=0.5,
        min_rounds=5,
    )


def isolation(run: Run, attackers: set[str], honest: Mapping[str, str]) -> JSON:
    """Count the attackers and honest clients that the clusters of a run separate.

    Parameters
    ----------
    run
        With its clusters.
    attackers
        Their ids.
    honest
        Honest client id -> its group.

    Returns
    -------
    JSON
        ``recall``: the share of attackers in clusters without honest clients. ``precision``:
        of all clients outside the main cluster of an honest group, the share that attacks;
        None if there are none. ``set_aside``: the share of the attackers' replies that the
        server did not use.
    """
    position = {i: run.tree.position(i) for i in run.tree.client_ids}
    main_clusters = set()
    for group in set(honest.values()):
        places = [position[i] for i in sorted(honest) if honest[i] == group]
        main_clusters.add(max(sorted(set(places)), key=places.count))
    with_honest = {position[i] for i in honest}
    outside = [i for i, place in position.items() if place not in main_clusters]
    isolated = [i for i in attackers if i in position and position[i] not in with_honest]
    return {
        "recall": len(isolated) / len(attackers) if attackers else None,
        "precision": fmean(i in attackers for i in outside) if outside else None,
        "set_aside": fmean(i in entry.record.refused for entry in run.history for i in attackers)
        if attackers
        else None,
    }


def _mean(outcomes: Outcomes, part: str, method: str, name: str) -> float:
    """Average over the seeds; NaN where nothing can be measured."""
    values = [measured["methods"][method][name] for measured in outcomes.of(part)]
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else math.nan


def _spread(outcomes: Outcomes, part: str, method: str) -> float:
    values = [measured["methods"][method]["accuracy"] for measured in outcomes.of(part)]
    return stdev(values) if len(values) > 1 else 0.0


def draw(outcomes: Outcomes) -> Figure:
    """Draw honest clients' accuracy and the isolated attackers, over the share of attackers."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        2,
        len(ATTACKS),
        figsize=(8.6, 5),
        layout="constrained",
        sharex=True,
        sharey="row",
        height_ratios=(3, 2),
    )
    for (attack, title), (upper, lower) in zip(ATTACKS.items(), panels.T, strict=True):
        parts = {0: "none 0"} | {share: f"{attack} {share}" for share in SHARES}
        shown = {share: part for share, part in parts.items() if part in outcomes.parts}
        _draw_attack(upper, lower, outcomes, shown)
        in_two = {s: f"two groups, {attack} {s}" for s in SHARES}
        for share, part in in_two.items():
            if part in outcomes.parts:
                _draw_two_groups(upper, lower, outcomes, share, part)
        upper.set_title(title, fontsize=10)
        lower.set(xticks=[0, *SHARES], ylim=(-7, 107), xlabel="clients that attack (%)")
    panels[0, 0].set_ylabel("accuracy of\nhonest clients (%)")
    panels[1, 0].set_ylabel("attackers\nisolated (%)")
    if any(part.startswith("two groups") for part in outcomes.parts):
        panels[0, 0].plot([], [], linestyle="none", label="(hollow: two honest groups)")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False)
    return figure


STYLES = {
    FL: (COLOURS[1], "o", "-"),
    CFL: (COLOURS[0], "s", "-"),
    THRESHOLDS: (COLOURS[2], "^", "-"),
    ORACLE: (COLOURS[6], "", ":"),
}


def _draw_attack(upper: Axes, lower: Axes, outcomes: Outcomes, parts: Mapping[int, str]) -> None:
    for method, (colour, marker, line) in STYLES.items():
        style = {"color": colour, "marker": marker, "linestyle": line, "markersize": 5}
        accuracy = [100 * _mean(outcomes, part, method, "accuracy") for part in parts.values()]
        spread = [100 * _spread(outcomes, part, method) for part in parts.values()]
        upper.errorbar(list(parts), accuracy, yerr=spread, label=method, **style)
        if method in (CFL, THRESHOLDS):
            attacked = {share: part for share, part in parts.items() if share}
            isolated = [100 * _mean(outcomes, p, method, "recall") for p in attacked.values()]
            lower.plot(list(attacked), isolated, **style)


def _draw_two_groups(upper: Axes, lower: Axes, outcomes: Outcomes, share: int, part: str) -> None:
    for number, (method, (colour, marker, _)) in enumerate(STYLES.items()):
        style = {
            "color": colour,
            "marker": marker or "_",
            "markerfacecolor": "none",
            "linestyle": "none",
        }
        place = share + 1.5 * (number - 1.5)
        upper.plot([place], [100 * _mean(outcomes, part, method, "accuracy")], **style)
        if method in (CFL, THRESHOLDS):
            lower.plot([place], [100 * _mean(outcomes, part, method, "recall")], **style)


def claims(outcomes: Outcomes, quick: bool) -> list[Claim]:
    """Describe which clients each rule isolates, and what that is worth."""

    def every(attack: str, method: str, name: str) -> list[float]:
        return [
            measured["methods"][method][name]
            for part in outcomes.parts
            if part.startswith(f"{attack} ")
            for measured in outcomes.of(part)
        ]

    def differences(part: str, better: str, worse: str) -> list[float]:
        """In points, for each seed."""
        return [
            100 * (m["methods"][better]["accuracy"] - m["methods"][worse]["accuracy"])
            for m in outcomes.of(part)
        ]

    recall, precision = every("labels", CFL, "recall"), every("labels", CFL, "precision")
    behind = [d for s in SHARES for d in differences(f"labels {s}", ORACLE, CFL)]
    gained = differences(f"labels {MOST}", CFL, FL)
    by_sign, only_sign = every("sign", CFL, "recall"), every("sign", CFL, "precision")
    gained_by_sign = differences(f"sign {MOST}", CFL, FL)
    by_thresholds = [m["methods"][THRESHOLDS]["recall"] for m in outcomes.of(f"sign {MOST}")]
    gained_by_thresholds = differences(f"sign {MOST}", THRESHOLDS, FL)
    lost_by_noise = differences(f"noise {MOST}", ORACLE, CFL)
    # An isolated attacker is by itself: no client is there that its replies could be unlike.
    isolated_noise, aside_noise = every("noise", CFL, "recall"), every("noise", CFL, "set_aside")
    by_noise = list(map(max, isolated_noise, aside_noise))
    by_lies, only_lies = every("lies", CFL, "recall"), every("lies", CFL, "precision")
    in_two_groups = differences("two groups, sign 20", CFL, FL)
    unharmed = [m["methods"][CFL]["num_clusters"] for m in outcomes.of("none 0")]
    made = [
        Claim(
            "CFL isolates all who flip labels, and nobody else",
            set(recall) == set(precision) == {1.0},
            f"recall at least {min(recall):.2f}, precision at least {min(precision):.2f}",
        ),
        Claim(
            "its honest clients then are within 2 points of the oracle",
            max(behind) <= 2,
            f"at most {max(behind):.1f} points behind",
        ),
        Claim(
            f"and, if {MOST} % attack, at least 4 points better off than under FL",
            min(gained) >= 4,
            f"{mean_and_spread(gained)} points",
        ),
        Claim(
            "CFL isolates all who flip signs, and nobody else, although they would not gain",
            set(by_sign) == set(only_sign) == {1.0} and min(gained_by_sign) >= 4,
            f"recall at least {min(by_sign):.2f}, precision at least {min(only_sign):.2f}, honest "
            f"clients gain {mean_and_spread(gained_by_sign)} points over FL",
        ),
        Claim(
            f"thresholds, set with hindsight, isolate them if {MOST} % attack",
            min(by_thresholds) == 1 and min(gained_by_thresholds) >= 4,
            f"recall at least {min(by_thresholds):.2f}, honest clients gain "
            f"{mean_and_spread(gained_by_thresholds)} points over FL",
        ),
        Claim(
            "noise is set aside or isolated, and costs honest clients less than 2 points",
            min(by_noise) >= 0.8 and fmean(lost_by_noise) < 2,
            f"isolated in {isolated_noise.count(1.0)} of {len(by_noise)} runs, elsewhere at least "
            f"{min(by_noise):.0%} set aside, {mean_and_spread(lost_by_noise)} points lost to {MOST} %",
        ),
        Claim(
            "who flips labels and lies about losses is isolated as well",
            set(by_lies) == set(only_lies) == {1.0},
            f"recall at least {min(by_lies):.2f}, precision at least {min(only_lies):.2f}",
        ),
        Claim(
            "without attackers CFL keeps one model", set(unharmed) == {1}, f"clusters: {unharmed}"
        ),
    ]
    if not quick:
        made.append(
            Claim(
                "who flips signs does not keep two honest groups together: at least 4 points over FL",
                min(in_two_groups) >= 4,
                f"{mean_and_spread(in_two_groups)} points",
            )
        )
    return made


def summary(outcomes: Outcomes) -> str:
    """Describe what honest clients have under the strongest attacks."""
    told = []
    for attack, title in ATTACKS.items():
        part = f"{attack} {MOST}"
        accuracy = {
            method: mean_and_spread(
                (m["methods"][method]["accuracy"] for m in outcomes.of(part)), scale=100
            )
            for method in METHODS
        }
        recall = 100 * _mean(outcomes, part, CFL, "recall")
        aside = 100 * _mean(outcomes, part, CFL, "set_aside")
        fate = f"{recall:.0f} % isolated" if recall else f"{aside:.0f} % of it set aside"
        told.append(
            f"{title}: FL {accuracy[FL]} %, CFL {accuracy[CFL]} % ({fate}), "
            f"thresholds {accuracy[THRESHOLDS]} %, oracle {accuracy[ORACLE]} %"
        )
    return f"honest clients if {MOST} % attack: " + "; ".join(told)


EXPERIMENT = Experiment(
    name="fig10d_adversaries",
    title="Adversaries: who gets isolated, and what honest clients gain",
    paper="no experiment; expects that adversaries end up in clusters of their own",
    measure=measure,
    draw=draw,
    claims=claims,
    summary=summary,
    differs="Not in the paper.",
    parts=(
        "none 0",
        *(f"{attack} {share}" for attack in ATTACKS for share in SHARES),
        *(f"two groups, {attack} 20" for attack in ATTACKS),
    ),
    quick_parts=("none 0", "labels 20", *(f"{attack} {MOST}" for attack in ATTACKS)),
    data=("mnist",),
    quick_data=(),
)


if __name__ == "__main__":
    main(EXPERIMENT)
