"""The methods to compare with, in the same engine: same clients, same seeds, same training.

All of them are the same server with other clusters: one (plain federated learning), one
for each client (everybody alone), the true groups (oracle), or k whose members are chosen
anew in every round (IFCA).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Unpack

import torch
from torch import nn

from fedbranch.client import LocalTraining, ModelState, evaluate, stream_seed
from fedbranch.data import ClientData
from fedbranch.rules import NeverSplit
from fedbranch.server import Server
from fedbranch.sim.engine import Run, Settings, simulate

__all__ = ["fedavg", "ifca", "local", "oracle"]


def fedavg(
    model: nn.Module, clients: Mapping[str, ClientData], **settings: Unpack[Settings]
) -> Run:
    """Run plain federated averaging: one model for all."""
    return simulate(model, clients, rule=NeverSplit(), method="fedavg", **settings)


def local(model: nn.Module, clients: Mapping[str, ClientData], **settings: Unpack[Settings]) -> Run:
    """Let every client train alone, for as many rounds as the others take together."""
    alone = {client_id: [client_id] for client_id in clients}
    return simulate(
        model,
        clients,
        rule=NeverSplit(),
        method="local",
        start=lambda server: _start_from(server, alone),
        **settings,
    )


def oracle(
    model: nn.Module, clients: Mapping[str, ClientData], **settings: Unpack[Settings]
) -> Run:
    """Train one model for each true group from the beginning."""
    groups: dict[str, list[str]] = {}
    for client_id, client in clients.items():
        if client.group is None:
            raise ValueError(
                f"client {client_id!r} has no group; the oracle needs ClientData(..., group=...)"
            )
        groups.setdefault(client.group, []).append(client_id)
    return simulate(
        model,
        clients,
        rule=NeverSplit(),
        method="oracle",
        start=lambda server: _start_from(server, groups),
        **settings,
    )


def ifca(
    model: nn.Module,
    clients: Mapping[str, ClientData],
    *,
    num_clusters: int,
    **settings: Unpack[Settings],
) -> Run:
    """Run the Iterative Federated Clustering Algorithm (Ghosh et al., 2020).

    There are k models from the beginning. In every round each client joins the one with
    the smallest loss on its training data.

    Parameters
    ----------
    model, clients
        As for :func:`simulate`. The first of the k models starts as ``model``, the others
        from fresh initial weights.
    num_clusters
        k, which this method must be told.
    settings
        As for :func:`simulate`.
    """
    if num_clusters < 1:
        raise ValueError(f"num_clusters is {num_clusters}; it must be at least 1")
    training = settings.setdefault("training", LocalTraining(epochs=3))
    names = [f"model-{number}" for number in range(num_clusters)]
    trial = copy.deepcopy(model)
    initial = ModelState.of(trial)

    def start(server: Server) -> None:
        starts = {}
        for number, name in enumerate(names[1:], start=1):
            fresh = _fresh_weights(model, stream_seed(settings.get("seed", 0), "ifca", number))
            starts[name] = (ModelState.of(fresh).params - initial.params).cpu().numpy()
        groups = {name: [] if number else list(clients) for number, name in enumerate(names)}
        server.partition(groups, starts)

    def choose(server: Server, client_ids: list[str]) -> None:
        losses: dict[str, list[tuple[float, int]]] = {client_id: [] for client_id in client_ids}
        for leaf in server.tree.leaves:
            state = initial.moved_by(torch.tensor(leaf.params), torch.tensor(leaf.buffers))
            state.load_into(trial)
            for client_id in client_ids:
                measured = evaluate(trial, clients[client_id].train, training)
                losses[client_id].append((measured["loss"], leaf.id))
        for client_id, by_leaf in losses.items():
            server.tree.place(client_id, min(by_leaf)[1])

    return simulate(
        model,
        clients,
        rule=NeverSplit(),
        method="ifca",
        start=start,
        before_round=choose,
        **settings,
    )


def _start_from(server: Server, groups: Mapping[str, list[str]]) -> None:
    server.partition(groups)


def _fresh_weights(model: nn.Module, seed: int) -> nn.Module:
    """Copy a model and let every layer that can draw its initial weights again."""
    fresh = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in fresh.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    return fresh
