"""Small models, clients, tasks and trials on which engines are compared with the reference."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbranch.data import ClientData, Examples, PartName
from fedbranch.protocol.tasks import Task, Trial, TrialRows, Update
from fedbranch.training.client import evaluate, local_update, trial_losses
from fedbranch.training.half_split import halves_seed
from fedbranch.training.local_training import LocalTraining
from fedbranch.training.model_state import ModelState
from fedbranch.tree import Node, read_only

__all__ = ["SEED", "Problem", "problems"]

SEED = 13  # of the run
SIZES = (3, 4, 5, 11, 21, 30, 30, 8, 41, 2)  # examples; fewer than four have no halves
NUM_INPUTS, NUM_HIDDEN, NUM_CLASSES = 6, 8, 3
HALVES = (None, 5, 6)
KINDS: tuple[tuple[TrialRows, int | None], ...] = (
    ("held-out", None),
    ("second half", 5),
    ("first half", 6),
    ("held-out", None),
)


@dataclass(frozen=True, eq=False)
class Problem:
    """A model, clients, and everything that an engine is asked for.

    Attributes
    ----------
    model, initial, clients, training
        As an engine's constructor takes them.
    tasks, seeds
        For ``updates``: tasks at two nodes, on all examples and on halves.
    trials
        For ``losses``: one to four for each client, on held-out examples and on halves.
    nodes
        For ``measure``.
    """

    model: nn.Module
    initial: ModelState
    clients: Mapping[str, ClientData]
    training: LocalTraining
    tasks: Mapping[str, Task]
    seeds: Mapping[str, int]
    trials: Mapping[str, tuple[Trial, ...]]
    nodes: Mapping[str, Node]

    def expected_update(self, client_id: str) -> Update:
        """Return the reply that the client computes alone."""
        return local_update(
            copy.deepcopy(self.model),
            self.initial,
            self.tasks[client_id],
            self._copied(client_id, "train"),
            self.training,
            seed=self.seeds[client_id],
            halves_seed=halves_seed(SEED, client_id),
        )

    def expected_losses(self, client_id: str) -> tuple[float, ...] | None:
        """Return the losses that the client measures alone; None if it lacks examples."""
        client = self.clients[client_id]
        return trial_losses(
            copy.deepcopy(self.model),
            self.initial,
            self.trials[client_id],
            client.train,
            client.held_out,
            self.training,
            halves_seed=halves_seed(SEED, client_id),
        )

    def expected_measures(self, client_id: str, part: PartName) -> dict[str, float] | None:
        """Return what the client measures alone; None if it lacks examples."""
        data = getattr(self.clients[client_id], part)
        if data is None:
            return None
        node, model = self.nodes[client_id], copy.deepcopy(self.model)
        self.initial.moved_by(node.params, node.buffers).load_into(model)
        return evaluate(model, data, self.training)

    def _copied(self, client_id: str, part: PartName) -> Examples:
        examples: Examples = getattr(self.clients[client_id], part)
        return Examples(*(array.copy() for array in examples))

    def digests(self) -> dict[str, str]:
        """Hash everything that an engine must not change, by name."""
        found = {"initial": self.initial.digest()}
        for client_id, client in self.clients.items():
            for part in ("train", "test", "validation"):
                for array in getattr(client, part) or ():
                    key = f"{part} examples of {client_id}"
                    found[key] = found.get(key, "") + _digest(array)
            task, node = self.tasks[client_id], self.nodes[client_id]
            trials = self.trials[client_id]
            found[f"task of {client_id}"] = _digest(task.params) + _digest(task.buffers)
            found[f"node of {client_id}"] = _digest(node.params) + _digest(node.buffers)
            found[f"trials of {client_id}"] = "".join(_digest(one.params) for one in trials)
        return found

    @property
    def failing_id(self) -> str:
        """The client that :meth:`with_bad_label` and :meth:`diverging` change."""
        return list(self.clients)[4]

    def with_bad_label(self, label: int) -> Problem:
        """Return the problem with a label in the middle of one client's examples that is no class."""
        client = self.clients[self.failing_id]
        y = client.train.y.copy()
        y[len(y) // 2] = label
        return self._with_train(client.train.x, y)

    def diverging(self) -> Problem:
        """Return the problem with an input in the middle of one client's examples that is infinite."""
        client = self.clients[self.failing_id]
        x = client.train.x.copy()
        x[len(x) // 2] = np.inf
        return self._with_train(x, client.train.y)

    def _with_train(self, x: NDArray[Any], y: NDArray[Any]) -> Problem:
        client = self.clients[self.failing_id]
        changed = ClientData((x, y), client.test, validation=client.validation)
        return replace(self, clients={**self.clients, self.failing_id: changed})


class _Standardised(nn.Module):
    """Scales its inputs in place, as careless models do."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


def problems() -> dict[str, Problem]:
    """Make all problems, by name, on the CPU."""
    sgd = LocalTraining(epochs=2, batch_size=10, metrics={"share_right": _share_right})
    few_steps = LocalTraining(steps=7, batch_size=4)
    return {
        "mlp": _problem([], sgd),
        "signal": _problem([], replace(sgd, send_gradient=True)),
        "dropout": _problem([nn.Dropout(0.3)], few_steps),
        "buffers": _problem([nn.BatchNorm1d(NUM_HIDDEN)], sgd),
        "writes inputs": _problem([], sgd, before=[_Standardised()]),
    }


def _share_right(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == targets).float().mean()


def _problem(
    between: list[nn.Module],
    training: LocalTraining,
    *,
    before: list[nn.Module] | None = None,
) -> Problem:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(before or []),
            nn.Linear(NUM_INPUTS, NUM_HIDDEN),
            *between,
            nn.ReLU(),
            nn.Linear(NUM_HIDDEN, NUM_CLASSES),
        )
    initial = ModelState.of(model)
    clients = _clients()
    rng = np.random.default_rng(1)
    nodes = [
        Node(
            id=number,
            parent_id=None,
            params=(0.05 * rng.normal(size=initial.params.numel())).astype(np.float32),
            buffers=np.full(initial.buffers.numel(), 0.1 * number, dtype=np.float32),
            born_in_round=0,
        )
        for number in range(2)
    ]
    places = {client_id: nodes[number % 2] for number, client_id in enumerate(clients)}
    tasks = {
        client_id: Task(
            node_id=node.id,
            params=read_only(node.params),
            buffers=read_only(node.buffers),
            base=f"{node.id}.0",
            purpose="train",
            halves=HALVES[number % 3],
        )
        for number, (client_id, node) in enumerate(places.items())
    }
    trials = {
        client_id: tuple(
            Trial(
                params=read_only(nodes[(number + k) % 2].params),
                buffers=read_only(nodes[(number + k) % 2].buffers),
                on=on,
                halves=halves,
            )
            for k, (on, halves) in enumerate(KINDS[: number % 4 + 1])
        )
        for number, client_id in enumerate(clients)
    }
    seeds = {client_id: 7 + number for number, client_id in enumerate(clients)}
    return Problem(model, initial, clients, training, tasks, seeds, trials, places)


def _clients() -> dict[str, ClientData]:
    """Make clients of many sizes that hold out examples in every possible way."""
    rng = np.random.default_rng(0)

    def examples(num_rows: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        x = rng.normal(size=(num_rows, NUM_INPUTS)).astype(np.float32)
        return x, rng.integers(0, NUM_CLASSES, num_rows)

    clients = {}
    for number, size in enumerate(SIZES):
        train, test, validation = examples(size), examples(size // 2 + 1), examples(7)
        clients[f"c{number}"] = [
            ClientData(train, test),
            ClientData(train, test, validation=validation),
            ClientData(train, validation=validation),
            ClientData(train),
        ][number // 2 % 4]
    return clients


def _digest(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
