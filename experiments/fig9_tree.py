"""The parameter tree of a real run, newcomers' ways down it, and the models on every path.

    python -m experiments.fig9_tree --data-dir DEST [--quick]

MNIST. Clients differ in what they call the digits, in two steps: two families have nothing in
common (a random permutation each), and the groups of a family have exchanged two pairs of
labels each, the first none. There are groups A1, A2, B1, B2 and B3 with four clients each, and
one newcomer for each group joins when the tree stands (round 120 of 150). Each client has 240
examples of its own to train on, 60 for validation and 200 to be tested on. The model is a
multilayer perceptron (784-64-10), trained by 3 epochs of SGD (learning rate 0.1, batches of 50)
in each round.

The rule is the paper's, which splits in two, so that there is a tree: ε1 = 0.1, ε2 = 0.6, γ_max
= 0.5. The thresholds lie between the norms that mixed and pure clusters settle at. A split
leaves at least two clients on each side: the update of a newcomer is long where the others have
long been content, and the criteria would cut it off.

Quick: scikit-learn's small digits; groups A1, A2, B1 and B2 (three pairs) with three clients
each, of 63 examples for training, 15 or 16 for validation and 34 for testing; 6 epochs, each one
step on all examples, learning rate 0.2; ε1 = 0.1, ε2 = 0.45; 100 rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import torch
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
from fedbranch.data import Relabel, digits, mnist

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_LABELS = 10


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What differs between the full and the quick version."""

    groups: tuple[str, ...]  # family and number
    num_swaps: int  # pairs of labels that all but the first group of a family exchange
    clients_per_group: int
    rounds: int
    newcomers_in_round: int
    training: fb.LocalTraining
    eps_mean: float
    eps_max: float
    test_fraction: float


FULL = Setting(
    groups=("A1", "A2", "B1", "B2", "B3"),
    num_swaps=2,
    clients_per_group=4,
    rounds=150,
    newcomers_in_round=120,
    training=fb.LocalTraining(optimizer=fb.sgd(0.1), epochs=3, batch_size=50),
    eps_mean=0.1,
    eps_max=0.6,
    test_fraction=0.4,
)
QUICK = Setting(
    groups=("A1", "A2", "B1", "B2"),
    num_swaps=3,
    clients_per_group=3,
    rounds=100,
    newcomers_in_round=85,
    training=fb.LocalTraining(optimizer=fb.sgd(0.2), epochs=6, batch_size=100),
    eps_mean=0.1,
    eps_max=0.45,
    test_fraction=0.3,
)
EXAMPLES_PER_CLIENT = 500


def labels_of(setting: Setting, seed: int) -> list[Relabel]:
    """Choose what each group calls the labels."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(NUM_LABELS)
    of_family = {family: rng.permutation(NUM_LABELS) for family in "AB"}
    transforms = []
    for family, number in setting.groups:
        names = of_family[family].copy()
        if number != "1":
            for a, b in np.roll(order, int(number)).reshape(-1, 2)[: setting.num_swaps]:
                names[[a, b]] = names[[b, a]]
        transforms.append(Relabel(tuple(names.tolist())))
    return transforms


def federation(setting: Setting, seed: int, how: How) -> dict[str, fb.ClientData]:
    """Deal the data out; the last client of each group comes late."""
    num_clients = len(setting.groups) * (setting.clients_per_group + 1)
    if how.quick:
        x, y = digits()
    else:
        x, y = mnist("train", how.data_dir)
        rows = np.random.default_rng(seed).permutation(len(y))[: num_clients * EXAMPLES_PER_CLIENT]
        x, y = x[rows], y[rows]
    clients = fb.federate(
        x,
        y,
        num_clients=num_clients,
        groups=labels_of(setting, seed),
        held_out="own",
        test_fraction=setting.test_fraction,
        validation_fraction=0.2,
        seed=seed,
    )
    late = list(clients)[-len(setting.groups) :]
    return {
        client_id: replace(
            client,
            group=setting.groups[int(client.group)],
            joins=setting.newcomers_in_round if client_id in late else 1,
        )
        for client_id, client in clients.items()
    }


def measure(_part: str, seed: int, how: How) -> JSON:
    """Run CFL and describe the tree, the clients that went down it, and the models on every path."""
    setting = QUICK if how.quick else FULL
    clients = federation(setting, seed, how)
    torch.manual_seed(seed)
    num_inputs = next(iter(clients.values())).train.x[0].size
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(num_inputs, 64), nn.ReLU(), nn.Linear(64, NUM_LABELS)
    )
    run = fb.simulate(
        model,
        clients,
        rule=fb.Thresholds(
            eps_mean=setting.eps_mean,
            eps_max=setting.eps_max,
            gamma_max=0.5,
            min_cluster_size=2,
            min_rounds=5,
        ),
        rounds=setting.rounds,
        training=setting.training,
        seed=seed,
        device=how.device,
        evaluate_every=setting.rounds,
    )
    on_path = run.evaluation_on_path()
    best, together = run.best_on_path(), run.ensemble_evaluation()
    return {
        "groups": list(setting.groups),
        "nodes": [
            {
                "id": node.id,
                "parent": node.parent_id,
                "split_in_round": node.split_in_round,
                "members": {
                    group: sum(
                        clients[i].group == group and clients[i].joins == 1
                        for i in run.tree.cluster(node.id)
                    )
                    for group in setting.groups
                },
                "accuracy": fmean(
                    on_path[i][node.id]["accuracy"] for i in run.tree.cluster(node.id)
                ),
            }
            for node in run.tree
        ],
        "clients": [
            {
                "id": client_id,
                "group": client.group,
                "is_newcomer": client.joins > 1,
                "path": run.path_of(client_id),
                "accuracy": [metrics["accuracy"] for metrics in on_path[client_id].values()],
                "best": run.path_of(client_id).index(best[client_id]),
                "ensemble": together[client_id]["accuracy"],
            }
            for client_id, client in clients.items()
        ],
        "routed": [
            {
                "group": clients[step.client_id].group,
                "round": entry.record.round,
                "from": step.from_node,
                "to": step.to_node,
                "similarities": dict(step.similarities),
            }
            for entry in run.history
            for step in entry.record.routed
        ],
    }


def draw(outcomes: Outcomes) -> Figure:
    """Draw the tree of the first seed and the accuracies along its paths."""
    from matplotlib import pyplot

    measured = outcomes.of("all")[0]
    figure, (tree, paths) = pyplot.subplots(
        1, 2, figsize=(10, 5.2), layout="constrained", width_ratios=(1.9, 1)
    )
    colours = dict(zip(measured["groups"], COLOURS, strict=False))
    _draw_tree(tree, measured, colours)
    _draw_accuracies(paths, measured, colours)
    return figure


def places(nodes: list[JSON]) -> dict[int, tuple[float, int]]:
    """Place every node: leaves side by side, parents above the middle of their children."""
    children: dict[int | None, list[int]] = {}
    for node in nodes:
        children.setdefault(node["parent"], []).append(node["id"])
    found: dict[int, tuple[float, int]] = {}
    num_leaves = 0

    def place(node_id: int, depth: int) -> float:
        nonlocal num_leaves
        below = [place(child, depth + 1) for child in children.get(node_id, ())]
        if not below:
            num_leaves += 1
        x = fmean(below) if below else float(num_leaves)
        found[node_id] = x, depth
        return x

    place(children[None][0], 0)
    return found


def _draw_tree(axes: Axes, measured: JSON, colours: dict[str, str]) -> None:
    nodes = {node["id"]: node for node in measured["nodes"]}
    at = places(measured["nodes"])
    for node in nodes.values():
        x, depth = at[node["id"]]
        if node["parent"] is not None:
            parent_x, parent_depth = at[node["parent"]]
            axes.plot([parent_x, x], [-parent_depth, -depth], color="0.6", zorder=1)
            _write_similarities(axes, measured, node, at, colours)
        inside = {group: count for group, count in node["members"].items() if count}
        is_leaf = node["split_in_round"] is None
        lines = [
            "+".join(inside) if len(inside) < len(node["members"]) else "all groups",
            f"{sum(inside.values())} clients, {100 * node['accuracy']:.0f} %",
        ]
        if not is_leaf:
            lines.append(f"split in round {node['split_in_round']}")
        colour = colours[next(iter(inside))] if is_leaf and len(inside) == 1 else "0.4"
        axes.text(
            x,
            -depth,
            "\n".join(lines),
            ha="center",
            va="center",
            fontsize=8,
            zorder=3,
            bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": colour, "linewidth": 2},
        )
    widest, deepest = (max(place[i] for place in at.values()) for i in (0, 1))
    axes.set(xlim=(0.4, widest + 0.6), ylim=(-deepest - 0.35, 0.3))
    axes.set_axis_off()
    axes.set_title(
        "Parameter tree: clients and their accuracy at each node.\n"
        "Numbers at the edges: similarity of each newcomer (in its group's colour) that\n"
        "stood above; it went the way in bold",
        fontsize=9,
    )


def _write_similarities(
    axes: Axes,
    measured: JSON,
    node: JSON,
    at: dict[int, tuple[float, int]],
    colours: dict[str, str],
) -> None:
    """Write each newcomer's similarity to the updates on the edge above a node."""
    (x, depth), (parent_x, _) = at[node["id"]], at[node["parent"]]
    steps = [step for step in measured["routed"] if step["from"] == node["parent"]]
    on_the_left = x < parent_x
    for line, step in enumerate(steps):
        height = -depth + 0.5 + 0.1 * ((len(steps) - 1) / 2 - line)
        along = height + depth  # 0 at the node, 1 at its parent
        beside = x + along * (parent_x - x) + (-0.06 if on_the_left else 0.06)
        axes.text(
            beside,
            height,
            f"{step['similarities'][str(node['id'])]:.2f}".replace("-", "−"),
            color=colours[step["group"]],
            fontsize=8,
            fontweight="bold" if step["to"] == node["id"] else "normal",
            ha="right" if on_the_left else "left",
            va="center",
        )


def _draw_accuracies(axes: Axes, measured: JSON, colours: dict[str, str]) -> None:
    deepest = max(len(client["path"]) for client in measured["clients"])
    named = set()
    for client in measured["clients"]:
        colour, values = colours[client["group"]], [100 * value for value in client["accuracy"]]
        shift = 0.04 * (list(colours).index(client["group"]) - 2)
        steps = np.arange(len(values)) + shift
        axes.plot(
            steps,
            values,
            "o:" if client["is_newcomer"] else "o-",
            color=colour,
            linewidth=1,
            markersize=3,
            label=None if client["group"] in named else f"group {client['group']}",
        )
        axes.plot(deepest + shift, 100 * client["ensemble"], "D", color=colour, markersize=4)
        named.add(client["group"])
    names = ["root", *(f"depth {depth}" for depth in range(1, deepest)), "path\nensemble"]
    axes.set_xticks(range(deepest + 1), names, fontsize=8)
    axes.set(ylabel="accuracy on test data, %", ylim=(0, 100))
    axes.set_title("Every client under every model on its path\n(newcomers dotted)", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _all(outcomes: Outcomes, name: str) -> list[JSON]:
    return [entry for measured in outcomes.of("all") for entry in measured[name]]


def _is_exact(measured: JSON) -> bool:
    """Return whether the leaves are the true groups."""
    leaf_of = {}
    for client in measured["clients"]:
        leaf_of.setdefault(client["group"], set()).add(client["path"][-1])
    leaves = [leaf for leaves in leaf_of.values() for leaf in leaves]
    return len(leaves) == len(set(leaves)) == len(measured["groups"])


def _finds_its_group(client: JSON, measured: JSON) -> bool:
    """Return whether a newcomer ended at the leaf of its group alone."""
    leaf = next(node for node in measured["nodes"] if node["id"] == client["path"][-1])
    return [group for group, count in leaf["members"].items() if count] == [client["group"]]


def _margins(outcomes: Outcomes) -> list[float]:
    """Compute how much more similar the chosen edge was than the other, for every step."""
    margins = []
    for step in _all(outcomes, "routed"):
        chosen = step["similarities"][str(step["to"])]
        others = [s for child, s in step["similarities"].items() if child != str(step["to"])]
        margins.append(chosen - max(others))
    return margins


def claims(outcomes: Outcomes, quick: bool) -> list[Claim]:
    """Judge the tree, the newcomers' ways and the models on the paths."""
    runs = outcomes.of("all")
    exact = [_is_exact(measured) for measured in runs]
    arrived = [
        _finds_its_group(client, measured)
        for measured in runs
        for client in measured["clients"]
        if client["is_newcomer"]
    ]
    clients = _all(outcomes, "clients")
    gains = [after - before for c in clients for before, after in pairwise(c["accuracy"])]
    grows = sum(gain > 0 for gain in gains) / max(1, len(gains))
    last_gains = [c["accuracy"][-1] - c["accuracy"][-2] for c in clients if len(c["path"]) > 1]
    leaf_gains = [client["accuracy"][-1] - client["accuracy"][0] for client in clients]
    leaf, ensemble = (
        [fmean(value(client) for client in measured["clients"]) for measured in runs]
        for value in (lambda client: client["accuracy"][-1], lambda client: client["ensemble"])
    )
    chosen = fmean(client["best"] == len(client["path"]) - 1 for client in clients)
    depth = min(max(len(client["path"]) - 1 for client in m["clients"]) for m in runs)
    margins = _margins(outcomes)
    return [
        Claim(
            "the leaves are the true groups, newcomers included",
            all(exact),
            f"with {sum(exact)} of {len(exact)} seeds",
        ),
        Claim(
            f"the tree is at least {2 if quick else 3} splits deep",
            depth >= (2 if quick else 3),
            f"{depth}",
        ),
        Claim(
            "every newcomer is routed to its group's leaf",
            all(arrived),
            f"{sum(arrived)} of {len(arrived)}",
        ),
        Claim(
            "on its way the chosen edge is more similar by at least 0.1",
            min(margins, default=0.0) >= 0.1,
            f"by {min(margins, default=0.0):.2f} or more in {len(margins)} steps",
        ),
        Claim(
            "accuracy grows with at least 85 % of all steps down the clients' paths",
            grows >= 0.85,
            f"{grows:.1%} of {len(gains)} steps",
        ),
        Claim(
            "and for every client with the last one, to its group's own model",
            min(last_gains, default=0.0) > 0,
            f"by {100 * min(last_gains, default=0.0):.0f} points or more",
        ),
        Claim(
            "every client gains at least 20 points between root and leaf",
            min(leaf_gains) >= 0.2,
            f"{100 * min(leaf_gains):.0f} to {100 * max(leaf_gains):.0f} points",
        ),
        Claim(
            "for at least 90 % of the clients the leaf is best on the path by validation data",
            chosen >= 0.9,
            f"{chosen:.1%}",
        ),
        Claim(
            "the leaf alone is better than the ensemble of the path, with every seed",
            all(a > b for a, b in zip(leaf, ensemble, strict=True)),
            f"{mean_and_spread(leaf, scale=100)} % against {mean_and_spread(ensemble, scale=100)} %",
        ),
    ]


def summary(outcomes: Outcomes) -> str:
    """Describe what we get."""
    runs = outcomes.of("all")

    def mean_of(value: str | int) -> str:
        means = [
            fmean(
                c["ensemble"] if value == "ensemble" else c["accuracy"][value] for c in m["clients"]
            )
            for m in runs
        ]
        return mean_and_spread(means, scale=100)

    arrived = [
        _finds_its_group(client, measured)
        for measured in runs
        for client in measured["clients"]
        if client["is_newcomer"]
    ]
    return (
        f"leaves exact with {sum(map(_is_exact, runs))} of {len(runs)} seeds, "
        f"{sum(arrived)} of {len(arrived)} newcomers at their group's leaf; accuracy: root "
        f"{mean_of(0)} %, leaf {mean_of(-1)} %, path ensemble {mean_of('ensemble')} %"
    )


EXPERIMENT = Experiment(
    name="fig9_tree",
    title="The parameter tree, newcomers on it, and the models on every path",
    paper="newcomers follow the most similar updates to a leaf; ensembles of the path are proposed",
    measure=measure,
    draw=draw,
    claims=claims,
    summary=summary,
    differs="The paper draws a sketch; this is a run.",
    data=("mnist",),
    quick_data=(),
    seeds=range(5),
)

if __name__ == "__main__":
    main(EXPERIMENT)
