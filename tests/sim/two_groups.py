"""A simulation of clients in two groups that contradict each other."""

import numpy as np
import torch
from torch import nn

import fedbranch as fb

RULE = fb.Thresholds(eps_mean=0.3, eps_max=0.5, gamma_max=0.5)
TRAINING = fb.LocalTraining(optimizer=fb.sgd(0.3), epochs=2, batch_size=10)


def make_clients(num_clients=6, **of_last):
    """Make clients with points on two sides of a line; every second client swaps the labels."""
    clients = {}
    for i in range(num_clients):
        rng = np.random.default_rng(i)
        x = rng.normal(size=(60, 3)).astype(np.float32)
        y = ((x[:, 0] > 0) ^ (i % 2 == 1)).astype(np.int64)
        more = of_last if i == num_clients - 1 else {}
        clients[f"c{i}"] = fb.ClientData(
            (x[:40], y[:40]), (x[40:], y[40:]), group=str(i % 2), **more
        )
    return clients


def make_model(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def simulate(clients=None, **settings):
    return fb.simulate(
        make_model(),
        make_clients() if clients is None else clients,
        **{"rule": RULE, "rounds": 30, "training": TRAINING, "seed": 3, **settings},
    )


def folder_bytes(path):
    return {p.relative_to(path): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


class Interrupted(Exception):
    pass


def interrupt_after(number):
    def on_round(entry):
        if entry.record.round == number:
            raise Interrupted

    return on_round
