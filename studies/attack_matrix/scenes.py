"""The clients of each cell of the matrix: how many attack, and how many groups there are."""

from __future__ import annotations

from dataclasses import dataclass

import fedbranch as fb
from fedbranch.data import Relabel, Transform, digits, label_swaps

__all__ = ["NUM_CLIENTS", "Cell", "Scene", "federation"]

NUM_CLIENTS = 20


@dataclass(frozen=True)
class Scene:
    """The clients of a run: the share of attackers, the honest groups, and a seed."""

    percent: int
    num_groups: int
    seed: int

    @property
    def num_attackers(self) -> int:
        """The number of clients that attack."""
        return NUM_CLIENTS * self.percent // 100


@dataclass(frozen=True)
class Cell(Scene):
    """A cell of the matrix: a scene and the name of an attack."""

    attack: str

    @property
    def scene(self) -> Scene:
        """The scene alone."""
        return Scene(self.percent, self.num_groups, self.seed)


def federation(scene: Scene) -> tuple[dict[str, fb.ClientData], dict[str, fb.ClientData]]:
    """Make the honest clients and the attackers, which have the last ids."""
    x, y = digits()
    groups: list[Transform] = [Relabel(tuple(range(10)))]
    if scene.num_groups > 1:
        groups = [*label_swaps(scene.num_groups, seed=scene.seed)]
    num_honest = NUM_CLIENTS - scene.num_attackers
    clients = fb.federate(
        x,
        y,
        num_clients=NUM_CLIENTS,
        groups=groups,
        # Equally many of each group among honest clients, and among attackers.
        group_of=[
            i % scene.num_groups if i < num_honest else (i - num_honest) % scene.num_groups
            for i in range(NUM_CLIENTS)
        ],
        validation_fraction=0.1,
        seed=scene.seed,
    )
    honest = dict(list(clients.items())[:num_honest])
    hostile = {
        f"hostile-{i:02d}": clients[f"client-{i:02d}"] for i in range(num_honest, NUM_CLIENTS)
    }
    return honest, hostile
