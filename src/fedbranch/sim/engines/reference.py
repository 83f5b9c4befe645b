"""The readable engine: one client after the other, as in :mod:`fedbranch.training.client`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from torch import nn

from fedbranch.data import ClientData, Examples, PartName
from fedbranch.errors import ClientFailed
from fedbranch.protocol.tasks import Task, Trial, Update
from fedbranch.training.client import evaluate, local_update, trial_losses
from fedbranch.training.half_split import halves_seed
from fedbranch.training.local_training import LocalTraining
from fedbranch.training.model_state import ModelState
from fedbranch.tree import Node

__all__ = ["Place", "Reference", "memory_of", "naming"]

Place: TypeAlias = Task | Trial | Node  # where a model can be


class Reference:
    """Clients take turns in one model; see :class:`fedbranch.sim.engines.choice.Engine`."""

    name = "reference"

    def __init__(
        self,
        model: nn.Module,
        initial: ModelState,
        clients: Mapping[str, ClientData],
        training: LocalTraining,
        *,
        seed: int = 0,
    ) -> None:
        self._model = model
        self._initial = initial
        self._clients = clients
        self._training = training
        self._seed = seed

    def updates(self, tasks: Mapping[str, Task], seeds: Mapping[str, int]) -> dict[str, Update]:
        """Let every client with a task train."""
        updates = {}
        for client_id, task in tasks.items():
            data = self._clients[client_id].train
            with naming(client_id, data, "trained"):
                updates[client_id] = local_update(
                    self._model,
                    self._initial,
                    task,
                    data,
                    self._training,
                    seed=seeds[client_id],
                    halves_seed=halves_seed(self._seed, client_id),
                )
        return updates

    def losses(self, trials: Mapping[str, Sequence[Trial]]) -> dict[str, tuple[float, ...]]:
        """Measure clients' losses under models that the server wants to try."""
        found = {}
        for client_id, own in trials.items():
            client = self._clients[client_id]
            with naming(client_id, client.held_out or client.train, "evaluated"):
                losses = trial_losses(
                    self._model,
                    self._initial,
                    own,
                    client.train,
                    client.held_out,
                    self._training,
                    halves_seed=halves_seed(self._seed, client_id),
                )
            if losses is not None:
                found[client_id] = losses
        return found

    def measure(self, at: Mapping[str, Node], part: PartName) -> dict[str, dict[str, float]]:
        """Measure clients on their data, each under the model of a node."""
        measured = {}
        loaded: Node | None = None
        for client_id, node in sorted(at.items(), key=lambda place: place[1].id):
            data = getattr(self._clients[client_id], part)
            if data is None:
                continue
            if node is not loaded:
                self._initial.moved_by(node.params, node.buffers).load_into(self._model)
                loaded = node
            with naming(client_id, data, "evaluated"):
                measured[client_id] = evaluate(self._model, data, self._training)
        return measured

    def close(self) -> None:
        """Nothing is left behind."""


def memory_of(place: Place) -> tuple[int, int]:
    """Say where a place's numbers are, for as long as they are: the same memory, the same model."""
    params, buffers = (
        int(vector.__array_interface__["data"][0]) for vector in (place.params, place.buffers)
    )
    return params, buffers


@contextmanager
def naming(client_id: str, data: Examples, what: str) -> Iterator[None]:
    """Say whose model or data raised, and what they were."""
    try:
        yield
    except Exception as error:
        x, y = data
        raise ClientFailed(
            f"client {client_id!r} could not be {what}: {error}; its inputs are {x.dtype} of shape "
            f"{x.shape}, its targets {y.dtype} of shape {y.shape}"
        ) from error
