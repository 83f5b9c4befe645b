"""The methods of the matrix, and training with them in one scene."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import fedbranch as fb
from fedbranch.core.geometry import weighted_mean
from fedbranch.core.robust import multi_krum, trimmed_mean
from fedbranch.sim import mlp
from fedbranch.types import JSON
from studies.attack_matrix.attackers import ATTACKS, Attackers
from studies.attack_matrix.lies import Deceived
from studies.attack_matrix.outcome import Positions, backdoor_success, outcome
from studies.attack_matrix.scenes import NUM_CLIENTS, Cell, Scene, federation

__all__ = [
    "CFL",
    "FEDAVG",
    "KRUM",
    "LIED_TO",
    "METHODS",
    "TRIMMED",
    "trained",
    "under_attack",
    "without_attackers",
]

ROUNDS = 25
TRAINING = fb.LocalTraining(optimizer=fb.sgd(0.4), epochs=3, batch_size=33)

CFL, LIED_TO = "CFL", "CFL, lied to"
FEDAVG, TRIMMED, KRUM = "FedAvg", "trimmed mean", "Multi-Krum"
METHODS = (CFL, LIED_TO, FEDAVG, TRIMMED, KRUM)


def without_attackers(scene: Scene) -> JSON:
    """Train the honest clients alone."""
    honest, _ = federation(scene)
    run, positions = trained(scene, honest, rule=fb.AutoRule())
    return {"scene": asdict(scene), **outcome(run, positions, honest, set())}


def under_attack(cell: Cell, methods: Sequence[str] = METHODS) -> JSON:
    """Train honest clients and attackers together, with each method."""
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


def trained(
    scene: Scene,
    clients: Mapping[str, fb.ClientData],
    *,
    rule: fb.Rule,
    **settings: Any,
) -> tuple[fb.Run, list[Positions]]:
    """Train, and return the run and all positions after each round."""
    watched = _Watched()
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
        before_round=watched,
        **settings,
    )
    return run, watched.after_each_round(run)


class _Watched:
    """Notes all positions before each round of a run, as its ``before_round``."""

    def __init__(self) -> None:
        self.positions: list[Positions] = []

    def __call__(self, server: fb.Server, _population: object, _asked: object) -> None:
        self.positions.append({i: server.tree.position(i) for i in server.tree.client_ids})

    def after_each_round(self, run: fb.Run) -> list[Positions]:
        return [*self.positions[1:], {i: run.tree.position(i) for i in run.tree.client_ids}]


def _settings(method: str, attackers: frozenset[str]) -> JSON:
    if method in (CFL, LIED_TO):
        return {"rule": Deceived(liars=attackers if method == LIED_TO else frozenset())}
    aggregate = {
        FEDAVG: weighted_mean,
        TRIMMED: trimmed_mean(len(attackers) / NUM_CLIENTS),
        KRUM: multi_krum(len(attackers)),
    }[method]
    return {"rule": fb.NeverSplit(), "aggregate": aggregate, "guard": None}
