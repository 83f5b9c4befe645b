"""The simulated clients: who is there in a round, what they train, and how well they fare."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from fedbranch.checkpoint import JSON
from fedbranch.client import LocalTraining, ModelState, evaluate, local_update, stream_seed
from fedbranch.data import ClientData, Examples
from fedbranch.errors import ClientFailed
from fedbranch.messages import Task, Update
from fedbranch.server import Server
from fedbranch.tree import Node, ParameterTree

__all__ = ["Population", "chosen_device"]


class Population:
    """All clients of a simulation, with one model that they take turns in.

    Parameters
    ----------
    model
        Its present parameters are the initial model. It is not changed.
    clients
        Client id -> data.
    training
        How they train.
    seed
        All randomness follows from it, the round and the client.
    device
        Where they train; see :func:`fedbranch.simulate`.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Mapping[str, ClientData],
        training: LocalTraining,
        *,
        seed: int,
        device: str,
    ) -> None:
        if not isinstance(clients, Mapping):
            raise TypeError(
                f"clients is a {type(clients).__name__}; pass a dict: {{'a': ClientData(...), ...}}"
            )
        for client_id, client in clients.items():
            if not isinstance(client, ClientData):
                raise TypeError(
                    f"client {client_id!r} is a {type(client).__name__}; pass "
                    "ClientData(train=(x, y), test=(x_test, y_test))"
                )
        if not clients:
            raise ValueError("clients is empty; pass at least one client: {'a': ClientData(...)}")
        self.clients = dict(sorted(clients.items()))  # so that their order changes nothing
        self.training = training
        self.seed = seed
        self.model = copy.deepcopy(model).to(chosen_device(device))
        self.initial = ModelState.of(self.model)

    def gather(
        self,
        server: Server,
        this_round: int,
        *,
        participation: float,
        home: Mapping[str, int],
    ) -> list[str]:
        """Let clients leave and join as their time has come, and draw those to be asked.

        Clients that a holding cluster waits for are drawn first. Newcomers stand at their
        home node, or at the root.
        """
        here = {i for i, client in self.clients.items() if client.takes_part(this_round)}
        server.remove([client_id for client_id in server.tree.client_ids if client_id not in here])
        present = sorted(here)
        for client_id in present:
            if client_id not in server.tree:
                server.join([client_id], home.get(client_id, server.tree.root.id))
        num_asked = max(1, round(participation * len(present)))
        if num_asked >= len(present):
            return present
        rng = np.random.default_rng(stream_seed(self.seed, this_round))
        shuffled = [present[row] for row in rng.permutation(len(present))]
        awaited = set(server.awaited)
        shuffled.sort(key=lambda client_id: client_id not in awaited)  # stable
        return sorted(shuffled[:num_asked])

    def updates(self, tasks: Mapping[str, Task], this_round: int) -> dict[str, Update]:
        """Let every client with a task train."""
        updates = {}
        for client_id, task in tasks.items():
            data = self.clients[client_id].train
            seed = stream_seed(self.seed, this_round, client_id)
            with _naming(client_id, data, "trained"):
                updates[client_id] = local_update(
                    self.model, self.initial, task, data, self.training, seed=seed
                )
        return updates

    def evaluation(self, tree: ParameterTree) -> dict[str, dict[str, float | None]]:
        """Measure every client on its held-out data, under the model of its position."""
        evaluation: dict[str, dict[str, float | None]] = {}
        for node in tree:
            self.load(node)
            for client_id in tree.members(node.id):
                test = self.clients[client_id].test
                if test is None:
                    continue
                with _naming(client_id, test, "evaluated"):
                    measured = evaluate(self.model, test, self.training)
                evaluation[client_id] = {
                    name: value if np.isfinite(value) else None for name, value in measured.items()
                }
        return dict(sorted(evaluation.items()))

    def training_loss(self, client_id: str) -> float:
        """Measure the model as it is now on a client's training data."""
        data = self.clients[client_id].train
        with _naming(client_id, data, "evaluated"):
            return evaluate(self.model, data, self.training)["loss"]

    def load(self, node: Node) -> None:
        """Give the model the parameters of a tree node."""
        self.initial.moved_by(node.params, node.buffers).load_into(self.model)

    def model_at(self, node: Node) -> nn.Module:
        """Give a copy of the model at a tree node, in evaluation mode."""
        self.load(node)
        return copy.deepcopy(self.model).eval()

    def describe(self) -> JSON:
        """Say everything that the clients' results depend on."""
        return {
            "seed": self.seed,
            "training": self.training.describe(self.model),
            "num_params": self.initial.params.numel(),
            "initial_model": self.initial.digest(),
            "clients": [
                {
                    "id": client_id,
                    "group": client.group,
                    "num_train": len(client.train.x),
                    "num_test": 0 if client.test is None else len(client.test.x),
                    "data": _digest(client),
                    "joins": client.joins,
                    "leaves": client.leaves,
                }
                for client_id, client in self.clients.items()
            ],
        }


def chosen_device(device: str) -> torch.device:
    """Resolve ``"auto"``: a GPU if there is one."""
    if device != "auto":
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def _naming(client_id: str, data: Examples, what: str) -> Iterator[None]:
    """Say whose model or data raised, and what they were."""
    try:
        yield
    except Exception as error:
        x, y = data
        raise ClientFailed(
            f"client {client_id!r} could not be {what}: {error}; its inputs are {x.dtype} of shape "
            f"{x.shape}, its targets {y.dtype} of shape {y.shape}"
        ) from error


def _digest(client: ClientData) -> str:
    """Name a client's data by a hash of their bytes."""
    digest = hashlib.sha256()
    for examples in (client.train, client.test):
        for array in examples or ():
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()
