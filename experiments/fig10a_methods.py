"""Figure 10a: CFL with two rules beside the published code, IFCA, FL, local and the oracle.

    python -m experiments.fig10a_methods --data-dir DEST
    python -m experiments.fig10a_methods --data-dir DEST --parts "CIFAR-10*" --device cuda

Three ways in which four groups of clients can differ, on three data sets. Each group names the
labels by a permutation of its own, turns its images by another quarter, or swaps two labels.

There are 20 clients and 50 rounds in which all take part. MNIST and Fashion-MNIST have 250 images
for each client and a perceptron (784-64-10), CIFAR-10 has 500 and three convolutions. Every client
is tested on the same 1000 test images, as its group sees them. Where a rule or IFCA compares
models, clients measure on their training images: they have no held-out ones.

The methods:

- FL, local, oracle: one model for all, one for each client, one for each true group.
- thresholds: CFL with the paper's ε1 and ε2, one setting for each data set, the same for the three
  structures and all seeds. It is chosen as a user could after one run of plain FL, with permuted
  labels and seed 0. Over the second half of that run ε1 is 1.5 times the median mean norm and ε2
  0.7 times the median largest norm. γ_max = 0.5, and 5 rounds of training come before a cluster is
  examined. That run is itself among those measured, so the choice has some hindsight.
- AutoRule: CFL with the default rule.
- published: the loop of the authors' code (github.com/felisat/clustered-federated-learning), with
  the same ε1 and ε2. It cuts by complete linkage instead of the smallest cross-similarity, only
  after round 20 and only clusters of more than two. What it stores as the members of the two
  halves are places inside the cluster, not client ids. For the first split that is the same. After
  a later one some clients are named by several clusters and get the mean updates of all of them;
  others are named by none and stand still.
- IFCA, told that there are four clusters.

Measured for each:

- accuracy at the end, averaged over clients;
- adjusted Rand index (ARI) of the clusters, where clients are together that the same clusters name;
- after how many rounds the clusters were final;
- what goes over the wire, float32: a model down and an update up for each client and round,
  AutoRule's half differences and trial models, IFCA's k models down.

A part is one problem, with all methods. Quick: the embedded digits, 12 clients, 30 rounds; the
published code may split after round 12.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import adjusted_rand_score
from torch import nn

import fedbranch as fb
from experiments.figure import (
    JSON,
    Claim,
    Experiment,
    How,
    Outcomes,
    main,
)
from fedbranch.data import (
    Examples,
    Transform,
    cifar10,
    digits,
    fashion_mnist,
    federate,
    label_permutations,
    label_swaps,
    mnist,
    rotations,
)
from fedbranch.sim import Run, Settings, cnn, mlp
from fedbranch.training.client import evaluate, local_update
from fedbranch.training.model_state import ModelState
from fedbranch.training.seeds import stream_seed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_GROUPS = 4
NEAR = 0.05  # AutoRule's accuracy to the oracle's
METHODS = ("local", "FL", "published", "thresholds", "IFCA", "AutoRule", "oracle")
CLUSTERING = ("published", "thresholds", "IFCA", "AutoRule")
LABELS = {
    "local": "local",
    "FL": "plain FL",
    "published": "published code",
    "thresholds": "CFL, ε1 and ε2",
    "IFCA": "IFCA, told k",
    "AutoRule": "CFL, AutoRule",
    "oracle": "oracle",
}
STRUCTURES: dict[str, Callable[[int], list[Transform]]] = {
    "label permutation": lambda seed: label_permutations(NUM_GROUPS, seed=seed),
    "rotation": lambda _seed: rotations(NUM_GROUPS),
    "label swap": lambda seed: label_swaps(NUM_GROUPS, seed=seed),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What goes with a data set.

    Attributes
    ----------
    channels
        Of the convolutions; without any the model is a perceptron.
    patience
        The number of rounds after which the published code may split.
    """

    images: Callable[[How], tuple[Examples, Examples]]
    shape: tuple[int, int, int]
    channels: tuple[int, ...]
    hidden: int
    rows_per_client: int
    training: fb.LocalTraining
    num_clients: int = 20
    rounds: int = 50
    num_tested: int = 1000
    patience: int = 20


def _embedded(_how: How) -> tuple[Examples, Examples]:
    x, y = digits()
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[:-500], order[-500:]
    return Examples(x[train], y[train]), Examples(x[test], y[test])


SETTINGS = {
    "MNIST": Setting(
        images=lambda how: (mnist("train", how.data_dir), mnist("test", how.data_dir)),
        shape=(1, 28, 28),
        channels=(),
        hidden=64,
        rows_per_client=250,
        training=fb.LocalTraining(optimizer=fb.sgd(0.1), epochs=1, batch_size=25),
    ),
    "Fashion-MNIST": Setting(
        images=lambda how: (
            fashion_mnist("train", how.data_dir),
            fashion_mnist("test", how.data_dir),
        ),
        shape=(1, 28, 28),
        channels=(),
        hidden=64,
        rows_per_client=250,
        training=fb.LocalTraining(optimizer=fb.sgd(0.1), epochs=1, batch_size=25),
    ),
    "CIFAR-10": Setting(
        images=lambda how: (cifar10("train", how.data_dir), cifar10("test", how.data_dir)),
        shape=(3, 32, 32),
        channels=(16, 32, 32),
        hidden=64,
        rows_per_client=500,
        training=fb.LocalTraining(optimizer=fb.sgd(0.1), epochs=2, batch_size=25),
    ),
    "digits": Setting(
        images=_embedded,
        shape=(1, 8, 8),
        channels=(8,),
        hidden=32,
        rows_per_client=100,
        training=fb.LocalTraining(optimizer=fb.sgd(0.2), epochs=2, batch_size=25),
        num_clients=12,
        rounds=30,
        num_tested=300,
        patience=12,
    ),
}


class Wire:
    """Watches what goes over the wire, and which clients train together.

    Pass it as ``before_send``. What it sees are updates; :class:`Counted` tells it of the models
    that clients are asked to try.
    """

    def __init__(self) -> None:
        self.num_vectors = 0
        self.model_of: dict[int, dict[str, str | None]] = defaultdict(dict)  # round -> client

    def __call__(self, client_id: str, number: int, update: fb.Update) -> fb.Update:
        """Count a model down and an update up; twice up if it is of two halves."""
        self.num_vectors += 2 + (update.half_difference is not None)
        self.model_of[number][client_id] = update.base
        return update


class Counted:
    """The default rule; every loss that it is shown was measured under a model sent down."""

    def __init__(self, rule: fb.AutoRule, wire: Wire) -> None:
        self.rule = rule
        self.review_after = rule.review_after
        self.wire = wire

    def examine(self, evidence: fb.Evidence) -> fb.Decision:
        """Decide as the rule does."""
        self.wire.num_vectors += sum(map(len, evidence.losses.values()))
        return self.rule.examine(evidence)

    def review(self, review: fb.Review) -> fb.Decision:
        """Decide as the rule does."""
        self.wire.num_vectors += sum(map(len, review.losses.values()))
        return self.rule.review(review)


def measure(part: str, seed: int, how: How) -> JSON:
    """Run all methods on one problem."""
    name, structure = part.split(": ")
    setting = SETTINGS[name]
    thresholds = fixed_thresholds(setting, how)
    clients = federation(setting, structure, seed, how)
    model = network(setting, seed)
    found: dict[str, JSON] = {"eps": [thresholds.eps_mean, thresholds.eps_max]}
    for method in METHODS:
        if method == "published":
            found[method] = published_code(model, clients, setting, thresholds, seed, how)
            continue
        wire = Wire()
        settings: Settings = {**_settings(setting, seed, how), "before_send": wire}
        if method == "local":
            run = fb.local(model, clients, **settings)
            wire.num_vectors = 0
        elif method == "FL":
            run = fb.fedavg(model, clients, **settings)
        elif method == "thresholds":
            run = fb.simulate(model, clients, rule=thresholds, **settings)
        elif method == "AutoRule":
            run = fb.simulate(model, clients, rule=Counted(fb.AutoRule(), wire), **settings)
        elif method == "IFCA":
            run = fb.ifca(model, clients, num_clusters=NUM_GROUPS, **settings)
            # All k models come down, not one.
            wire.num_vectors += (NUM_GROUPS - 1) * len(clients) * setting.rounds
        else:
            run = fb.oracle(model, clients, **settings)
        found[method] = outcome(run, wire, clients)
    return found


def _settings(setting: Setting, seed: int, how: How) -> Settings:
    return {
        "rounds": setting.rounds,
        "training": setting.training,
        "seed": seed,
        "evaluate_every": setting.rounds,
        "device": how.device,
        "engine": "vectorised",
    }


def _device(how: How) -> str:
    if how.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return how.device


def network(setting: Setting, seed: int) -> nn.Module:
    """Make the model that all clients start from."""
    if not setting.channels:
        return mlp(setting.shape, 10, hidden=(setting.hidden,), seed=seed)
    return cnn(setting.shape, 10, channels=setting.channels, hidden=setting.hidden, seed=seed)


def fixed_thresholds(setting: Setting, how: How) -> fb.Thresholds:
    """Choose ε1 and ε2 for a data set, from one run of plain FL."""
    clients = federation(setting, "label permutation", 0, how)
    plain = fb.fedavg(network(setting, 0), clients, **_settings(setting, 0, how))
    late = [
        entry.record.decisions[0].measurements for entry in plain.history[setting.rounds // 2 :]
    ]
    return fb.Thresholds(
        eps_mean=1.5 * median(measured["mean_norm"] for measured in late),
        eps_max=0.7 * median(measured["max_norm"] for measured in late),
        gamma_max=0.5,
        min_rounds=5,
    )


def federation(setting: Setting, structure: str, seed: int, how: How) -> dict[str, fb.ClientData]:
    """Deal some of the training images out; all clients have the same test images."""
    train, test = setting.images(how)
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(train.y))[: setting.num_clients * setting.rows_per_client]
    tested = rng.permutation(len(test.y))[: setting.num_tested]
    dealt = federate(
        train.x[rows],
        train.y[rows],
        num_clients=setting.num_clients,
        groups=STRUCTURES[structure](seed),
        test=(test.x[tested], test.y[tested]),
        seed=seed,
    )
    return {
        client_id: fb.ClientData(
            client.train, client.test, validation=client.train, group=client.group
        )
        for client_id, client in dealt.items()
    }


def outcome(run: Run, wire: Wire, clients: Mapping[str, fb.ClientData]) -> JSON:
    """Keep what the figure shows."""
    at_the_end = {client_id: run.tree.position(client_id) for client_id in clients}
    partitions = {number: together(models) for number, models in wire.model_of.items()}
    return {
        "accuracy": fmean(metrics["accuracy"] or 0.0 for metrics in run.evaluation.values()),
        "ARI": agreement(at_the_end, clients),
        "clusters": len(set(at_the_end.values())),
        "rounds": rounds_to_the_last(partitions, together(at_the_end), len(run.history)),
        "splits": [d.round for entry in run.history for d in entry.record.splits],
        "megabytes": 4 * run.tree.num_params * wire.num_vectors / 2**20,
    }


def together(label_of: Mapping[str, Hashable]) -> set[frozenset[str]]:
    """Return the sets of clients that have the same label."""
    members: dict[Hashable, set[str]] = defaultdict(set)
    for client_id, label in label_of.items():
        members[label].add(client_id)
    return {frozenset(ids) for ids in members.values()}


def rounds_to_the_last(
    partitions: Mapping[int, set[frozenset[str]]], at_the_end: set[frozenset[str]], rounds: int
) -> int:
    """Count the rounds before the first one after which the clusters stayed the same."""
    final = rounds
    # In some rounds no client trains: the server waits for losses.
    for number in sorted(partitions, reverse=True):
        if partitions[number] != at_the_end:
            break
        final = number - 1
    return final


def agreement(label_of: Mapping[str, Hashable], clients: Mapping[str, fb.ClientData]) -> float:
    """Compare clusters with the true groups: the adjusted Rand index."""
    numbers = {label: number for number, label in enumerate(dict.fromkeys(label_of.values()))}
    truth = [clients[client_id].group for client_id in label_of]
    return float(adjusted_rand_score(truth, [numbers[label] for label in label_of.values()]))


# The published code


def published_code(
    model: nn.Module,
    clients: Mapping[str, fb.ClientData],
    setting: Setting,
    thresholds: fb.Thresholds,
    seed: int,
    how: How,
) -> JSON:
    """Run the loop of the authors' code: every client has weights of its own."""
    ids = sorted(clients)
    device = _device(how)
    model = copy.deepcopy(model).to(device)
    initial = ModelState.of(model)
    data = [
        (torch.as_tensor(x, device=device), torch.as_tensor(y, device=device))
        for x, y in (clients[client_id].train for client_id in ids)
    ]
    weights = np.zeros((len(ids), initial.params.numel()), np.float32)  # less the initial ones
    no_buffers = np.zeros(initial.buffers.numel(), np.float32)
    clusters = [np.arange(len(ids))]
    named: set[int] = set(range(len(ids)))
    num_vectors = 0
    partitions: dict[int, set[frozenset[str]]] = {}
    splits = []
    for number in range(1, setting.rounds + 1):
        num_vectors += len(ids) + len(named)  # updates up; down what their clusters computed
        partitions[number] = together(_names(ids, clusters))
        updates = np.empty_like(weights)
        for row, client_id in enumerate(ids):
            task = fb.Task(
                node_id=0, params=weights[row], buffers=no_buffers, base="", purpose="train"
            )
            updates[row] = local_update(
                model,
                initial,
                task,
                data[row],
                setting.training,
                seed=stream_seed(seed, number, client_id),
            ).vector
        similarity = fb.cosine_similarity(updates)
        next_clusters: list[NDArray[np.intp]] = []
        for rows in clusters:
            mean_norm = np.linalg.norm(updates[rows].mean(axis=0)) if len(rows) else np.inf
            max_norm = np.linalg.norm(updates[rows], axis=1).max(initial=0)
            is_split = mean_norm < thresholds.eps_mean and max_norm > thresholds.eps_max
            if is_split and len(rows) > 2 and number > setting.patience:
                # Places inside the cluster, taken for client ids from here on.
                next_clusters += complete_linkage(similarity[np.ix_(rows, rows)])
                splits.append(number)
            else:
                next_clusters.append(rows)
        clusters = next_clusters
        named = {int(row) for rows in clusters for row in rows}
        for rows in clusters:
            weights[rows] += updates[rows].mean(axis=0)
    label_of = _names(ids, clusters)
    accuracies = []
    for row, client_id in enumerate(ids):
        initial.moved_by(weights[row], no_buffers).load_into(model)
        test = clients[client_id].test
        assert test is not None
        accuracies.append(evaluate(model, test, setting.training)["accuracy"])
    return {
        "accuracy": fmean(accuracies),
        "ARI": agreement(label_of, clients),
        "clusters": len(clusters),
        "rounds": rounds_to_the_last(partitions, together(label_of), setting.rounds),
        "splits": splits,
        "named twice": sum(isinstance(n, tuple) and len(n) > 1 for n in label_of.values()),
        "named by none": len(ids) - len(named),
        "megabytes": 4 * weights.shape[1] * num_vectors / 2**20,
    }


def complete_linkage(similarity: NDArray[np.floating]) -> list[NDArray[np.intp]]:
    """Cut a cluster in two, with clients as far apart as the two least similar ones."""
    linkage = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="complete")
    labels = linkage.fit_predict(-similarity)
    return [np.flatnonzero(labels == label) for label in (0, 1)]


def _names(ids: list[str], clusters: Iterable[NDArray[np.intp]]) -> dict[str, Hashable]:
    """Return the clusters that name each client; for a client without any, itself."""
    named_by: dict[str, tuple[int, ...]] = dict.fromkeys(ids, ())
    for number, rows in enumerate(clusters):
        for row in rows:
            named_by[ids[row]] += (number,)
    return {client_id: label or client_id for client_id, label in named_by.items()}


# Judged and drawn


def oracle_gains(measured: JSON) -> bool:
    """Return whether knowing the groups is worth more than two points of accuracy."""
    return bool(measured["oracle"]["accuracy"] > measured["FL"]["accuracy"] + 0.02)


def claims(outcomes: Outcomes, _quick: bool) -> list[Claim]:
    """Judge the default rule beside the others, and the published code beside the paper's."""
    everything = [outcome.measured for outcome in outcomes]
    gaining = [measured for measured in everything if oracle_gains(measured)]
    scores = [measured["AutoRule"]["ARI"] for measured in gaining]
    behind = _ahead(everything, "oracle", "AutoRule")
    above_fl, above_local = (_ahead(gaining, "AutoRule", other) for other in ("FL", "local"))
    # From the second split on the published code takes places for clients.
    again = [measured for measured in everything if len(measured["published"]["splits"]) > 1]
    theirs, ours = (
        [measured[method]["ARI"] for measured in again] for method in ("published", "thresholds")
    )
    traffic = [m["AutoRule"]["megabytes"] / m["IFCA"]["megabytes"] for m in everything]
    return [
        Claim(
            "knowing the groups pays in most problems",
            len(gaining) > len(everything) / 2,
            f"in {len(gaining)} of {len(everything)}",
        ),
        Claim(
            "where it pays, AutoRule finds exactly the four groups",
            min(scores, default=0) == 1,
            f"in {sum(score == 1 for score in scores)} of {len(scores)}",
        ),
        Claim(
            f"AutoRule's accuracy is within {100 * NEAR:.0f} points of the oracle's",
            max(behind) <= NEAR,
            f"at most {100 * max(behind):.1f} points below, {100 * fmean(behind):.1f} in the mean",
        ),
        Claim(
            "where it pays, AutoRule is above plain FL and above everybody alone",
            min(above_fl, default=0) > 0 and min(above_local, default=0) > 0,
            f"by at least {100 * min(above_fl, default=0):.1f} and "
            f"{100 * min(above_local, default=0):.1f} points",
        ),
        Claim(
            "where the published code splits twice, it does not end with the groups, and its "
            "clusters are worse than CFL's with the same ε1 and ε2",
            len(again) > 0 and max(theirs) < 1 and fmean(theirs) < fmean(ours),
            f"ARI {fmean(theirs or [0]):.2f} and {fmean(ours or [0]):.2f} over {len(again)} runs; "
            f"at most {max(theirs, default=0):.2f}",
        ),
        Claim(
            "AutoRule sends less than IFCA, which is told k",
            max(traffic) < 1,
            f"at most {max(traffic):.0%} of it",
        ),
    ]


def _ahead(measured: list[JSON], method: str, other: str) -> list[float]:
    return [m[method]["accuracy"] - m[other]["accuracy"] for m in measured]


def summary(outcomes: Outcomes) -> str:
    """Compute every method's mean over the problems."""
    everything = [outcome.measured for outcome in outcomes]
    return "; ".join(
        f"{LABELS[method]} {100 * fmean(m[method]['accuracy'] for m in everything):.1f} %"
        f" (ARI {fmean(m[method]['ARI'] for m in everything):.2f})"
        for method in METHODS
    )


def draw(outcomes: Outcomes) -> Figure:
    """Draw tables: accuracy of all methods, and how those that find clusters do it."""
    from matplotlib import pyplot

    parts = outcomes.parts
    drawing, all_axes = pyplot.subplots(
        1,
        4,
        figsize=(10, 1.9 + 0.32 * len(parts)),
        layout="constrained",
        width_ratios=(len(METHODS), *[len(CLUSTERING)] * 3),
    )
    accuracy = 100 * _table(outcomes, METHODS, "accuracy")
    lowest, highest = accuracy.min(axis=1, keepdims=True), accuracy.max(axis=1, keepdims=True)
    ari = _table(outcomes, CLUSTERING, "ARI")
    rounds = _table(outcomes, CLUSTERING, "rounds")
    sent = _table(outcomes, CLUSTERING, "megabytes") / _table(outcomes, ["FL"], "megabytes")
    # The darker the better; accuracies within each problem, from the worst to the best method.
    tables = [
        (accuracy, (accuracy - lowest) / (highest - lowest), 1, "accuracy at the end, %"),
        (ari, ari, 2, "ARI of\nthe clusters"),
        (rounds, 1 - rounds / rounds.max(), 0, "rounds until\nthey are final"),
        (sent, 1 - sent / sent.max(), 2, "sent up and down,\nplain FL = 1"),
    ]
    for axes, (table, shades, num_digits, title) in zip(all_axes, tables, strict=True):
        axes.imshow(shades, cmap="Blues", vmin=0, vmax=1.7, aspect="auto")
        for (row, column), value in np.ndenumerate(table):
            axes.text(column, row, f"{value:.{num_digits}f}", ha="center", va="center", fontsize=8)
        methods = METHODS if axes is all_axes[0] else CLUSTERING
        names = [LABELS[method] for method in methods]
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
        axes.set_yticks([])
        axes.set_title(title, fontsize=9)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        for row in range(len(STRUCTURES), len(parts), len(STRUCTURES)):
            axes.axhline(row - 0.5, color="white", linewidth=4)
    all_axes[0].set_yticks(range(len(parts)), parts, fontsize=8)
    return drawing


def _table(outcomes: Outcomes, methods: Sequence[str], name: str) -> NDArray[np.float64]:
    """Compute means over seeds, one row for each problem and one column for each method."""
    return np.array(
        [
            [fmean(measured[method][name] for measured in outcomes.of(part)) for method in methods]
            for part in outcomes.parts
        ]
    )


def _parts(names: Sequence[str], structures: Sequence[str]) -> list[str]:
    return [f"{name}: {structure}" for name in names for structure in structures]


EXPERIMENT = Experiment(
    name="fig10a_methods",
    title="Methods: two rules, the published code, IFCA, FL, local and the oracle",
    paper="no such comparison",
    measure=measure,
    draw=draw,
    claims=claims,
    summary=summary,
    differs="Not in the paper.",
    parts=_parts(("MNIST", "Fashion-MNIST", "CIFAR-10"), list(STRUCTURES)),
    quick_parts=_parts(("digits",), ("label permutation", "label swap")),
    data=("mnist", "fashion_mnist", "cifar10"),
    quick_data=(),
)

if __name__ == "__main__":
    main(EXPERIMENT)
