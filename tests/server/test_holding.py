"""A leaf stands still until enough of its clients have answered."""

import numpy as np
import pytest

from fakes import QuadraticClients
from fedbranch import Server, Thresholds, Update
from server.made_servers import THRESHOLDS, server_for


def test_a_holding_cluster_stands_still_and_asks_each_client_once():
    clients = QuadraticClients(num_groups=2, clients_per_group=3)
    server = server_for(clients)
    while True:
        record = clients.play_round(server, ["c00", "c01", "c02", "c03"])
        if record.splits:
            raise AssertionError("split without c04 and c05 known to the server")
        server.plan(clients.client_ids)  # makes all six known
        if record.decisions[0].verdict == "hold":
            break
    params = server.tree.root.params.copy()

    assert server.awaited() == ["c04", "c05"]
    assert set(server.plan(clients.client_ids)) == {"c04", "c05"}
    late = clients.play_round(server, ["c04"])
    assert late.decisions[0].verdict == "hold"
    assert np.array_equal(server.tree.root.params, params)
    done = clients.play_round(server, ["c05"])

    assert [d.verdict for d in done.decisions] == ["split"]
    assert done.decisions[0].measurements["num_answered"] == 6
    assert np.array_equal(server.tree.root.params, params)
    assert clients.are_separated(server)
    assert server.awaited() == []


def test_a_cluster_that_stands_still_does_so_until_enough_have_answered():
    # c, d and e make the mean long, but with 5 of 6 replies nothing is decided yet.
    server = Server(1, rule=THRESHOLDS)
    base = server.plan(list("abcdef"))["a"].base
    server.step({"a": Update(np.float32([1]), 1), "b": Update(np.float32([-1]), 1)})

    record = server.step({i: Update(np.float32([1]), 1, base=base) for i in "cde"})
    assert [d.verdict for d in record.decisions] == ["hold"]
    assert server.tree.root.params.tolist() == [0]

    record = server.step({"f": Update(np.float32([1]), 1, base=base)})
    assert record.decisions[0].reason.startswith("not stationary")
    assert server.tree.root.params == pytest.approx([4 / 6])


def test_a_silent_client_costs_at_most_every_second_round():
    rule = Thresholds(eps_mean=0.5, eps_max=1.0, gamma_max=0.5, coverage=1.0, max_hold_rounds=4)
    server = Server(1, rule=rule)
    server.plan(["silent"])
    verdicts = []
    for _ in range(40):
        tasks = server.plan(["a", "b"])
        sent = {"a": 2.0, "b": -1.9}
        record = server.step({i: Update(np.float32([sent[i]]), 1) for i in tasks})
        verdicts += [d.verdict for d in record.decisions]

    assert len(verdicts) == 40
    assert verdicts.count("train") >= 20
    assert "split" not in verdicts


def test_by_default_one_silent_client_of_many_does_not_stop_a_split():
    clients = QuadraticClients(num_groups=2, clients_per_group=5)
    server = server_for(clients, Thresholds(eps_mean=0.5, eps_max=1.0, gamma_max=0.5))
    server.plan(clients.client_ids)

    for _ in range(40):
        clients.play_round(server, clients.client_ids[1:])

    assert sorted(map(len, server.clusters.values())) == [4, 5]
    assert server.tree.position("c00") == 0


def test_a_cluster_that_held_in_vain_trains_on_with_all_collected_replies():
    rule = Thresholds(eps_mean=0.5, eps_max=1.0, gamma_max=0.5, coverage=1.0, max_hold_rounds=2)
    server = Server(1, rule=rule)
    server.plan(["a", "b", "silent"])
    server.step({"a": Update(np.float32([2]), 1), "b": Update(np.float32([-1.9]), 1)})
    verdicts = []

    for _ in range(2):
        server.plan(["silent"])
        verdicts.append(server.step({}).decisions[0].verdict)

    assert verdicts == ["hold", "train"]
    assert server.tree.root.params == pytest.approx([0.05])
    assert len(server.tree) == 1


def test_clients_that_leave_are_no_longer_waited_for():
    server = Server(1, rule=THRESHOLDS)
    server.plan(["a", "b", "gone"])
    server.step({"a": Update(np.float32([2]), 1), "b": Update(np.float32([-2]), 1)})

    server.remove(["gone"])
    record = server.step({})

    assert [d.verdict for d in record.decisions] == ["split"]


def test_a_reply_of_a_client_that_left_while_its_cluster_held_does_not_count():
    server = Server(1, rule=THRESHOLDS)
    server.plan(["a", "b", "c"])
    server.step({"a": Update(np.float32([2]), 1), "b": Update(np.float32([-2]), 1)})

    server.remove(["a", "b"])
    record = server.step({})

    assert [d.reason for d in record.decisions] == ["no client of the cluster has answered"]
    assert server.tree.root.params.tolist() == [0]


def test_a_late_reply_counts_while_its_cluster_has_not_moved():
    server = Server(1, rule=THRESHOLDS)
    base = server.plan(["a", "b", "slow"])["slow"].base
    server.step({"a": Update(np.float32([2]), 1), "b": Update(np.float32([-2]), 1)})

    record = server.step({"slow": Update(np.float32([1]), 1, base=base)})

    assert not record.refused
    assert record.splits[0].groups == (("a", "slow"), ("b",))
