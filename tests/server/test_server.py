import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fakes import DIM, QuadraticClients, fingerprint
from fedbranch import DamagedFile, Decision, NeverSplit, RoundRecord, Server, Thresholds, Update

THRESHOLDS = Thresholds(eps_mean=0.5, eps_max=1.0, gamma_max=0.5, coverage=1.0)


def server_for(clients, rule=THRESHOLDS, **settings):
    return Server(DIM, rule=rule, **settings)


# The paper's algorithms by hand


def test_federated_learning_by_hand():
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


# Recursion


def test_three_splits_put_every_client_into_its_true_group():
    clients = QuadraticClients(num_groups=4, clients_per_group=5)
    server = server_for(clients)

    records = [clients.play_round(server, clients.client_ids) for _ in range(40)]

    assert clients.are_separated(server)
    assert len(server.clusters) == 4
    assert sum(len(record.splits) for record in records) == 3


@pytest.mark.parametrize("seed", range(5))
def test_recursion_with_half_of_the_clients_in_each_round(seed):
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


def test_recursion_with_late_joiners():
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


def test_recursion_with_clients_that_leave():
    clients = QuadraticClients(num_groups=4, clients_per_group=5)
    server = server_for(clients)
    present = list(clients.client_ids)
    for number in range(60):
        if number % 6 == 5:
            server.remove([present.pop(number % len(present))])
        record = clients.play_round(server, present)
        if number % 6 == 5:
            assert len(record.left) == 1

    assert server.tree.client_ids == sorted(present)
    assert clients.are_separated(server)


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


# Holding still


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
    # c, d and e would make the mean long; but at 5 of 6 it is not yet known.
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


def test_a_cluster_that_held_in_vain_trains_on_with_all_it_has_collected():
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


def test_a_late_reply_counts_while_its_cluster_still_stands_where_it_was():
    server = Server(1, rule=THRESHOLDS)
    base = server.plan(["a", "b", "slow"])["slow"].base
    server.step({"a": Update(np.float32([2]), 1), "b": Update(np.float32([-2]), 1)})

    record = server.step({"slow": Update(np.float32([1]), 1, base=base)})

    assert not record.refused
    assert record.splits[0].groups == (("a", "slow"), ("b",))


# What the user may replace


def test_the_aggregate_is_a_function_of_updates_and_weights():
    def median(updates, weights):
        assert weights.shape == (3,)
        return np.median(updates, axis=0).astype(np.float32)

    server = Server(1, rule=NeverSplit(), aggregate=median)
    server.plan(["a", "b", "c"])

    server.step({i: Update(np.float32([v]), 1) for i, v in zip("abc", [1, 2, 100], strict=True)})

    assert server.tree.root.params.tolist() == [2]


def test_a_users_rule_may_split_into_many():
    class EverybodyAlone:
        def examine(self, evidence):
            return Decision(
                node_id=evidence.node_id,
                round=evidence.round,
                verdict="split" if len(evidence.client_ids) > 1 else "train",
                reason="as I like it",
                groups=tuple((i,) for i in evidence.client_ids),
            )

    server = Server(1, rule=EverybodyAlone())
    server.plan(["a", "b", "c"])
    server.step({i: Update(np.float32([1]), 1) for i in "abc"})

    assert server.clusters == {1: ["a"], 2: ["b"], 3: ["c"]}


def decision(**changes):
    settings = {"node_id": 0, "round": 1, "verdict": "split", "reason": ""}
    return Decision(**{**settings, **changes})


BAD_DECISIONS = {
    "strangers": (decision(groups=(("a",), ("stranger",))), r"clients \['stranger'\]"),
    "one group": (decision(groups=(("a", "b"),)), r"groups of \[2\] clients"),
    "an empty group": (decision(groups=(("a", "b"), ())), r"groups of \[2, 0\] clients"),
    "no groups": (decision(), "the verdict 'split' with 0 groups"),
    "groups without a split": (
        decision(verdict="train", groups=(("a",), ("b",))),
        "the verdict 'train' with 2 groups",
    ),
    "a client in two groups": (decision(groups=(("a",), ("a", "b"))), "a client in two groups"),
    "an unknown verdict": (decision(verdict="Split"), "the verdict 'Split'"),
    "another node": (decision(node_id=77, verdict="train"), "node 77 in round 1"),
    "another round": (decision(round=99, verdict="train"), "node 0 in round 99"),
    "nothing": (None, "returned None"),
}


@pytest.mark.parametrize("name", BAD_DECISIONS)
def test_a_rule_that_decides_the_impossible_is_named_and_changes_nothing(name):
    returned, message = BAD_DECISIONS[name]

    class Confused:
        def examine(self, evidence):
            return returned

    server = Server(1, rule=Confused())
    tasks = server.plan(["a", "b"])
    before = fingerprint(server)

    with pytest.raises((ValueError, TypeError), match=message):
        server.step({"a": Update(np.float32([1]), 1), "b": Update(np.float32([1]), 1)})

    assert fingerprint(server) == before
    assert server.plan(["a", "b"])["a"].base == tasks["a"].base


def average_in_float64(updates, weights):
    return np.average(updates.astype(np.float64), axis=0, weights=weights)


def test_an_aggregate_may_work_in_float64():
    server = Server(1, rule=NeverSplit(), aggregate=average_in_float64)
    server.plan(["a"])
    server.step({"a": Update(np.float32([1]), 1)})

    assert server.tree.root.params.dtype == np.float32


@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        (lambda updates, weights: updates[:1], r"shape \(1, 2\)"),
        (lambda updates, weights: np.float32([1]), r"shape \(1,\)"),
        (lambda updates, weights: 3.0, r"shape \(\)"),
        (lambda updates, weights: [1, 2], "dtype int64"),
        (lambda updates, weights: updates[0] * np.nan, "NaN or infinity"),
        (lambda updates, weights: updates.sort(axis=0), "read-only"),
    ],
)
def test_an_aggregate_that_returns_the_impossible_is_named_and_changes_nothing(aggregate, message):
    server = Server(2, rule=NeverSplit(), aggregate=aggregate)
    server.plan(["a", "b"])
    before = fingerprint(server)

    with pytest.raises(ValueError, match=message):
        server.step({i: Update(np.float32([1, 2]), 1) for i in "ab"})

    assert fingerprint(server) == before


def test_a_rule_that_fails_once_can_be_asked_again():
    class Moody:
        moods = iter(["bad", "good"])

        def examine(self, evidence):
            if next(self.moods) == "bad":
                raise RuntimeError("not today")
            return NeverSplit().examine(evidence)

    server = Server(1, rule=Moody())
    server.plan(["a"])
    with pytest.raises(RuntimeError, match="not today"):
        server.step({"a": Update(np.float32([1]), 1)})

    record = server.step({"a": Update(np.float32([1]), 1)})

    assert (record.round, record.refused) == (1, {})
    assert server.tree.root.params.tolist() == [1]


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


def test_given_clusters_train_apart():
    server = Server(1, rule=NeverSplit())

    leaves = server.partition({"x": ["a"], "y": ["b"]}, {"y": np.float32([10])})
    server.plan(["a", "b"])
    server.step({"a": Update(np.float32([1]), 1), "b": Update(np.float32([2]), 1)})

    assert [server.tree[leaves[name]].params.tolist() for name in "xy"] == [[1], [12]]


def test_a_client_outside_given_clusters_cannot_be_routed_and_is_told_so():
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


# Calls


@pytest.mark.parametrize(
    ("client_ids", "error", "message"),
    [
        ("abc", TypeError, "pass a list"),
        ([1, 2], TypeError, "non-empty strings"),
        ([""], TypeError, "non-empty strings"),
        (["a", "b", "a"], ValueError, r"\['a'\] are named more than once"),
        (["\ud83d"], ValueError, "not valid Unicode"),
    ],
)
def test_bad_client_ids_are_named(client_ids, error, message):
    with pytest.raises(error, match=message):
        Server(1, rule=NeverSplit()).plan(client_ids)


@pytest.mark.parametrize("call", ["remove", "reroute"])
def test_unknown_clients_are_named(call):
    server = Server(1, rule=NeverSplit())
    with pytest.raises(ValueError, match=r"\['ghost'\] are not known"):
        getattr(server, call)(["ghost"])
    with pytest.raises(TypeError, match="pass a list"):
        getattr(server, call)("ghost")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weighting": "size"}, "weighting is 'size'"),
        ({"compare": "gradient"}, "compare is 'gradient'"),
        ({"max_examples": 0}, "max_examples is 0"),
        ({"max_examples": float("inf")}, "max_examples is inf"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Server(1, rule=NeverSplit(), **settings)


def test_a_task_cannot_be_used_to_change_the_server():
    server = Server(2, rule=NeverSplit())
    task = server.plan(["a"])["a"]

    with pytest.raises(ValueError, match="read-only"):
        task.params[0] = 1


def test_a_client_may_reuse_its_buffer_after_sending():
    server = Server(2, rule=THRESHOLDS)
    server.plan(["a", "b", "c"])
    mine = np.float32([2, 0])
    server.step({"a": Update(mine, 1), "b": Update(np.float32([-2, 0]), 1)})
    mine[:] = 99  # the cluster holds; the collected update must not change

    server.plan(["c"])
    record = server.step({"c": Update(np.float32([1, 0.1]), 1)})

    assert record.splits[0].measurements["max_norm"] < 3


# Order and files


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


@pytest.mark.parametrize("stop", [1, 7, 12, 13, 14, 15, 16, 30])
def test_a_loaded_server_goes_on_as_if_nothing_had_happened(tmp_path, stop):
    def play(server, clients, first, last):
        for number in range(first, last):
            rng = np.random.default_rng(number)
            asked = [str(i) for i in sorted(rng.choice(clients.client_ids, 8, replace=False))]
            clients.play_round(server, asked)

    clients = QuadraticClients(num_groups=3, clients_per_group=4)
    undisturbed = server_for(clients)
    play(undisturbed, clients, 0, 40)
    interrupted = server_for(clients)
    play(interrupted, clients, 0, stop)
    interrupted.save(tmp_path)

    resumed = Server.load(tmp_path)

    assert fingerprint(resumed) == fingerprint(interrupted)
    play(resumed, clients, stop, 40)
    assert fingerprint(resumed) == fingerprint(undisturbed)


def test_a_reply_from_before_a_restart_is_refused_if_the_parameters_went_another_way(tmp_path):
    server = Server(1, rule=NeverSplit())
    server.plan(["a", "b", "c"])
    server.save(tmp_path)
    server.step({"a": Update(np.float32([1]), 1)})
    before_the_crash = server.plan(["c"])["c"].base

    restarted = Server.load(tmp_path)
    restarted.step({"b": Update(np.float32([-50]), 1)})
    record = restarted.step({"c": Update(np.float32([1]), 1, base=before_the_crash)})

    assert "computed at other parameters" in record.refused["c"]


def holding_server(num_rounds, folder=None):
    """A cluster that collects two replies a round; it is saved after each."""
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


def held_files(folder):
    return {path.name.rsplit("-", 1)[0]: path.stat().st_ino for path in folder.glob("held-*")}


def test_replies_that_are_held_are_written_once(tmp_path):
    holding_server(3, tmp_path)
    before = held_files(tmp_path)
    server = Server.load(tmp_path)
    server.plan(["c6"])
    server.step({"c6": Update(np.float32([-1, 0.25]), 1)})

    server.save(tmp_path)

    after = held_files(tmp_path)
    assert {"held-0-1", "held-0-2", "held-0-3"} == before.keys()
    assert after.keys() == before.keys() | {"held-0-4"}
    assert all(after[name] == before[name] for name in before)


def test_when_a_server_was_saved_does_not_show_in_what_it_holds(tmp_path):
    often, once = holding_server(4, tmp_path / "often"), holding_server(4)
    for server in (often, once):
        server.remove(["c2", "c4", "c5"])
    often.save(tmp_path / "often")

    loaded = Server.load(tmp_path / "often")

    assert fingerprint(often) == fingerprint(once) == fingerprint(loaded)
    state, files = once.to_state()
    assert [list(held) for held in state["cases"]["0"]["held"].values()] == [
        ["c0", "c1"],
        ["c3"],
        ["c6", "c7"],
    ]
    assert files["held-0-2"]["vector"].tolist() == [[1, 0.25]]


@pytest.mark.parametrize(
    "edit",
    [
        lambda held, _: held.update({"3": held["1"]}),
        lambda held, _: held.update({"2": held["1"]}),
        lambda held, _: held.update({"x": held.pop("1")}),
        lambda held, _: held.update({"1": {}}),
        lambda held, _: held["1"].update(c9=held["1"]["c0"]),
        lambda held, _: held["1"].update(c0=None),
        lambda held, _: held.update({"1": None}),
        lambda _, files: files.pop("held-0-1"),
        lambda _, files: files.update({"held-0-1": {}}),
        lambda _, files: files.update({"held-0-1": {"vector": np.ones((2, 2))}}),
        lambda _, files: files.update({"held-0-1": {"vector": np.float32(1)}}),
    ],
)
def test_held_replies_that_cannot_be_are_refused(edit):
    state, files = holding_server(2).to_state()
    edit(state["cases"]["0"]["held"], files)

    with pytest.raises(DamagedFile, match="contradicts itself"):
        Server.from_state(state, files)


def test_numbers_of_other_libraries_can_be_saved(tmp_path):
    rule = Thresholds(
        eps_mean=np.float32(0.5), eps_max=1, gamma_max=0.5, min_cluster_size=np.int64(2)
    )
    server = Server(np.prod((2, 3)), rule=rule, max_examples=np.int64(50))

    server.save(tmp_path)

    assert Server.load(tmp_path).options.rule == rule


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


def test_nobody_is_removed_if_one_of_them_cannot_be():
    server = Server(1, rule=NeverSplit())
    server.plan(["a", "b"])

    for ids in (["a", "ghost"], ["a", "a", "b"]):
        with pytest.raises(ValueError, match=r"not known|more than once"):
            server.remove(ids)
    assert server.tree.client_ids == ["a", "b"]


def test_a_record_survives_json():
    clients = QuadraticClients(num_groups=2, clients_per_group=2)
    server = server_for(clients)
    for number in range(30):
        asked = clients.client_ids if number > 25 else clients.client_ids[:3]
        record = clients.play_round(server, asked)

        assert RoundRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


class Federation(RuleBasedStateMachine):
    """Clients come, answer, lie, leave and return in any order; the server is saved and loaded."""

    def __init__(self):
        super().__init__()
        self.clients = QuadraticClients(num_groups=3, clients_per_group=3)
        self.server = server_for(
            self.clients,
            Thresholds(eps_mean=0.8, eps_max=0.5, gamma_max=0.5, coverage=0.7, max_hold_rounds=3),
        )

    @rule(asked=st.sets(st.integers(0, 8)))
    def play(self, asked):
        ids = [self.clients.client_ids[i] for i in sorted(asked)]
        before = {i: self.server.tree.position(i) for i in ids if i in self.server.tree}
        record = self.clients.play_round(self.server, ids)
        assert not record.refused
        for decision in record.splits:
            answered = sum(len(group) for group in decision.groups)
            assert answered >= 0.7 * decision.measurements["num_members"] - 1e-9
        for client_id, node_id in before.items():
            path = [n.id for n in self.server.tree.path(self.server.tree.position(client_id))]
            assert node_id in path  # one only ever moves down

    @rule(sender=st.integers(0, 8), entry=st.sampled_from([np.nan, np.inf, 0.0]))
    def lie(self, sender, entry):
        client_id = self.clients.client_ids[sender]
        tasks = self.server.plan([client_id])
        vector = np.full(DIM, entry, dtype=np.float32)
        params = {node.id: node.params.copy() for node in self.server.tree}
        record = self.server.step({i: Update(vector, 1) for i in tasks})
        assert set(record.refused) == set(tasks)
        held = {d.node_id for d in record.decisions}
        for node_id, before in params.items():
            assert node_id in held or np.array_equal(before, self.server.tree[node_id].params)

    @precondition(lambda self: self.server.tree.client_ids)
    @rule(data=st.data())
    def leave(self, data):
        self.server.remove([data.draw(st.sampled_from(self.server.tree.client_ids))])

    @precondition(lambda self: self.server.tree.client_ids)
    @rule(data=st.data())
    def reroute(self, data):
        self.server.reroute([data.draw(st.sampled_from(self.server.tree.client_ids))])

    @precondition(lambda self: not self.server.tree.root.is_leaf)
    @rule(data=st.data())
    def undo(self, data):
        inner = [node.id for node in self.server.tree if not node.is_leaf]
        self.server.undo_split(data.draw(st.sampled_from(inner)))

    @rule()
    def save_and_load(self):
        state, files = self.server.to_state()
        self.server = Server.from_state(state, files)

    @invariant()
    def every_client_has_exactly_one_position(self):
        tree = self.server.tree
        members = [i for node in tree for i in tree.members(node.id)]
        assert sorted(members) == tree.client_ids
        assert all(i in tree.members(tree.position(i)) for i in tree.client_ids)

    @invariant()
    def the_tree_is_sound(self):
        self.server.tree.check()
        assert all(np.isfinite(node.params).all() for node in self.server.tree)

    @invariant()
    def only_leaves_collect_and_only_members_are_collected(self):
        for node_id, leaf in self.server.state.leaves.items():
            assert self.server.tree[node_id].is_leaf
            replies = () if leaf.store is None else leaf.store.replies
            assert set(replies) <= set(self.server.tree.members(node_id))
            assert leaf.stands_still or not replies


Federation.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestFederation = Federation.TestCase


def test_a_described_state_does_not_change_afterwards():
    server = Server(1, rule=NeverSplit())
    server.partition({"left": ["a"], "right": ["b"]})
    state, files = server.to_state()

    server.undo_split(0)
    server.tree.advance(0, np.float32([5]))

    assert Server.from_state(state, files).tree.root.params.tolist() == [0]


# Clients that are away


def play_present(clients, server, present, rounds=1):
    """Rounds in which the driver says who is there."""
    for _ in range(rounds):
        server.mark_present(set(present) & set(server.tree.client_ids))
        record = clients.play_round(server, present)
    return record


def test_a_split_waits_for_nobody_who_has_been_away_for_long():
    clients = QuadraticClients(2, 3)
    gone, *present = clients.client_ids
    waiting, knowing = (server_for(clients, THRESHOLDS) for _ in range(2))  # want to hear all
    for server in (waiting, knowing):
        clients.play_round(server, clients.client_ids)

    for _ in range(60):
        clients.play_round(waiting, present)
    play_present(clients, knowing, present, rounds=60)

    assert len(waiting.clusters) == 1
    assert len(knowing.clusters) == 2
    assert knowing.tree.position(gone) == knowing.tree.root.id  # and is routed when it returns
    play_present(clients, knowing, clients.client_ids, rounds=2)
    assert clients.are_separated(knowing)


def test_members_are_counted_out_after_ten_rounds_and_in_at_once():
    clients = QuadraticClients(2, 3)
    server = server_for(clients, NeverSplit())
    server.join(clients.client_ids)

    def counted(present):
        record = play_present(clients, server, present)
        return record.decisions[0].measurements["num_members"]

    assert counted(clients.client_ids) == 6
    assert [counted(clients.client_ids[2:]) for _ in range(12)] == [6] * 9 + [4] * 3
    assert counted(clients.client_ids[1:]) == 5


def test_a_client_that_is_there_but_not_asked_is_not_away():
    clients = QuadraticClients(2, 3)
    server = server_for(clients, NeverSplit())
    server.join(clients.client_ids)

    for _ in range(30):
        server.mark_present(clients.client_ids)
        record = clients.play_round(server, clients.client_ids[:2])

    assert record.decisions[0].measurements["num_members"] == 6


def test_who_is_away_survives_saving(tmp_path):
    clients = QuadraticClients(2, 3)
    server = server_for(clients, NeverSplit())
    server.join(clients.client_ids)
    play_present(clients, server, clients.client_ids[2:], rounds=7)
    server.save(tmp_path)

    resumed = Server.load(tmp_path)

    for one in (server, resumed):
        record = play_present(clients, one, clients.client_ids[2:], rounds=4)
        assert record.decisions[0].measurements["num_members"] == 4
    assert fingerprint(server) == fingerprint(resumed)


def test_unknown_clients_cannot_be_present():
    with pytest.raises(ValueError, match="not known"):
        Server(1, rule=NeverSplit()).mark_present(["nobody"])


class SketchedClients(QuadraticClients):
    """They send what is averaged, and a few numbers of it to be compared."""

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


def test_clusters_are_found_and_newcomers_routed_by_short_signals():
    clients, server = sketched()
    late = clients.client_ids[-1]
    for _ in range(40):
        clients.play_round(server, [i for i in clients.client_ids if i != late])
    for _ in range(4):
        clients.play_round(server, clients.client_ids)

    assert clients.are_separated(server)
    cached = {u.shape for node in server.tree for u in node.cached_updates.values()}
    assert cached == {(DIM // 2,)}
    for leaf in server.tree.leaves:  # trained by whole updates
        optima = np.mean([clients.optimum[i] for i in server.tree.members(leaf.id)], axis=0)
        np.testing.assert_allclose(leaf.params, optima, atol=0.05)


@pytest.mark.parametrize("stop", [1, 7, 12, 13, 14, 15, 16, 30])
def test_a_server_that_compares_short_signals_goes_on_after_loading(tmp_path, stop):
    def play(server, clients, first, last):
        for number in range(first, last):
            rng = np.random.default_rng(number)
            asked = [str(i) for i in sorted(rng.choice(clients.client_ids, 8, replace=False))]
            clients.play_round(server, asked)

    clients, undisturbed = sketched()
    play(undisturbed, clients, 0, 40)
    _, interrupted = sketched()
    play(interrupted, clients, 0, stop)
    interrupted.save(tmp_path)

    resumed = Server.load(tmp_path)

    assert resumed.num_signal == DIM // 2
    play(resumed, clients, stop, 40)
    assert fingerprint(resumed) == fingerprint(undisturbed)


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


def test_a_state_from_before_short_signals_still_loads():
    clients = QuadraticClients(num_groups=2, clients_per_group=3)
    server = server_for(clients)
    for _ in range(20):
        clients.play_round(server, clients.client_ids)
    state, files = server.to_state()
    del state["num_signal"]

    loaded = Server.from_state(state, files)

    assert len(loaded.clusters) == 2
    assert fingerprint(loaded) == fingerprint(server)


def test_cached_signals_of_another_length_are_noticed():
    clients, server = sketched(num_groups=2)
    for _ in range(20):
        clients.play_round(server, clients.client_ids)
    state, files = server.to_state()
    assert len(server.clusters) == 2

    with pytest.raises(DamagedFile, match="cached is not 7 long"):
        Server.from_state(state | {"num_signal": 7}, files)


@pytest.mark.parametrize("settings", [{"compare": "signal", "num_signal": 0}, {"num_signal": 5}])
def test_an_impossible_length_of_signals_is_named(settings):
    with pytest.raises(ValueError, match=r"num_signal is \d with compare="):
        Server(10, **settings)


class Nameless:
    """An id that cannot even be shown."""

    def __str__(self):
        raise RuntimeError("no name")

    __repr__ = __str__


def test_an_id_that_cannot_be_shown_is_refused_like_any_other():
    server = Server(1)
    server.plan(["a"])

    record = server.step(
        [(Nameless(), Update(np.float32([1]), 1)), ("a", Update(np.float32([1]), 1))]
    )

    assert list(record.refused) == ["<Nameless instance>"]


def test_a_base_of_a_megabyte_is_refused_in_a_few_words():
    server = Server(1)
    server.plan(["a"])

    record = server.step({"a": Update(np.float32([1]), 1, base="x" * 1_000_000)})

    assert len(record.refused["a"]) < 300


def test_losses_of_what_is_no_client_are_refused():
    server = Server(1)
    server.plan(["a"])

    record = server.step({}, losses={3: [1.0], "b": [1.0]})

    assert set(record.refused) == {"3", "b"}
    with pytest.raises(TypeError, match="losses is a list; pass a mapping"):
        server.step({}, losses=[1.0])
