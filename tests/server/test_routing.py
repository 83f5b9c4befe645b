"""Clients at inner nodes go down to the cluster that their updates resemble."""

import numpy as np
import pytest

from fakes import QuadraticClients, fingerprint
from fedbranch import NeverSplit, Server, Thresholds, Update
from server.made_servers import server_for


def test_an_absent_client_is_routed_when_it_returns():
    rule = Thresholds(eps_mean=0.5, eps_max=1.0, gamma_max=0.5, coverage=0.6)
    clients = QuadraticClients(num_groups=2, clients_per_group=3)
    server = server_for(clients, rule)
    server.plan(clients.client_ids)
    while not server.tree.root.child_ids:
        clients.play_round(server, clients.client_ids[:4])
    assert server.tree.position("c05") == 0
    assert server.plan(["c05"])["c05"].purpose == "route"

    record = clients.play_round(server, clients.client_ids)

    assert {move.client_id for move in record.routed} == {"c04", "c05"}
    assert clients.are_separated(server)


def test_a_rerouted_client_finds_its_cluster_again():
    clients = QuadraticClients(num_groups=3, clients_per_group=3)
    server = server_for(clients)
    for _ in range(40):
        clients.play_round(server, clients.client_ids)
    home = server.tree.position("c01")

    server.reroute(["c01"])
    assert server.tree.position("c01") == 0
    for _ in range(3):
        clients.play_round(server, clients.client_ids)

    assert server.tree.position("c01") == home


def test_a_client_that_comes_back_finds_its_cluster_again():
    clients = QuadraticClients(num_groups=4, clients_per_group=3)
    server = server_for(clients)
    for _ in range(40):
        clients.play_round(server, clients.client_ids)
    home = server.tree.position("c05")

    server.remove(["c05"])
    clients.play_round(server, [i for i in clients.client_ids if i != "c05"])
    for _ in range(4):
        clients.play_round(server, clients.client_ids)

    assert server.tree.position("c05") == home


def test_late_joiners_are_routed_to_their_groups():
    clients = QuadraticClients(num_groups=4, clients_per_group=5)
    server = server_for(clients)
    early, late = clients.client_ids[:12], clients.client_ids[12:]  # two late ones per group
    for _ in range(40):
        clients.play_round(server, early)
    assert clients.are_separated(server)
    assert len(server.clusters) == 4

    first = clients.play_round(server, clients.client_ids)
    for _ in range(5):
        clients.play_round(server, clients.client_ids)

    assert first.joined == tuple(late)
    assert {move.client_id for move in first.routed} == set(late)
    assert clients.are_separated(server)
    assert server.tree.client_ids == clients.client_ids


def test_newcomers_that_come_together_are_routed_as_alone_and_in_any_order():
    def routed(order):
        clients = QuadraticClients(num_groups=3, clients_per_group=6, seed=1)
        late = [i for number, i in enumerate(clients.client_ids) if number % 2]
        server = server_for(clients)
        for _ in range(40):
            clients.play_round(server, [i for i in clients.client_ids if i not in late])
        tree = server.tree
        tasks = server.plan(late)
        updates = {i: clients.update(i, tasks[i]) for i in order(late)}
        guard = server.options.guard
        alone = {
            i: tree.descend(
                0, update.vector, ignored_share=guard.ignored_share, num_best=guard.num_best
            )
            for i, update in updates.items()
        }
        record = server.step(updates)
        assert len(record.routed) == len(late)
        for move in record.routed:
            assert move.to_node == alone[move.client_id].child_id
            assert move.similarities == pytest.approx(alone[move.client_id].similarities, abs=1e-6)
        return fingerprint(server), {move.client_id: move for move in record.routed}

    assert routed(list) == routed(lambda ids: ids[::-1])


def test_a_routed_clients_metrics_are_in_the_record():
    clients = QuadraticClients(num_groups=2, clients_per_group=3)
    server = server_for(clients)
    while server.tree.root.is_leaf:
        clients.play_round(server, clients.client_ids[:5])
    task = server.plan(["c05"])["c05"]
    vector = clients.update("c05", task).vector

    record = server.step({"c05": Update(vector, 1, metrics={"loss": 2.5})})

    assert [move.client_id for move in record.routed] == ["c05"]
    assert record.metrics == {"c05": {"loss": 2.5}}


def test_a_client_outside_given_clusters_is_refused_with_the_reason():
    server = Server(1, rule=NeverSplit())
    server.partition({"x": ["a"], "y": ["b"]})
    server.plan(["stranger"])

    record = server.step({"stranger": Update(np.float32([1]), 1)})

    assert "no cached updates" in record.refused["stranger"]
    assert record.metrics == {}
    with pytest.raises(ValueError, match="no client can be routed"):
        server.reroute(["a"])
    with pytest.raises(ValueError, match="before the first round"):
        server.partition({"x": ["a"], "y": ["b"]})
