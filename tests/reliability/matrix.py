"""The attack matrix: what every attack comes to, with CFL and without.

    python -m tests.reliability.matrix [--quick] [--jobs 2] [--attacks NAME ...] [--out FILE]

20 clients, of which 10, 25 or 40 % attack, hold the embedded digits. The honest ones are of 1,
2 or 4 groups, each of which, if there are several, has swapped two labels; attackers come from
all groups. A small MLP, 25 rounds, 3 seeds. The methods:

- CFL: the default rule and guard, told nothing; also if the attackers lie about losses.
- FedAvg, trimmed mean and Multi-Krum: one model for all, without a guard, aggregated in that way;
  the latter two are told how many attack.
- CFL without the attackers, on the same honest clients: what all others are compared with.

Prints a Markdown table; ``--out`` takes every number, as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

import fedbranch as fb
from fedbranch.core.geometry import weighted_mean
from fedbranch.core.robust import multi_krum, trimmed_mean
from fedbranch.data import Relabel, digits, label_swaps
from fedbranch.sim import Run, mlp

from .attacks import ATTACKS, TRIGGER_LABEL, Attackers, Deceived, triggered

NUM_CLIENTS = 20
ROUNDS = 25
TRAINING = fb.LocalTraining(optimizer=fb.sgd(0.4), epochs=3, batch_size=33)
PERCENTS = (10, 25, 40)
NUMS_OF_GROUPS = (1, 2, 4)
SEEDS = (0, 1, 2)

CFL, LIED_TO = "CFL", "CFL, lied to"
FEDAVG, TRIMMED, KRUM = "FedAvg", "trimmed mean", "Multi-Krum"
METHODS = (CFL, LIED_TO, FEDAVG, TRIMMED, KRUM)

JSON = dict[str, Any]


@dataclass(frozen=True)
class Scene:
    """Who takes part."""

    percent: int
    num_groups: int
    seed: int

    @property
    def num_attackers(self) -> int:
        """How many of the clients attack."""
        return NUM_CLIENTS * self.percent // 100


@dataclass(frozen=True)
class Cell(Scene):
    """A cell of the matrix: a scene, and what the attackers do."""

    attack: str

    @property
    def scene(self) -> Scene:
        """Who takes part."""
        return Scene(self.percent, self.num_groups, self.seed)


def federation(scene: Scene) -> tuple[dict[str, fb.ClientData], dict[str, fb.ClientData]]:
    """Make the honest clients, and those who will attack, whose ids come last."""
    x, y = digits()
    groups = [Relabel(tuple(range(10)))]
    if scene.num_groups > 1:
        groups = label_swaps(scene.num_groups, seed=scene.seed)
    num_honest = NUM_CLIENTS - scene.num_attackers
    clients = fb.federate(
        x,
        y,
        num_clients=NUM_CLIENTS,
        groups=groups,
        # So that there are equally many of each group among both.
        group_of=[
            i % scene.num_groups if i < num_honest else (i - num_honest) % scene.num_groups
            for i in range(NUM_CLIENTS)
        ],
        validation_fraction=0.1,
        seed=scene.seed,
    )
    honest = dict(list(clients.items())[:num_honest])
    hostile = {f"hostile-{i:02d}": clients[f"client-{i:02d}"] for i in range(num_honest, 20)}
    return honest, hostile


class Watched:
    """Where clients stand after every round of a run, for its ``before_round``."""

    def __init__(self) -> None:
        self.positions: list[dict[str, int]] = []  # before each round

    def __call__(self, server: fb.Server, _population: object, _asked: object) -> None:
        """Note it."""
        self.positions.append({i: server.tree.position(i) for i in server.tree.client_ids})

    def after_each_round(self, run: Run) -> list[dict[str, int]]:
        """Client id -> node, after each round."""
        return [*self.positions[1:], {i: run.tree.position(i) for i in run.tree.client_ids}]


def trained(
    scene: Scene,
    clients: Mapping[str, fb.ClientData],
    *,
    rule: fb.Rule,
    has_guard: bool = True,
    **settings: Any,
) -> tuple[Run, list[dict[str, int]]]:
    """Train, and say where clients stood after every round."""

    def start(server: fb.Server) -> dict[str, int]:
        if not has_guard:
            server.options = replace(server.options, guard=None)
        return {}

    watched = Watched()
    run = fb.simulate(
        mlp((1, 8, 8), 10, hidden=[32], seed=scene.seed),
        clients,
        rule=rule,
        rounds=ROUNDS,
        training=TRAINING,
        seed=scene.seed,
        evaluate_every=ROUNDS,
        device="cpu",
        engine="vectorised",
        start=start,
        before_round=watched,
        **settings,
    )
    return run, watched.after_each_round(run)


def without_attackers(scene: Scene) -> JSON:
    """Train the honest clients alone."""
    honest, _ = federation(scene)
    run, positions = trained(scene, honest, rule=fb.AutoRule())
    return {"scene": asdict(scene), **outcome(run, positions, honest, set())}


def under_attack(cell: Cell, methods: Sequence[str] = METHODS) -> JSON:
    """Train with all methods."""
    honest, hostile = federation(cell.scene)
    attack = ATTACKS[cell.attack]
    if attack.on_data is not None:
        hostile = {i: attack.on_data(client) for i, client in hostile.items()}
    measured: JSON = {}
    for method in methods:
        run, positions = trained(
            cell.scene,
            honest | hostile,
            before_send=Attackers(attack, hostile, seed=cell.seed),
            **_settings(method, frozenset(hostile)),
        )
        measured[method] = outcome(run, positions, honest, set(hostile))
        if cell.attack == "backdoor":
            measured[method]["backdoor_success"] = backdoor_success(run, honest)
    return {"cell": asdict(cell), "methods": measured}


def _settings(method: str, attackers: frozenset[str]) -> JSON:
    if method in (CFL, LIED_TO):
        return {"rule": Deceived(liars=attackers if method == LIED_TO else frozenset())}
    aggregate = {
        FEDAVG: weighted_mean,
        TRIMMED: trimmed_mean(len(attackers) / NUM_CLIENTS),
        KRUM: multi_krum(len(attackers)),
    }[method]
    return {"rule": fb.NeverSplit(), "aggregate": aggregate, "has_guard": False}


def outcome(
    run: Run,
    positions: Sequence[Mapping[str, int]],
    honest: Mapping[str, fb.ClientData],
    attackers: set[str],
) -> JSON:
    """Say how the honest clients fare, and who was kept away from whom.

    Parameters
    ----------
    run
        The run.
    positions
        Client id -> node, after each of its rounds.
    honest
        The honest clients.
    attackers
        The ids of the others.

    Returns
    -------
    JSON
        ``accuracy`` and ``worst_accuracy`` of honest clients under their models. ``recall``:
        the share of attackers that are out at the end: in clusters without honest clients, or
        their last reply was refused. ``precision``: of all clients that were refused last, or
        are outside the main clusters of the honest groups, the share that attacks.
        ``out_by``: the first round in which every attacker had been out. ``share_out``: the
        share of attackers' rounds in which they were. ``num_honest_refused``: how many
        replies of honest clients were refused. None is for what there is not.
    """
    is_refused: dict[str, bool] = {}
    first_out: dict[str, int] = {}
    num_out = num_honest_refused = 0
    for entry, where in zip(run.history, positions, strict=True):
        record = entry.record
        is_refused |= dict.fromkeys(record.metrics, False) | dict.fromkeys(record.refused, True)
        num_honest_refused += len(record.refused.keys() & honest.keys())
        with_honest = {where[i] for i in honest}
        out = {i for i in attackers if is_refused.get(i) or where[i] not in with_honest}
        num_out += len(out)
        for client_id in out:
            first_out.setdefault(client_id, record.round)
    main_clusters = set()
    for group in {client.group for client in honest.values()}:
        places = [where[i] for i in sorted(honest) if honest[i].group == group]
        main_clusters.add(max(sorted(set(places)), key=places.count))
    singled_out = [i for i in where if is_refused.get(i) or where[i] not in main_clusters]
    accuracies = [run.evaluation[i]["accuracy"] for i in honest]
    return {
        "accuracy": fmean(accuracies),
        "worst_accuracy": min(accuracies),
        "clusters": sorted(map(len, run.clusters.values()), reverse=True),
        "split_in_rounds": [s.round for e in run.history for s in e.record.splits],
        "recall": len(out) / len(attackers) if attackers else None,
        "precision": fmean(i in attackers for i in singled_out) if singled_out else None,
        "out_by": max(first_out.values())
        if attackers and len(first_out) == len(attackers)
        else None,
        "share_out": num_out / len(attackers) / len(run.history) if attackers else None,
        "num_honest_refused": num_honest_refused,
        "reasons": sorted(
            {
                f"{client_id.split('-')[0]}: {reason}"
                for entry in run.history
                for client_id, reason in entry.record.refused.items()
            }
        )[:5],
    }


def backdoor_success(run: Run, honest: Mapping[str, fb.ClientData]) -> float:
    """Measure how often honest clients' models give images with the trigger the wanted label."""
    shares = []
    for client_id, client in honest.items():
        assert client.test is not None
        others = client.test.y != TRIGGER_LABEL
        images = torch.from_numpy(triggered(client.test.x[others]))
        with torch.no_grad():
            labels = run.model(client_id)(images).argmax(dim=1).numpy()
        shares.append(float(np.mean(labels == TRIGGER_LABEL)))
    return fmean(shares)


# All cells


def run_matrix(
    *,
    attacks: Iterable[str] = tuple(ATTACKS),
    percents: Iterable[int] = PERCENTS,
    nums_of_groups: Iterable[int] = NUMS_OF_GROUPS,
    seeds: Iterable[int] = SEEDS,
    methods: Sequence[str] = METHODS,
    jobs: int = 1,
) -> list[JSON]:
    """Run all cells; with the accuracy lost against the run without attackers, in points."""
    scenes = [Scene(*which) for which in product(percents, nums_of_groups, seeds)]
    cells = [
        Cell(scene.percent, scene.num_groups, scene.seed, attack)
        for attack in attacks
        for scene in scenes
    ]
    began = time.monotonic()
    results: dict[Scene, JSON] = {}

    def note(scene: Scene, result: JSON) -> None:
        results[scene] = result
        if sys.stderr.isatty():
            seconds = time.monotonic() - began
            print(
                f"\r{len(results)}/{len(scenes) + len(cells)} {seconds:.0f} s",
                end="",
                file=sys.stderr,
            )

    if jobs == 1:
        _one_thread()
        for scene in scenes:
            note(scene, without_attackers(scene))
        for cell in cells:
            note(cell, under_attack(cell, methods))
    else:
        context = get_context("spawn")  # torch may have threads already
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_one_thread) as pool:
            futures = {pool.submit(without_attackers, scene): scene for scene in scenes}
            futures |= {pool.submit(under_attack, cell, methods): cell for cell in cells}
            for future in as_completed(futures):
                note(futures[future], future.result())
    for cell in cells:
        alone = results[cell.scene]
        results[cell]["attack_free"] = alone
        for measured in results[cell]["methods"].values():
            measured["points_lost"] = 100 * (alone["accuracy"] - measured["accuracy"])
    return [results[cell] for cell in cells]


def _one_thread() -> None:
    torch.set_num_threads(1)


def values(results: Iterable[JSON], method: str, name: str, **where: Any) -> list[Any]:
    """Collect a measure over cells, such as those with ``attack="mimic"``."""
    return [
        result["methods"][method].get(name)
        for result in results
        if method in result["methods"]
        and all(result["cell"][key] == value for key, value in where.items())
    ]


def table(results: Sequence[JSON]) -> str:
    """Lay out what came of every attack and share, over groups and seeds."""
    others = [m for m in METHODS if m != CFL and values(results, m, "accuracy")]
    names = ["attack", "%", "CFL loses", "precision", "recall", "out by round", "rounds out"]
    names += [f"{method} loses" for method in others]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for attack, percent in dict.fromkeys(
        (result["cell"]["attack"], result["cell"]["percent"]) for result in results
    ):
        where = {"attack": attack, "percent": percent}
        cells = [
            ATTACKS[attack].title,
            str(percent),
            _lost(values(results, CFL, "points_lost", **where)),
            _least(values(results, CFL, "precision", **where)),
            _least(values(results, CFL, "recall", **where)),
            _last(values(results, CFL, "out_by", **where)),
            _least(values(results, CFL, "share_out", **where)),
            *(_lost(values(results, method, "points_lost", **where)) for method in others),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    triggered_by = {
        method: values(results, method, "backdoor_success", attack="backdoor") for method in METHODS
    }
    told = ", ".join(f"{m} {fmean(v):.0%}" for m, v in triggered_by.items() if v)
    return "\n".join(
        [
            "Points of accuracy that honest clients lose against CFL without attackers: mean (worst).",
            "Precision, recall and the share of rounds in which attackers were out: mean (worst).",
            "The round by which all attackers had been out: latest (in how many runs).",
            "",
            *lines,
            *(["", f"The backdoor's trigger works in so many cases: {told}."] if told else []),
        ]
    )


def _lost(points: Sequence[float]) -> str:
    return f"{fmean(points):.1f} ({max(points):.1f})" if points else ""


def _least(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return f"{fmean(known):.2f} ({min(known):.2f})" if known else "–"


def _last(rounds: Sequence[int | None]) -> str:
    known = [number for number in rounds if number is not None]
    return f"{max(known)} ({len(known)}/{len(rounds)})" if known else f"– (0/{len(rounds)})"


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="one seed, 25 %% attack, 1 and 2 groups"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--percents", nargs="+", type=int, default=PERCENTS)
    parser.add_argument("--groups", nargs="+", type=int, default=NUMS_OF_GROUPS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path, help="where to write all numbers, as JSON")
    chosen = parser.parse_args()
    began = time.monotonic()
    results = run_matrix(
        attacks=chosen.attacks,
        percents=(25,) if chosen.quick else chosen.percents,
        nums_of_groups=(1, 2) if chosen.quick else chosen.groups,
        seeds=(0,) if chosen.quick else chosen.seeds,
        methods=chosen.methods,
        jobs=chosen.jobs,
    )
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(table(results))
    print(f"{len(results)} cells in {math.ceil(time.monotonic() - began)} s", file=sys.stderr)


if __name__ == "__main__":
    main()
