"""Clients of a tiny task for checks of drivers, as every kind of driver needs them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from fedbranch.data import ClientData
from fedbranch.protocol.tasks import Task, Trial, Update
from fedbranch.training.client import local_update, trial_losses
from fedbranch.training.half_split import halves_seed
from fedbranch.training.local_training import LocalTraining, sgd
from fedbranch.training.model_state import ModelState
from fedbranch.training.seeds import stream_seed

__all__ = ["TinyClients"]

NUM_INPUTS, NUM_HIDDEN, NUM_CLASSES = 3, 8, 2
NUM_TEST = 20


class TinyClients:
    """A few clients with points on two sides of a line; every second client swaps the labels.

    A driver takes what it needs. A simulator takes ``model``, ``data``, ``training`` and
    ``seed``. A loop over a :class:`fedbranch.Server` asks :meth:`present`, :meth:`update` and
    :meth:`losses`.

    Parameters
    ----------
    num_clients
        Number of clients.
    has_buffers
        Whether the model has BatchNorm statistics.
    joins, leaves
        Client id -> the first round in which it takes part, and the first in which it no longer
        does.
    broken
        Ids of clients whose updates are not finite, because of an infinite number in their data.

    Attributes
    ----------
    ids
        All client ids. They are called as nodes of Flower's simulation engine are.
    model, training, seed
        The initial model, how clients train, and the seed of the run.
    data
        Client id -> data, with the rounds in which the client joins and leaves.
    """

    def __init__(
        self,
        num_clients: int = 6,
        *,
        has_buffers: bool = False,
        joins: Mapping[str, int] | None = None,
        leaves: Mapping[str, int] | None = None,
        broken: Collection[str] = (),
    ) -> None:
        joins, leaves = joins or {}, leaves or {}
        self.ids = [f"partition-{n:04}" for n in range(num_clients)]
        self.seed = 3
        self.training = LocalTraining(optimizer=sgd(0.3), epochs=2, batch_size=10)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            normalised = [nn.BatchNorm1d(NUM_HIDDEN)] if has_buffers else []
            self.model = nn.Sequential(
                nn.Linear(NUM_INPUTS, NUM_HIDDEN),
                *normalised,
                nn.ReLU(),
                nn.Linear(NUM_HIDDEN, NUM_CLASSES),
            )
        self._initial = ModelState.of(self.model)
        self.data: dict[str, ClientData] = {}
        for n, client_id in enumerate(self.ids):
            rng = np.random.default_rng(n)
            x = rng.normal(size=(60 + 3 * n, NUM_INPUTS)).astype(np.float32)
            y = ((x[:, 0] > 0) ^ (n % 2 == 1)).astype(np.int64)
            if client_id in broken:
                x[0] = np.inf
            self.data[client_id] = ClientData(
                (x[:-NUM_TEST], y[:-NUM_TEST]),
                (x[-NUM_TEST:], y[-NUM_TEST:]),
                joins=joins.get(client_id, 1),
                leaves=leaves.get(client_id),
            )

    @property
    def num_params(self) -> int:
        """Length of an update."""
        return self._initial.params.numel()

    @property
    def num_buffers(self) -> int:
        """Length of a reply's buffers."""
        return self._initial.buffers.numel()

    def present(self, number: int) -> list[str]:
        """Return the ids of the clients that take part in a round; ask all of them."""
        return [i for i, client in self.data.items() if client.takes_part(number)]

    def update(self, client_id: str, task: Task, number: int) -> Update:
        """Train a client for its task in a round, on halves if the task asks for them."""
        return local_update(
            copy.deepcopy(self.model),
            self._initial,
            task,
            self.data[client_id].train,
            self.training,
            seed=stream_seed(self.seed, number, client_id),
            halves_seed=halves_seed(self.seed, client_id),
        )

    def losses(self, client_id: str, trials: Sequence[Trial]) -> tuple[float, ...] | None:
        """Measure a client's loss under each model; None if it lacks the examples."""
        client = self.data[client_id]
        return trial_losses(
            copy.deepcopy(self.model),
            self._initial,
            trials,
            client.train,
            client.held_out,
            self.training,
            halves_seed=halves_seed(self.seed, client_id),
        )
