"""A finished simulation: its clusters, and the models on every client's path."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from torch import nn

from fedbranch.runs import Evaluation, Round, RunFolder, mean_by_metric
from fedbranch.server.server import Server
from fedbranch.sim.clients import SimulatedClients, only_finite
from fedbranch.sim.engines.choice import EngineChoice
from fedbranch.sim.ensemble import Ensemble
from fedbranch.training.client import evaluate
from fedbranch.tree import ParameterTree

__all__ = ["Run"]


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A finished simulation.

    Attributes
    ----------
    server
        The server after the last round.
    path
        The run folder; None without one.
    evaluation
        Client id -> metrics on its held-out data under its model, at the end.
    """

    server: Server
    path: Path | None
    evaluation: Evaluation
    _rounds: list[Round]  # empty if they are in the folder
    _clients: SimulatedClients

    def __repr__(self) -> str:
        sizes = " + ".join(str(len(ids)) for ids in self.clusters.values())
        return f"<Run: {self.server.round} rounds, clusters of {sizes} clients, path {self.path}>"

    @cached_property
    def history(self) -> list[Round]:
        """Every round, with its decisions and evaluation.

        It is read from the run folder, if there is one: in memory, the history of a long run with
        many clients would need much space.
        """
        return self._rounds if self.path is None else RunFolder(self.path).history()

    @property
    def engine(self) -> EngineChoice:
        """The engine that trained the clients, and the reason for it."""
        return self._clients.engine_choice

    @property
    def tree(self) -> ParameterTree:
        """The parameter tree."""
        return self.server.tree

    @property
    def clusters(self) -> dict[int, list[str]]:
        """Leaf -> ids of its clients."""
        return self.server.clusters

    @property
    def cluster_means(self) -> dict[int, dict[str, float]]:
        """Leaf -> metrics at the end, averaged over its clients."""
        return {leaf: mean_by_metric(self.evaluation, ids) for leaf, ids in self.clusters.items()}

    @property
    def overall_mean(self) -> dict[str, float]:
        """Metrics at the end, averaged over all clients."""
        return mean_by_metric(self.evaluation, list(self.evaluation))

    def model(self, client_id: str) -> nn.Module:
        """Return a copy of the model that a client ended with."""
        return self.model_at(self.tree.position(client_id))

    def model_at(self, node_id: int) -> nn.Module:
        """Return a copy of the model at a tree node, in evaluation mode.

        The model is plain even if the server knows hidden models only: a simulation has the
        secret of its clients.
        """
        return self._clients.model_at(self.tree[node_id])

    def epsilons(self, delta: float) -> dict[str, float]:
        """Compute the ε that the noise gives each client, for all that it has sent.

        Parameters
        ----------
        delta
            The probability with which the guarantee may fail; far below 1 / number of clients.

        Returns
        -------
        dict
            Client id -> ε of (ε, δ)-differential privacy. An update counts once, a reply on
            halves twice. A client that has sent nothing has 0.
        """
        simulated = self._clients
        privacy = simulated.privacy
        if privacy is None or privacy.noise is None:
            raise ValueError(
                "the run had no noise, and without noise there is no epsilon; pass "
                "privacy=Privacy(secret, noise=Noise(clip=..., multiplier=...))"
            )
        counts = {i: simulated.releases.by_client[i] for i in simulated.clients}
        worth = {n: privacy.noise.epsilon(n, delta) for n in set(counts.values())}
        return {client_id: worth[count] for client_id, count in counts.items()}

    # The models on a client's path

    def path_of(self, client_id: str) -> list[int]:
        """Return the ids of the nodes from the root to a client's position."""
        return [node.id for node in self.tree.path(self.tree.position(client_id))]

    def evaluation_on_path(
        self, part: Literal["validation", "test"] = "test"
    ) -> dict[str, dict[int, dict[str, float | None]]]:
        """Measure every client under every model on its path.

        Parameters
        ----------
        part
            The examples to measure on. A client without validation examples is measured on its
            test examples.

        Returns
        -------
        dict
            Client id -> node id -> metrics, from the root on. Clients without such examples are
            left out.
        """
        paths = {i: self.path_of(i) for i in self.tree.client_ids}
        measured: dict[str, dict[int, dict[str, float | None]]] = {}
        for depth in range(max(map(len, paths.values()), default=0)):
            at = {i: self.tree[path[depth]] for i, path in paths.items() if depth < len(path)}
            on_part = self._clients.measured(at, "held_out" if part == "validation" else "test")
            for client_id, metrics in on_part.items():
                measured.setdefault(client_id, {})[at[client_id].id] = metrics
        return measured

    def best_on_path(self) -> dict[str, int]:
        """Find for each client the node on its path with the smallest loss on validation examples.

        Of equally good nodes the one farthest from the root is taken. Without validation examples
        the test examples decide; they then no longer judge the choice fairly. A client without
        either keeps its own position.

        Returns
        -------
        dict
            Client id -> node id.
        """
        best = {client_id: self.tree.position(client_id) for client_id in self.tree.client_ids}
        for client_id, by_node in self.evaluation_on_path("validation").items():
            losses = {
                node_id: math.inf if metrics["loss"] is None else metrics["loss"]
                for node_id, metrics in by_node.items()
            }
            # From its position to the root: of equal losses, min takes the first.
            best[client_id] = min(reversed(losses), key=losses.__getitem__)
        return best

    def ensemble(self, client_id: str, node_ids: Iterable[int] | None = None) -> nn.Module:
        """Join the models on a client's path into one, in evaluation mode; for classifiers.

        Parameters
        ----------
        client_id
            The client.
        node_ids
            The nodes to join; by default all nodes on the path.

        Returns
        -------
        Module
            Maps inputs to the logarithm of the mean of the models' probabilities.
        """
        chosen = self.path_of(client_id) if node_ids is None else list(node_ids)
        return Ensemble([self.model_at(node_id) for node_id in chosen]).eval()

    def ensemble_evaluation(self) -> Evaluation:
        """Measure every client on its test examples, under the ensemble of its path.

        Returns
        -------
        dict
            Client id -> metrics. Clients without test examples are left out.
        """
        evaluation: dict[str, dict[str, float | None]] = {}
        simulated = self._clients
        for node in self.tree:
            tests = {i: simulated.clients[i].test for i in self.tree.members(node.id)}
            if any(test is not None for test in tests.values()):
                ensemble = self.ensemble(next(iter(tests)))  # they share their path
            for client_id, test in tests.items():
                if test is not None:
                    measured = evaluate(ensemble, test, simulated.training)
                    evaluation[client_id] = only_finite(measured)
        return dict(sorted(evaluation.items()))
