"""Servers with the paper's rule, and clients that are quadratic bowls."""

from dataclasses import replace

import numpy as np

from fakes import DIM, QuadraticClients
from fedbranch import Server, Thresholds, Update

THRESHOLDS = Thresholds(eps_mean=0.5, eps_max=1.0, gamma_max=0.5, coverage=1.0)


def server_for(clients, rule=THRESHOLDS, **settings):
    return Server(DIM, rule=rule, **settings)


def holding_server(num_rounds, folder=None):
    """Return a server that holds two more replies after each round, and save it after each."""
    server = Server(2, rule=Thresholds(eps_mean=0.5, eps_max=1, gamma_max=0.5, coverage=1.0))
    server.join(f"c{n}" for n in range(20))
    for number in range(num_rounds):
        ids = [f"c{2 * number}", f"c{2 * number + 1}"]
        server.plan(ids)
        record = server.step(
            {i: Update(np.float32([2 * n - 1, 0.25]), 1) for n, i in enumerate(ids)}
        )
        assert record.decisions[0].verdict == "hold"
        if folder is not None:
            server.save(folder)
    return server


def play_present(clients, server, present, rounds=1):
    """Play rounds in which the driver names the clients that are there; return the last record."""
    for _ in range(rounds):
        server.mark_present(set(present) & set(server.tree.client_ids))
        record = clients.play_round(server, present)
    return record


class SketchedClients(QuadraticClients):
    """Clients that send their update, and a short signal made of it to be compared."""

    def __init__(self, *args, size=DIM // 2, **kwargs):
        super().__init__(*args, **kwargs)
        mixing = np.linalg.qr(np.random.default_rng(9).normal(size=(DIM, DIM)))[0]
        self.mixing = (mixing[:size] * np.sqrt(DIM / size)).astype(np.float32)

    def update(self, client_id, task):
        update = super().update(client_id, task)
        return replace(update, signal=self.mixing @ update.vector)


def sketched(num_groups=3, **settings):
    clients = SketchedClients(num_groups=num_groups, clients_per_group=4)
    size = len(clients.mixing)
    return clients, server_for(clients, compare="signal", num_signal=size, **settings)
