"""Clients without data for checks of rules: each pulls towards an optimum of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedbranch.protocol.tasks import Task, Trial, Update
from fedbranch.training.seeds import stream_seed
from fedbranch.types import Vector

__all__ = ["NUM_PARAMS", "QuadraticClients"]

NUM_PARAMS = 24
NUM_GROUPS, NUM_CLIENTS = 2, 14
NEWCOMERS_FROM = 16  # round in which the last clients join
NOISE = 0.3


class QuadraticClients:
    """Clients with loss ½‖θ − optimum‖², in two groups whose optima lie far apart.

    A round has noise, so updates differ from round to round. In each round some clients are
    absent. Some join late, and one cannot train on halves.

    Attributes
    ----------
    ids
        All client ids.
    """

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        centers = 5 * np.linalg.qr(rng.normal(size=(NUM_PARAMS, NUM_PARAMS)))[0][:NUM_GROUPS]
        self.ids = [f"client-{n:02}" for n in range(NUM_CLIENTS)]
        self._optimum = {
            client_id: centers[n % NUM_GROUPS] + 0.1 * rng.normal(size=NUM_PARAMS)
            for n, client_id in enumerate(self.ids)
        }

    def present(self, number: int) -> list[str]:
        """Return the clients that can be asked in a round."""
        there = self.ids if number >= NEWCOMERS_FROM else self.ids[:-2]
        return [i for n, i in enumerate(there) if (n + number) % 6]

    def update(self, client_id: str, task: Task, number: int) -> Update:
        """Return the reply of a client: half of the way to its optimum, with noise."""
        rng = np.random.default_rng(stream_seed(number, client_id))
        step = 0.5 * (self._optimum[client_id] - task.params)
        first, second = (
            (step + NOISE * rng.normal(size=NUM_PARAMS)).astype(np.float32) for _ in range(2)
        )
        half: Vector | None = None
        if task.halves is not None and client_id != self.ids[2]:
            half = (first - second) / 2
        loss = float((step**2).sum())
        vector: Vector = (first + second) / 2
        return Update(
            vector, num_examples=10, metrics={"loss": loss}, base=task.base, half_difference=half
        )

    def losses(self, client_id: str, trials: Sequence[Trial]) -> list[float]:
        """Return the losses of a client under the models of its trials."""
        return [float(((self._optimum[client_id] - t.params) ** 2).sum()) / 2 for t in trials]
