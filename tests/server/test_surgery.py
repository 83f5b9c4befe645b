"""Splits are taken back or merged, and clusters can be given."""

import numpy as np
import pytest

from fakes import QuadraticClients, fingerprint
from fedbranch import NeverSplit, Server, Update
from rules.bowls import Bowls
from server.made_servers import server_for


def test_an_undone_split_trains_again_as_one_cluster():
    clients = QuadraticClients(num_groups=2, clients_per_group=3)
    server = server_for(clients)
    while len(server.clusters) < 2:
        clients.play_round(server, clients.client_ids)
    solution = server.tree.root.params.copy()
    clients.play_round(server, clients.client_ids)

    server.undo_split(0)

    assert server.clusters == {0: clients.client_ids}
    assert np.array_equal(server.tree.root.params, solution)
    record = clients.play_round(server, clients.client_ids)
    assert not record.refused


def test_given_clusters_train_apart():
    server = Server(1, rule=NeverSplit())

    leaves = server.partition({"x": ["a"], "y": ["b"]}, {"y": np.float32([10])})
    server.plan(["a", "b"])
    server.step({"a": Update(np.float32([1]), 1), "b": Update(np.float32([2]), 1)})

    assert [server.tree[leaves[name]].params.tolist() for name in "xy"] == [[1], [12]]


@pytest.mark.parametrize(
    ("groups", "params", "message"),
    [
        ({"x": ["a"], "y": ["b"]}, {"z": np.zeros(2)}, "params has 'z'"),
        ({"x": ["a"], "y": ["b"]}, {"x": np.zeros(1)}, r"shape \(1,\)"),
        ({"x": ["a"], "y": ["b"]}, {"x": np.array([0, np.nan])}, "2 finite numbers"),
        ({"x": ["a"], "y": ["a"]}, None, "in two groups"),
        ({"x": ["a", "a"], "y": ["b"]}, None, "named more than once"),
    ],
)
def test_impossible_given_clusters_are_named_and_change_nothing(groups, params, message):
    server = Server(2, rule=NeverSplit())
    before = fingerprint(server)

    with pytest.raises(ValueError, match=message):
        server.partition(groups, params)

    assert fingerprint(server) == before


def test_a_merged_split_starts_from_the_mean_of_its_leaves():
    bowls = Bowls("ab" * 8)
    server, _ = bowls.run(6)
    expected = np.mean([leaf.params for leaf in server.tree.leaves], axis=0)

    server.merge_split(0)

    assert server.tree.root.params == pytest.approx(expected, abs=1e-5)
