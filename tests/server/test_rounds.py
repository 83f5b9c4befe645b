"""Rounds: clusters train, split, and find every group."""

import numpy as np
import pytest

from fakes import DIM, QuadraticClients, fingerprint
from fedbranch import NeverSplit, Server, Thresholds, Update
from server.made_servers import THRESHOLDS, server_for


def test_federated_averaging_by_hand():
    # θ ← θ + Σ |D_i|/|D| Δθ_i with 30 and 10 examples: 3/4 and 1/4.
    server = Server(2, rule=NeverSplit())
    server.plan(["a", "b"])

    server.step(
        {
            "a": Update(np.float32([4, 0]), num_examples=30),
            "b": Update(np.float32([0, 8]), num_examples=10),
        }
    )

    assert server.tree.root.params.tolist() == [3, 2]
    assert server.plan(["a"])["a"].params.tolist() == [3, 2]


def test_equal_weights_by_hand():
    server = Server(2, rule=NeverSplit(), weighting="equal")
    server.plan(["a", "b"])

    server.step(
        {
            "a": Update(np.float32([4, 0]), num_examples=30),
            "b": Update(np.float32([0, 8]), num_examples=10),
        }
    )

    assert server.tree.root.params.tolist() == [2, 4]


def test_clustered_federated_learning_by_hand():
    # Two clients with optima at +4 and −4, full steps. Round 1 is stationary at 0: Δ = ±4.
    server = Server(1, rule=Thresholds(eps_mean=0.1, eps_max=1, gamma_max=0.9))
    optimum = {"a": 4.0, "b": -4.0}

    def play():
        tasks = server.plan(["a", "b"])
        moves = {i: np.float32([optimum[i]]) - task.params for i, task in tasks.items()}
        return server.step({i: Update(move, num_examples=1) for i, move in moves.items() if move})

    first = play()
    assert [d.verdict for d in first.decisions] == ["split"]
    assert first.decisions[0].measurements["cross_similarity"] == -1
    assert first.decisions[0].measurements["tolerated_noise"] == 1
    # Both children start from θ* = 0, the parameters at which the updates were computed.
    assert server.clusters == {1: ["a"], 2: ["b"]}
    assert [leaf.params.tolist() for leaf in server.tree.leaves] == [[0], [0]]
    assert server.tree[1].cached_updates["a"].tolist() == [4]

    play()
    assert [leaf.params.tolist() for leaf in server.tree.leaves] == [[4], [-4]]
    assert server.tree.root.params.tolist() == [0]


def test_the_mean_is_not_added_in_the_round_of_the_split():
    # The weighted mean is short of ε1 but not zero; adding it would move θ* away from the
    # parameters at which the cached updates were computed.
    server = Server(1, rule=Thresholds(eps_mean=0.5, eps_max=1, gamma_max=0.9))
    server.plan(["a", "b"])

    record = server.step(
        {"a": Update(np.float32([2]), num_examples=1), "b": Update(np.float32([-1.5]), 1)}
    )

    assert record.splits
    assert {node.id: node.params.tolist() for node in server.tree} == {0: [0], 1: [0], 2: [0]}


def test_a_secret_permutation_changes_nothing_but_the_order_of_coordinates():
    clients = QuadraticClients(num_groups=3, clients_per_group=3)
    permutation = np.random.default_rng(5).permutation(DIM)
    hidden = QuadraticClients(num_groups=3, clients_per_group=3)
    hidden.optimum = {i: optimum[permutation] for i, optimum in clients.optimum.items()}
    plain_server, hidden_server = server_for(clients), server_for(hidden)

    for _ in range(40):
        clients.play_round(plain_server, clients.client_ids)
        hidden.play_round(hidden_server, clients.client_ids)

    assert plain_server.clusters == hidden_server.clusters
    assert len(plain_server.clusters) == 3
    for plain, secret in zip(plain_server.tree, hidden_server.tree, strict=True):
        assert np.array_equal(plain.params[permutation], secret.params)


def test_three_splits_put_every_client_into_its_true_group():
    clients = QuadraticClients(num_groups=4, clients_per_group=5)
    server = server_for(clients)

    records = [clients.play_round(server, clients.client_ids) for _ in range(40)]

    assert clients.are_separated(server)
    assert len(server.clusters) == 4
    assert sum(len(record.splits) for record in records) == 3


@pytest.mark.parametrize("seed", range(5))
def test_half_of_the_clients_in_each_round_are_enough_to_find_all_groups(seed):
    clients = QuadraticClients(num_groups=4, clients_per_group=5, seed=seed)
    server = server_for(clients)
    rng = np.random.default_rng(seed)
    records = []

    for _ in range(200):
        asked = sorted(rng.choice(clients.client_ids, size=10, replace=False))
        records.append(clients.play_round(server, [str(i) for i in asked]))

    assert clients.are_separated(server)
    assert len(server.clusters) == 4
    splits = [split for record in records for split in record.splits]
    assert all(s.measurements["num_answered"] == s.measurements["num_members"] for s in splits)


def test_buffers_are_averaged_but_never_compared():
    server = Server(1, num_buffers=2, rule=Thresholds(eps_mean=0.5, eps_max=1, gamma_max=0.9))
    tasks = server.plan(["a", "b"])
    assert tasks["a"].buffers.tolist() == [0, 0]

    record = server.step(
        {
            "a": Update(np.float32([1.0]), 3, buffers=np.float32([8, 0])),
            "b": Update(np.float32([1.1]), 1, buffers=np.float32([0, -8])),
        }
    )

    assert record.decisions[0].verdict == "train"
    assert server.tree.root.buffers.tolist() == [6, -2]


def test_a_signal_is_compared_and_the_update_is_averaged():
    rule = Thresholds(eps_mean=0.5, eps_max=1, gamma_max=0.9)
    server = Server(1, rule=rule, compare="signal")
    server.plan(["a", "b"])

    record = server.step(
        {
            "a": Update(np.float32([5]), 1, signal=np.float32([2])),
            "b": Update(np.float32([6]), 1, signal=np.float32([-2])),
        }
    )

    assert record.splits
    assert server.tree[1].cached_updates["a"].tolist() == [2]


def test_the_order_of_replies_changes_no_bit():
    servers = []
    for seed in range(3):
        clients = QuadraticClients(num_groups=4, clients_per_group=4)
        server = server_for(clients)
        rng = np.random.default_rng(seed)
        for _ in range(40):
            tasks = server.plan([str(i) for i in rng.permutation(clients.client_ids)])
            updates = [(i, clients.update(i, task)) for i, task in tasks.items()]
            server.step([updates[i] for i in rng.permutation(len(updates))])
        servers.append(server)

    assert len({fingerprint(server) for server in servers}) == 1
    assert len(servers[0].clusters) == 4


def test_a_task_cannot_be_used_to_change_the_server():
    server = Server(2, rule=NeverSplit())
    task = server.plan(["a"])["a"]

    with pytest.raises(ValueError, match="read-only"):
        task.params[0] = 1


def test_a_client_may_reuse_its_array_after_sending():
    server = Server(2, rule=THRESHOLDS)
    server.plan(["a", "b", "c"])
    mine = np.float32([2, 0])
    server.step({"a": Update(mine, 1), "b": Update(np.float32([-2, 0]), 1)})
    mine[:] = 99  # the cluster holds; the collected update must not change

    server.plan(["c"])
    record = server.step({"c": Update(np.float32([1, 0.1]), 1)})

    assert record.splits[0].measurements["max_norm"] < 3
