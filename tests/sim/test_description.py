"""How a run folder describes the simulated clients."""

import numpy as np
from torch import nn

import fedbranch as fb
from fedbranch.sim.clients import SimulatedClients
from sim.two_groups import TRAINING


def digests_of(**parts):
    x, y = np.arange(6, dtype=np.float32).reshape(3, 2), [0, 1, 0]
    client = fb.ClientData((x, y), **{name: (x[:n], y[:n]) for name, n in parts.items()})
    simulated = SimulatedClients(
        nn.Linear(2, 2), {"a": client}, TRAINING, seed=0, device="cpu", engine="reference"
    )
    return simulated.describe()["clients"][0]


def test_only_clients_with_validation_examples_are_described_by_them():
    described = [digests_of(), digests_of(test=2), digests_of(validation=2)]
    both = digests_of(test=2, validation=2)

    assert len({entry["data"] for entry in [*described, both]}) == 4
    assert "num_validation" not in described[1]
    assert both["num_validation"] == 2
    # The digest of run folders that are older than validation examples.
    assert described[1]["data"].startswith("b49ad62510ab")
