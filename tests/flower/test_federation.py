"""Nodes that connect, vanish and come back in the middle of a run."""

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

import fedbranch as fb
from fedbranch.errors import FederationStalled
from fedbranch.flower import federation
from fedbranch.flower.testing import FakeNode
from fedbranch.runs import RunFolder
from flower.federations import (
    RULE,
    make_clients,
    make_grid,
    start,
)


def test_a_node_that_vanishes_keeps_its_position_and_goes_on():
    grid = make_grid()
    gone = []

    def come_and_go(number, arrays):
        if number == 25 and not gone:
            gone.append(grid.disconnect(FakeNode.simulated(5, 6).node_id))
        if number == 28:
            grid.connect(gone[0])

    result = start(grid, start_with={"evaluate_fn": come_and_go})

    took_part = [
        entry.record.round for entry in result.history if "partition-0005" in entry.record.metrics
    ]
    assert took_part == [*range(1, 26), 29, 30]
    assert result.assignments["partition-0005"] == result.assignments["partition-0001"]
    assert not any(entry.record.routed for entry in result.history)


def test_a_client_that_was_away_at_the_split_is_routed_when_it_returns():
    grid = make_grid()
    gone = grid.disconnect(FakeNode.simulated(5, 6).node_id)
    has_joined = []

    def come_and_go(number, arrays):
        if number == 0:
            grid.connect(gone)
        if number == 1:
            has_joined.append(grid.disconnect(gone.node_id))
        if number == 27:
            grid.connect(gone)

    rule = fb.Thresholds(eps_mean=0.3, eps_max=0.5, gamma_max=0.5, min_cluster_size=2)
    result = start(grid, rule=rule, num_rounds=32, start_with={"evaluate_fn": come_and_go})

    assert has_joined
    assert [move.client_id for e in result.history for move in e.record.routed] == [
        "partition-0005"
    ]
    assert result.assignments["partition-0005"] == result.assignments["partition-0001"]


def test_the_place_of_a_simulated_node_that_is_gone_stays_free():
    grid = make_grid()

    def lose_the_first(number, arrays):
        if number == 2:
            grid.disconnect(FakeNode.simulated(0, 6).node_id)

    result = start(grid, num_rounds=4, start_with={"evaluate_fn": lose_the_first})

    took_part = [sorted(entry.record.metrics) for entry in result.history]
    all_ids = [f"partition-{i:04d}" for i in range(6)]
    assert took_part == [all_ids, all_ids, all_ids[1:], all_ids[1:]]


def test_a_holding_cluster_gives_absent_clients_time_to_come(monkeypatch):
    grid = make_grid()
    gone = FakeNode.simulated(0, 6)
    looks = []
    get_nodes = grid.get_nodes

    def come_back_after_some_looks():
        if gone.node_id not in grid.nodes:
            looks.append(1)
            if len(looks) == 20:
                grid.connect(gone)
        return get_nodes()

    grid.get_nodes = come_back_after_some_looks
    monkeypatch.setattr(federation, "SECONDS_BETWEEN_LOOKS", 0.001)
    rule = replace(RULE, eps_mean=9.0, eps_max=1e-6, min_rounds=1, min_cluster_size=2, coverage=1.0)

    def lose_one(number, arrays):
        if number == 1:
            grid.disconnect(gone.node_id)

    result = start(grid, num_rounds=3, rule=rule, start_with={"evaluate_fn": lose_one})

    assert len(looks) == 20
    verdicts = [d.verdict for entry in result.history for d in entry.record.decisions]
    assert verdicts == ["train", "hold", "split"]


def test_no_split_waits_forever_for_clients_that_vanished():
    grid = make_grid(make_clients(num_clients=10))

    def lose_four(number, arrays):
        if number == 1:
            for i in range(6, 10):
                grid.disconnect(FakeNode.simulated(i, 10).node_id)

    result = start(grid, num_rounds=40, timeout=0.02, start_with={"evaluate_fn": lose_four})

    assert len(result.clusters) == 2
    assert len(result.assignments) == 10


def test_too_few_nodes_for_too_long_is_an_error():
    with pytest.raises(FederationStalled, match=r"6 nodes are connected and 7 are needed"):
        start(make_grid(), min_available_nodes=7, timeout=0.05)


def test_too_few_nodes_for_an_evaluation_cost_no_training(tmp_path):
    def on_reply(message, reply):
        if message.metadata.group_id == "2":
            for node_id in list(grid.nodes):
                grid.disconnect(node_id)
        return reply

    grid = make_grid(on_reply=on_reply)
    with pytest.raises(FederationStalled, match="0 nodes are connected"):
        start(grid, num_rounds=3, timeout=0.05, checkpoint_dir=tmp_path)

    first, second = RunFolder(tmp_path).history()
    assert len(first.evaluation) == 6
    assert second.record.metrics
    assert second.evaluation == {}


def test_a_refused_identity_stands_in_the_record():
    grid = make_grid()
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    key = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    grid.nodes = {
        i: FakeNode(node_id=i, config=node.config, public_key=key if i < 2 else b"")
        for i, node in enumerate(grid.nodes.values())
    }

    result = start(grid, num_rounds=1)

    assert list(result.history[0].record.refused.values()) == ["one key on several nodes: [0, 1]"]
    assert sorted(result.assignments) == ["node-2", "node-3", "node-4", "node-5"]
