"""The reference engine: one client after the other, by :mod:`fedbranch.training.client`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from fedbranch.data import ClientData, Examples, PartName
from fedbranch.errors import ClientFailed
from fedbranch.protocol.tasks import Task, Trial, Update
from fedbranch.training.client import evaluate, local_update, trial_losses
from fedbranch.training.half_split import halves_seed
from fedbranch.training.local_training import LocalTraining
from fedbranch.training.model_state import ModelState
from fedbranch.tree import Node

__all__ = ["Reference", "naming_client"]


class Reference:
    """Trains clients in turn, in one model; see :class:`fedbranch.sim.engines.engine.Engine`."""

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
        """Train every client that has a task."""
        updates = {}
        for client_id, task in tasks.items():
            data = self._clients[client_id].train
            with naming_client(client_id, data, "trained"):
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
            with naming_client(client_id, client.held_out or client.train, "evaluated"):
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
        """Measure clients on a part of their data, each under the model of a node."""
        measured = {}
        loaded: Node | None = None
        for client_id, node in sorted(at.items(), key=lambda pair: pair[1].id):
            data = getattr(self._clients[client_id], part)
            if data is None:
                continue
            if node is not loaded:
                self._initial.moved_by(node.params, node.buffers).load_into(self._model)
                loaded = node
            with naming_client(client_id, data, "evaluated"):
                measured[client_id] = evaluate(self._model, data, self._training)
        return measured

    def close(self) -> None:
        """Return at once: there are no processes to end."""


@contextmanager
def naming_client(client_id: str, data: Examples, what: str) -> Iterator[None]:
    """Turn any error into one that names the client, and the kind and shape of its examples.

    Parameters
    ----------
    client_id, data
        The client, and the examples in use.
    what
        What was tried, as a participle: ``"trained"`` or ``"evaluated"``.

    Raises
    ------
    ClientFailed
        For any exception inside the context.
    """
    try:
        yield
    except Exception as error:
        x, y = data
        raise ClientFailed(
            f"client {client_id!r} could not be {what}: {error}; its inputs are {x.dtype} of shape "
            f"{x.shape}, its targets {y.dtype} of shape {y.shape}"
        ) from error
