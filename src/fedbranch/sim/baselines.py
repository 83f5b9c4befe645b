"""Methods to compare with, on the same clients, seeds, training and engine.

All of them are the same server with other clusters:

=======  ===============================================================
fedavg   One cluster: plain federated learning.
local    One cluster for each client.
oracle   The true groups.
ifca     k clusters, between which clients choose anew in every round.
=======  ===============================================================

As in the literature they have no :class:`fedbranch.Guard`, unless they are given one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Unpack

import torch
from torch import nn

from fedbranch.data import ClientData
from fedbranch.rules import NeverSplit
from fedbranch.server.server import Server
from fedbranch.sim.clients import SimulatedClients
from fedbranch.sim.hidden import Hiding, check_is_privacy
from fedbranch.sim.run import Run
from fedbranch.sim.simulation import Settings, simulate
from fedbranch.training.model_state import ModelState
from fedbranch.training.seeds import stream_seed

__all__ = ["fedavg", "ifca", "local", "oracle"]


def fedavg(
    model: nn.Module, clients: Mapping[str, ClientData], **settings: Unpack[Settings]
) -> Run:
    """Run plain federated averaging: one model for all."""
    return simulate(model, clients, method="fedavg", **_as_baseline(settings))


def local(model: nn.Module, clients: Mapping[str, ClientData], **settings: Unpack[Settings]) -> Run:
    """Let every client train alone, for the same number of rounds as the other methods."""
    alone = {client_id: client_id for client_id in clients}
    return _in_given_clusters(model, clients, alone, "local", settings)


def oracle(
    model: nn.Module, clients: Mapping[str, ClientData], **settings: Unpack[Settings]
) -> Run:
    """Train one model for each true group from the beginning."""
    group_of = {}
    for client_id, client in clients.items():
        if client.group is None:
            raise ValueError(
                f"client {client_id!r} has no group; the oracle needs ClientData(..., group=...)"
            )
        group_of[client_id] = client.group
    return _in_given_clusters(model, clients, group_of, "oracle", settings)


def _in_given_clusters(
    model: nn.Module,
    clients: Mapping[str, ClientData],
    cluster_of: Mapping[str, str],
    method: str,
    settings: Settings,
) -> Run:
    def start(server: Server) -> dict[str, int]:
        leaves = server.partition({name: [] for name in sorted(set(cluster_of.values()))})
        return {client_id: leaves[name] for client_id, name in cluster_of.items()}

    return simulate(model, clients, method=method, start=start, **_as_baseline(settings))


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
        from fresh initial weights. With ``privacy`` these weights follow from its secret. The
        server receives them hidden, and must know no model both plain and hidden.
    num_clusters
        k. This method cannot find it.
    settings
        As for :func:`simulate`.
    """
    if num_clusters < 1:
        raise ValueError(f"num_clusters is {num_clusters}; it must be at least 1")
    privacy = settings.get("privacy")
    check_is_privacy(privacy)
    if privacy is not None and privacy.noise is not None:
        raise ValueError(
            "privacy has noise, and which model a client chooses says something of its data that "
            "no noise covers; take noise=None, or another method than ifca"
        )
    initial = ModelState.of(model)
    starts = {}
    for number in range(1, num_clusters):
        if privacy is None:
            own_seed = stream_seed(settings.get("seed", 0), "ifca", number)
        else:  # not from the run's seed, which is no secret
            own_seed = privacy.secret.seed(f"ifca {number}")
        fresh = _fresh_weights(model, own_seed)
        starts[f"model-{number}"], _ = ModelState.of(fresh).minus(initial)
        if not starts[f"model-{number}"].any():
            raise ValueError(
                f"no layer of {type(model).__name__} has reset_parameters(), so all "
                f"{num_clusters} models would be the same; give the modules that method"
            )
    if privacy is not None:
        hiding = Hiding(privacy, model)
        starts = {name: hiding.hidden_params(start) for name, start in starts.items()}

    def start(server: Server) -> dict[str, int]:
        leaves = server.partition({f"model-{i}": [] for i in range(num_clusters)}, starts)
        return dict.fromkeys(clients, leaves["model-0"])

    def choose(server: Server, simulated: SimulatedClients, client_ids: list[str]) -> None:
        losses: dict[str, dict[int, float]] = {client_id: {} for client_id in client_ids}
        for leaf in server.tree.leaves:
            for client_id, loss in simulated.training_losses(leaf, client_ids).items():
                # No client chooses a model that has diverged.
                losses[client_id][leaf.id] = loss if math.isfinite(loss) else math.inf
        server.place({i: min(by_leaf, key=by_leaf.__getitem__) for i, by_leaf in losses.items()})

    return simulate(
        model,
        clients,
        method="ifca",
        start=start,
        before_round=choose,
        **_as_baseline(settings),
    )


def _as_baseline(settings: Settings) -> Settings:
    """Keep the clusters of the method, without a guard unless the settings have one."""
    if "rule" in settings:
        raise TypeError(
            f"rule is {settings['rule']!r}; the clusters of a baseline are given, so leave it out"
        )
    guard: Settings = {} if settings.get("options") is not None else {"guard": None}
    return {**guard, **settings, "rule": NeverSplit()}


def _fresh_weights(model: nn.Module, seed: int) -> nn.Module:
    """Copy a model, and draw initial weights again in every layer with ``reset_parameters``."""
    fresh = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in fresh.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    return fresh
