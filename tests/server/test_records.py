"""A record is enough to follow the tree and the position of every client."""

import json

import numpy as np
import pytest

from fakes import QuadraticClients
from fedbranch import RoundRecord, Server, Thresholds, Update
from server.made_servers import server_for

RULE = Thresholds(eps_mean=0.3, eps_max=0.5, gamma_max=0.5, min_cluster_size=3)


def fold(places, record):
    """Change positions, client id -> node, as one record says."""
    for client_id in record.left:
        places.pop(client_id, None)
    places |= dict.fromkeys(record.joined, 0)
    places |= record.moved
    for client_id, node_id in places.items():
        while node_id in record.vanished:
            node_id = record.vanished[node_id]
        places[client_id] = node_id


def places_of(server):
    return {i: server.tree.position(i) for i in server.tree.client_ids}


@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_records_tell_where_every_client_stands(participation):
    clients = QuadraticClients(3, 6, seed=2)
    server, places = Server(20, rule=RULE), {}
    rng = np.random.default_rng(0)
    for number in range(1, 41):
        asked = [i for i in clients.client_ids if rng.random() < participation]
        if number == 15 and not server.tree.root.is_leaf:
            server.merge_split(0)
        if number == 20:
            server.remove(["c00"])
        if number in (25, 26):
            server.reroute([i for i in asked[:2] if i in server.tree])
        record = clients.play_round(server, asked)
        fold(places, RoundRecord.from_json(json.loads(json.dumps(record.to_json()))))
        assert places == places_of(server), number
    assert not server.tree.root.is_leaf


def test_given_clusters_are_in_the_first_record():
    server = Server(1)
    leaves = server.partition({"x": ["a", "b"], "y": ["c"]})
    server.plan(["a", "b", "c"])

    record = server.step({"a": Update(np.float32([1]), 1)})

    assert record.children == {0: tuple(leaves.values())}
    assert record.moved == {"a": leaves["x"], "b": leaves["x"], "c": leaves["y"]}


def test_a_split_names_its_children_in_the_order_of_the_groups():
    clients = QuadraticClients(2, 5)
    server = Server(20, rule=RULE)
    records = [clients.play_round(server, clients.client_ids) for _ in range(30)]

    (record,) = [record for record in records if record.splits]
    (split,) = record.splits

    children = record.children[split.node_id]
    for child_id, group in zip(children, split.groups, strict=True):
        assert {record.moved[client_id] for client_id in group} == {child_id}
        assert server.tree.members(child_id) == sorted(group)


def test_a_client_in_a_cluster_that_vanishes_twice_over_ends_where_that_one_went():
    clients = QuadraticClients(4, 5)
    server, places = Server(20, rule=RULE), {}
    for _ in range(40):
        fold(places, clients.play_round(server, clients.client_ids))
    inner = [node.id for node in server.tree if not node.is_leaf and node.id != 0]
    assert inner, "the second split is inside the first"
    server.merge_split(inner[0])
    server.merge_split(0)

    record = clients.play_round(server, [])
    fold(places, record)

    assert set(record.vanished.values()) == {inner[0], 0}
    assert places == places_of(server)


def test_a_record_survives_json():
    clients = QuadraticClients(num_groups=2, clients_per_group=2)
    server = server_for(clients)
    for number in range(30):
        asked = clients.client_ids if number > 25 else clients.client_ids[:3]
        record = clients.play_round(server, asked)

        assert RoundRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_a_client_that_joins_and_leaves_between_two_rounds_is_in_no_record():
    server = Server(1)
    server.join(["a", "b"])
    server.remove(["b"])
    first = server.step({})
    server.remove(["a"])
    server.join(["a"])
    second = server.step({})
    server.remove(["a"])
    server.join(["a"])
    server.remove(["a"])
    third = server.step({})

    assert (first.joined, first.left) == (("a",), ())
    assert (second.joined, second.left) == (("a",), ("a",))
    assert (third.joined, third.left) == ((), ("a",))
    assert server.tree.client_ids == []
