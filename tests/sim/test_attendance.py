"""Which simulated clients take part in a round."""

import numpy as np
import pytest
from torch import nn

import fedbranch as fb
from fedbranch.sim.attendance import Attendance


def test_clients_join_and_leave_in_their_rounds():
    rng = np.random.default_rng(0)
    times = [(1, None), (1, 3), (2, None), (3, 5), (4, None)]
    clients = {
        f"c{i}": fb.ClientData(
            train=(rng.normal(size=(9, 3)), rng.integers(0, 2, 9)), joins=joins, leaves=leaves
        )
        for i, (joins, leaves) in enumerate(times)
    }

    run = fb.fedavg(nn.Linear(3, 2), clients, rounds=6, training=fb.LocalTraining(epochs=1))

    for entry in run.history:
        expected = [i for i, client in clients.items() if client.takes_part(entry.record.round)]
        assert sorted(entry.record.metrics) == expected


def clients_with(times):
    """Make clients that join and leave in given rounds."""
    return {
        client_id: fb.ClientData(train=([[1.0]], [0]), joins=joins, leaves=leaves)
        for client_id, (joins, leaves) in times.items()
    }


TIMES = {"a": (1, None), "b": (1, 3), "c": (2, 4), "d": (4, None)}


@pytest.mark.parametrize("first", [1, 2, 3, 4, 5])
def test_after_a_resume_in_any_round_the_same_clients_are_present(first):
    clients = clients_with(TIMES)
    attendance, server = Attendance(clients), fb.Server(1)
    # What a saved server knows: the clients of the round before.
    server.join([i for i, client in clients.items() if first > 1 and client.takes_part(first - 1)])

    for number in range(first, 6):
        expected = [i for i, client in clients.items() if client.takes_part(number)]
        assert attendance.update(number, server, {}) == expected
        assert server.tree.client_ids == expected


def test_a_client_joins_at_its_home():
    server = fb.Server(1)
    leaves = server.partition({"left": [], "right": []})

    Attendance(clients_with(TIMES)).update(1, server, {"a": leaves["right"]})

    assert server.tree.position("a") == leaves["right"]
    assert server.tree.position("b") == server.tree.root.id
