import copy
import inspect
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg, Result, Strategy

import fedbranch as fb
from fakes import fingerprint
from fedbranch.errors import DamagedFile, FederationStalled, UnusableRun
from fedbranch.flower import ClusteredStrategy, exchange, federation
from fedbranch.flower.testing import FakeNode
from fedbranch.report.facts.run import read_run
from fedbranch.runs import RunFolder
from fedbranch.server.state import ServerState
from flower.federations import (
    RULE,
    SEED,
    TRAINING,
    Killed,
    contents_of,
    kill_after,
    make_clients,
    make_grid,
    make_model,
    start,
)


def simulate(clients, model, **settings):
    return fb.simulate(
        model,
        clients,
        **{
            "rule": RULE,
            "rounds": 30,
            "training": TRAINING,
            "seed": SEED,
            "engine": "reference",
            **settings,
        },
    )


def tree_fingerprint(tree):
    server = fb.Server(tree.num_params, num_buffers=tree.num_buffers, rule=RULE)
    server.state = ServerState.of(tree)
    return fingerprint(server)


def assert_same(result, run):
    """The trees with all parameters and positions, the decisions and the evaluations."""
    assert result.clusters == run.clusters
    assert tree_fingerprint(result.tree) == tree_fingerprint(run.tree)
    for federated, simulated in zip(result.history, run.history, strict=True):
        assert federated.record.decisions == simulated.record.decisions
        assert federated.record.routed == simulated.record.routed
        assert federated.record.metrics == simulated.record.metrics
        assert federated.evaluation == simulated.evaluation


@pytest.mark.parametrize("has_buffers", [False, True])
def test_a_federation_gives_the_same_bytes_as_the_simulator(has_buffers):
    clients, model = make_clients(), make_model(has_buffers=has_buffers)

    result = start(make_grid(clients, copy.deepcopy(model)), model=model)

    assert len(result.clusters) == 2
    assert_same(result, simulate(clients, model))


def test_a_sampled_fraction_gives_the_same_bytes_as_the_simulator():
    clients, model = make_clients(num_clients=8), make_model()

    result = start(
        make_grid(clients, copy.deepcopy(model)),
        model=model,
        num_rounds=60,
        fraction_train=0.5,
    )

    assert len(result.clusters) == 2
    assert_same(result, simulate(clients, model, rounds=60, participation=0.5))


def test_a_newcomer_after_the_split_is_routed_as_in_the_simulator():
    clients, model = make_clients(num_clients=7, joins=28), make_model()
    grid = make_grid(clients, copy.deepcopy(model))
    newcomer = grid.disconnect(FakeNode.simulated(6, 7).node_id)

    def connect_the_newcomer(number, arrays):
        if number == 27:
            grid.connect(newcomer)

    result = start(
        grid, model=model, num_rounds=35, start_with={"evaluate_fn": connect_the_newcomer}
    )

    assert [move.client_id for entry in result.history for move in entry.record.routed] == [
        "partition-0006"
    ]
    assert result.assignments["partition-0006"] == result.assignments["partition-0000"]
    assert_same(result, simulate(clients, model, rounds=35))


@pytest.mark.parametrize("cache", [fb.Sketched(size=16), "disk"])
def test_edges_are_kept_as_in_the_simulator(cache, tmp_path):
    cache = fb.OnDisk(folder=tmp_path) if cache == "disk" else cache
    clients, model = make_clients(), make_model()

    result = start(make_grid(clients, copy.deepcopy(model)), model=model, cache=cache)

    assert result.tree.cache == cache
    assert_same(result, simulate(clients, model, cache=cache))


# In place of FedAvg


def test_it_takes_what_fedavg_takes():
    fedavg = inspect.signature(FedAvg).parameters
    clustered = inspect.signature(ClusteredStrategy).parameters

    assert [(p.name, p.default) for p in fedavg.values()] == [
        (p.name, p.default) for p in list(clustered.values())[: len(fedavg)]
    ]
    ours, flowers = (inspect.signature(c.start).parameters for c in (ClusteredStrategy, Strategy))
    assert [(p.name, p.default) for p in ours.values()] == [
        (p.name, p.default) for p in flowers.values()
    ]


def test_a_rule_that_never_splits_is_fedavg():
    clustered = start(make_grid(), num_rounds=5, rule=fb.NeverSplit())

    federated = FedAvg().start(
        make_grid(), ArrayRecord(make_model().state_dict()), num_rounds=5, timeout=5
    )

    assert isinstance(clustered, Result)
    for name, array in federated.arrays.items():
        np.testing.assert_allclose(
            clustered.arrays[name].numpy(), array.numpy(), rtol=1e-5, atol=1e-6
        )
    for number in range(1, 6):
        for metrics in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
            ours, theirs = (getattr(r, metrics)[number] for r in (clustered, federated))
            for name, value in theirs.items():
                assert ours[name] == pytest.approx(value, rel=1e-4)


def test_all_nodes_at_a_position_get_the_same_record():
    grid = make_grid()

    result = start(grid)

    last = [m for m in grid.sent if m.metadata.group_id == "30"]
    assert len({id(message.content) for message in last}) == 2 * len(result.clusters)
    assert {m.content["config"]["server-round"] for m in last} == {30}


def test_the_users_config_arrives_and_stays_as_it_was():
    grid, config = make_grid(), ConfigRecord({"lr": 0.5})

    start(grid, num_rounds=1, start_with={"train_config": config})

    assert grid.sent[0].content["config"] == ConfigRecord({"lr": 0.5, "server-round": 1})
    assert config == ConfigRecord({"lr": 0.5})


def test_a_strategy_without_start_says_what_to_do():
    strategy = ClusteredStrategy(rule=RULE)

    with pytest.raises(RuntimeError, match="call its own start"):
        strategy.configure_train(1, ArrayRecord(), ConfigRecord(), make_grid())


def test_what_a_user_of_fedavg_would_not_expect_is_said(caplog):
    strategy = ClusteredStrategy(rule=RULE, weighted_by_key="num_examples")
    strategy.start(make_grid(), ArrayRecord(make_model().state_dict()), num_rounds=1)
    assert "No client's update was ever used" in caplog.text
    assert "with 'num_examples' (the strategy's weighted_by_key)" in caplog.text
    assert "Its metrics are ['loss', 'num-examples']" in caplog.text

    start(make_grid(), num_rounds=2)
    assert "node 0: train: mean " in caplog.text
    assert "Nothing was split: not stationary" in caplog.text

    start(make_grid())
    assert "result.arrays is the model at the root" in caplog.text


def test_a_client_that_is_not_there_is_named_beside_those_who_are():
    result = start(make_grid(), num_rounds=1)

    with pytest.raises(
        ValueError, match=r"no client 'hospital'; the clients are \['partition-0000"
    ):
        result.arrays_of("hospital")


@pytest.mark.parametrize("timeout", [None, 0, -1, float("inf"), float("nan")])
def test_a_timeout_is_a_number_of_seconds(timeout):
    with pytest.raises(ValueError, match=f"timeout is {timeout}"):
        start(make_grid(), timeout=timeout)


def test_a_rule_is_an_object_and_not_its_class():
    with pytest.raises(TypeError, match="pass an object that can examine a cluster"):
        start(make_grid(), rule=fb.Thresholds)


def test_it_can_be_started_again():
    strategy = ClusteredStrategy(rule=RULE, seed=SEED)
    arrays = ArrayRecord(make_model().state_dict())

    first, second = (strategy.start(make_grid(), arrays, num_rounds=3) for _ in range(2))

    assert tree_fingerprint(first.tree) == tree_fingerprint(second.tree)


def test_a_subclass_can_change_what_is_sent():
    class Slower(ClusteredStrategy):
        def configure_train(self, server_round, arrays, config, grid):
            config = ConfigRecord({**config, "lr": 1 / server_round})
            messages = list(super().configure_train(server_round, arrays, config, grid))
            return [
                Message(m.content, m.metadata.dst_node_id, m.metadata.message_type)
                for m in messages[1:]
            ]

    grid = make_grid()
    strategy = Slower(rule=RULE, seed=SEED)
    result = strategy.start(grid, ArrayRecord(make_model().state_dict()), num_rounds=2, timeout=5)

    sent = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert [m.content["config"]["lr"] for m in sent] == [1.0] * 5 + [0.5] * 5
    for entry in result.history:
        assert len(entry.record.metrics) == 5
        assert not entry.record.refused


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"fraction_train": 1.5}, "fraction_train is 1.5"),
        ({"fraction_evaluate": -1}, "fraction_evaluate is -1"),
        ({"min_available_nodes": -1}, "min_available_nodes is -1"),
        ({"resume": True}, "resume=True without a checkpoint_dir"),
    ],
)
def test_nonsense_is_an_error(settings, problem):
    with pytest.raises(ValueError, match=problem):
        ClusteredStrategy(rule=RULE, **settings)


# Evaluation


def test_metrics_are_given_for_every_cluster_and_overall():
    result = start(make_grid())

    last = result.evaluate_metrics_clientapp[30]
    leaves = sorted(result.clusters)
    assert set(last) == {
        *("loss", "accuracy"),
        *(f"leaf-{leaf}/{name}" for leaf in leaves for name in ("loss", "accuracy")),
    }
    evaluation = result.history[-1].evaluation
    for leaf, client_ids in result.clusters.items():  # all have 20 test examples
        mean = np.mean([evaluation[client_id]["accuracy"] for client_id in client_ids])
        assert last[f"leaf-{leaf}/accuracy"] == pytest.approx(mean)
    mean = np.mean([metrics["accuracy"] for metrics in evaluation.values()])
    assert last["accuracy"] == pytest.approx(mean)
    assert f"leaf-{leaves[0]}/loss" in result.train_metrics_clientapp[30]


def test_the_servers_evaluation_sees_every_leaf():
    seen = []

    def evaluate(number, arrays):
        seen.append(number)
        return MetricRecord({"size": float(np.abs(arrays["0.weight"].numpy()).sum())})

    result = start(make_grid(), start_with={"evaluate_fn": evaluate})

    assert seen.count(0) == seen.count(1) == 1
    assert seen.count(30) == len(result.clusters) == 2
    sizes = {
        leaf: float(np.abs(result.arrays_at(leaf)["0.weight"].numpy()).sum())
        for leaf in result.clusters
    }
    last = result.evaluate_metrics_serverapp[30]
    assert {f"leaf-{leaf}/size": size for leaf, size in sizes.items()}.items() <= last.items()
    weights = [len(ids) for ids in result.clusters.values()]
    assert last["size"] == pytest.approx(np.average(list(sizes.values()), weights=weights))


def test_a_users_aggregation_gets_the_replies_without_arrays():
    calls = []

    def largest(contents, weighted_by_key):
        calls.append([list(content) for content in contents])
        return MetricRecord({"largest": max(c["metrics"]["loss"] for c in contents)})

    result = start(make_grid(), num_rounds=1, train_metrics_aggr_fn=largest)

    assert calls == [[["metrics"]] * 6] * 2
    assert set(result.train_metrics_clientapp[1]) == {"largest", "leaf-0/largest"}


def test_without_evaluation_nobody_is_asked_for_it():
    grid = make_grid()

    result = start(grid, num_rounds=2, fraction_evaluate=0.0)

    assert {message.metadata.message_type for message in grid.sent} == {"train"}
    assert result.evaluate_metrics_clientapp == {}


def test_the_root_keeps_what_plain_learning_came_to():
    result = start(make_grid())

    root = result.tree.root
    assert not root.is_leaf
    np.testing.assert_array_equal(
        result.arrays["0.weight"].numpy(), result.arrays_at(root.id)["0.weight"].numpy()
    )
    of_client = result.arrays_of("partition-0001")["0.weight"].numpy()
    assert not np.array_equal(result.arrays["0.weight"].numpy(), of_client)


# Coming and going


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


def test_nobody_takes_the_place_of_a_simulated_node_that_is_gone():
    grid = make_grid()

    def lose_the_first(number, arrays):
        if number == 2:
            grid.disconnect(FakeNode.simulated(0, 6).node_id)

    result = start(grid, num_rounds=4, start_with={"evaluate_fn": lose_the_first})

    took_part = [sorted(entry.record.metrics) for entry in result.history]
    everybody = [f"partition-{i:04d}" for i in range(6)]
    assert took_part == [everybody, everybody, everybody[1:], everybody[1:]]


def test_a_standing_cluster_gives_absent_clients_time_to_come(monkeypatch):
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


def test_a_readable_late_reply_counts_if_the_newer_one_is_bad():
    slow = FakeNode.simulated(0, 6).node_id
    withheld = []

    def on_reply(message, reply):
        if message.metadata.message_type != "train" or message.metadata.dst_node_id != slow:
            return reply
        withheld.append(reply)
        if len(withheld) == 1:
            return None
        return [withheld[-2], Message(Error(code=2, reason="out of memory"), reply_to=message)]

    rule = replace(RULE, eps_mean=9.0, eps_max=1e-6, min_cluster_size=2, coverage=1.0)
    result = start(make_grid(on_reply=on_reply), num_rounds=2, timeout=1, rule=rule)

    assert [d.verdict for e in result.history for d in e.record.decisions] == ["hold", "split"]
    assert not result.history[1].record.refused


def test_what_somebody_holds_on_to_is_not_written_over():
    kept = []

    class Keeping:
        def examine(self, evidence):
            kept.append((evidence.updates, evidence.updates.copy()))
            return fb.NeverSplit().examine(evidence)

    start(make_grid(), num_rounds=4, rule=Keeping())

    assert len(kept) == 4
    for updates, copied in kept:
        np.testing.assert_array_equal(updates, copied)


def test_messages_that_nobody_answers_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(exchange, "SECONDS_BETWEEN_ROLL_CALLS", 0.01)
    restarted = FakeNode.simulated(0, 6)

    def on_reply(message, reply):
        if message.metadata.dst_node_id != restarted.node_id:
            return reply
        grid.connect(replace(restarted, last_activated_at=message.metadata.group_id))
        return None

    grid = make_grid(on_reply=on_reply)
    strategy = ClusteredStrategy(rule=RULE, seed=SEED, fraction_evaluate=0.0)
    # Messages live for hours; models are not to.
    strategy.start(grid, ArrayRecord(make_model().state_dict()), num_rounds=12, timeout=3600)

    assert [one.round for one in strategy._running.late] == [11, 12]


def test_without_training_clients_are_evaluated_all_the_same():
    result = start(make_grid(), num_rounds=1, fraction_train=0.0)

    assert len(result.history[0].evaluation) == 6


def test_no_split_waits_for_ever_for_clients_that_vanished():
    grid = make_grid(make_clients(num_clients=10))

    def lose_four(number, arrays):
        if number == 1:
            for i in range(6, 10):
                grid.disconnect(FakeNode.simulated(i, 10).node_id)

    result = start(grid, num_rounds=40, timeout=0.02, start_with={"evaluate_fn": lose_four})

    assert len(result.clusters) == 2
    assert len(result.assignments) == 10


def test_a_late_reply_is_used_if_its_cluster_stood_still():
    slow = FakeNode.simulated(0, 6).node_id
    withheld = []

    def on_reply(message, reply):
        if message.metadata.message_type != "train":
            return reply
        if message.metadata.dst_node_id == slow:
            withheld.append(reply)
            return withheld.pop(0) if len(withheld) > 1 else None
        return reply

    rule = replace(RULE, eps_mean=9.0, eps_max=1e-6, min_cluster_size=2, coverage=1.0)
    result = start(make_grid(on_reply=on_reply), num_rounds=2, timeout=1, rule=rule)

    assert [d.verdict for e in result.history for d in e.record.decisions] == ["hold", "split"]
    assert "partition-0000" not in result.history[0].record.metrics
    assert "partition-0000" in result.history[1].record.metrics


def test_a_node_that_was_started_again_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(exchange, "SECONDS_BETWEEN_ROLL_CALLS", 0.01)
    restarted = FakeNode.simulated(0, 6)

    def on_reply(message, reply):
        if message.metadata.dst_node_id != restarted.node_id or message.metadata.group_id != "2":
            return reply
        grid.connect(replace(restarted, last_activated_at=message.metadata.message_type))
        return None

    grid = make_grid(on_reply=on_reply)
    result = start(grid, num_rounds=3, timeout=3600)  # the test would time out

    took_part = ["partition-0000" in entry.record.metrics for entry in result.history]
    assert took_part == [True, False, True]
    assert "it was stopped" in result.history[1].record.refused["partition-0000"]


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


# Stopping and going on


@pytest.mark.parametrize("has_buffers", [False, True])
@pytest.mark.parametrize("killed_after", [1, 20, 29])
def test_a_killed_server_app_goes_on_to_the_same_bytes(tmp_path, has_buffers, killed_after):
    clients = make_clients()

    def run(folder, *, seed=0, **more):
        model = make_model(seed, has_buffers=has_buffers)
        grid = make_grid(clients, copy.deepcopy(model))
        return start(grid, model=model, checkpoint_dir=folder, **more)

    whole = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "cut", start_with=kill_after(killed_after))

    # The app draws other initial numbers when it starts again: those of the run count.
    resumed = run(tmp_path / "cut", seed=1, resume=True)

    assert contents_of(tmp_path / "whole") == contents_of(tmp_path / "cut")
    assert resumed.evaluate_metrics_clientapp == whole.evaluate_metrics_clientapp
    assert resumed.train_metrics_clientapp == whole.train_metrics_clientapp
    assert resumed.history == whole.history
    assert resumed.arrays == whole.arrays


def test_a_resumed_run_remembers_who_has_been_away(tmp_path):
    def run(folder, killed_in=None, **more):
        grid = make_grid(make_clients(num_clients=10))

        def lose_four(number, arrays):
            if number == 1 or more:
                for i in range(6, 10):
                    grid.nodes.pop(FakeNode.simulated(i, 10).node_id, None)
            if number == killed_in:
                raise Killed

        return start(
            grid,
            num_rounds=30,
            timeout=0.02,
            checkpoint_dir=folder,
            start_with={"evaluate_fn": lose_four},
            **more,
        )

    whole = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "cut", killed_in=8)
    run(tmp_path / "cut", resume=True)

    assert len(whole.clusters) == 2
    assert contents_of(tmp_path / "whole") == contents_of(tmp_path / "cut")


def test_fewer_rounds_and_then_more_end_as_one_run_does(tmp_path):
    start(make_grid(), num_rounds=12, checkpoint_dir=tmp_path / "whole")
    with pytest.raises(Killed):
        start(make_grid(), num_rounds=12, checkpoint_dir=tmp_path / "cut", start_with=kill_after(6))
    folder = tmp_path / "cut"
    for rounds, done in [(8, 8), (3, 8), (12, 12)]:
        start(make_grid(), num_rounds=rounds, checkpoint_dir=folder, resume=True)
        assert RunFolder(folder).is_complete
        assert RunFolder(folder).about["rounds"] == RunFolder(folder).summary["rounds"] == done

    assert contents_of(tmp_path / "whole") == contents_of(folder)


def test_a_lost_state_is_damage_and_not_a_new_start(tmp_path):
    start(make_grid(), num_rounds=5, checkpoint_dir=tmp_path)
    shutil.rmtree(tmp_path / "state")

    with pytest.raises(DamagedFile, match="state is missing, but rounds have been done"):
        start(make_grid(), num_rounds=9, checkpoint_dir=tmp_path, resume=True)
    assert len(RunFolder(tmp_path).history()) == 5
    assert RunFolder(tmp_path).about["rounds"] == 5


def test_another_runs_initial_model_is_damage(tmp_path):
    start(make_grid(), num_rounds=2, checkpoint_dir=tmp_path / "a")
    model = make_model(has_buffers=True)
    grid = make_grid(model=copy.deepcopy(model))
    start(grid, model=model, num_rounds=2, checkpoint_dir=tmp_path / "b")
    shutil.rmtree(tmp_path / "a" / "initial")
    shutil.copytree(tmp_path / "b" / "initial", tmp_path / "a" / "initial")

    with pytest.raises(DamagedFile, match="holds another model than the run"):
        start(make_grid(), num_rounds=3, checkpoint_dir=tmp_path / "a", resume=True)


def test_a_simulators_folder_is_not_resumed_as_a_federation(tmp_path):
    simulate(make_clients(), make_model(), rounds=2, folder=tmp_path)

    with pytest.raises(UnusableRun, match="its driver is not the one given now"):
        start(make_grid(), num_rounds=4, checkpoint_dir=tmp_path, resume=True)


def test_two_server_apps_cannot_write_into_one_folder(tmp_path):
    refusals = []

    def start_another(number, arrays):
        if number == 1:
            with pytest.raises(UnusableRun, match="another process is writing") as refusal:
                start(make_grid(), num_rounds=3, checkpoint_dir=tmp_path / "a", resume=True)
            refusals.append(refusal)

    start(make_grid(), num_rounds=3, checkpoint_dir=tmp_path / "b")
    start(
        make_grid(),
        num_rounds=3,
        checkpoint_dir=tmp_path / "a",
        start_with={"evaluate_fn": start_another},
    )

    assert len(refusals) == 1
    assert contents_of(tmp_path / "a") == contents_of(tmp_path / "b")


def test_resume_without_a_run_starts_one(tmp_path):
    result = start(make_grid(), num_rounds=2, checkpoint_dir=tmp_path / "new", resume=True)

    assert len(result.history) == 2


def test_a_folder_that_is_taken_is_not_overwritten(tmp_path):
    start(make_grid(), num_rounds=2, checkpoint_dir=tmp_path / "run")

    with pytest.raises(UnusableRun, match=r"resume it \(resume=True\), or choose another"):
        start(make_grid(), num_rounds=2, checkpoint_dir=tmp_path / "run")


def test_a_complete_run_can_get_more_rounds(tmp_path):
    start(make_grid(), num_rounds=10, checkpoint_dir=tmp_path / "more")
    start(make_grid(), num_rounds=30, checkpoint_dir=tmp_path / "whole")

    start(make_grid(), num_rounds=30, checkpoint_dir=tmp_path / "more", resume=True)

    assert contents_of(tmp_path / "more") == contents_of(tmp_path / "whole")


def test_a_run_with_other_settings_is_not_resumed(tmp_path):
    start(make_grid(), num_rounds=2, checkpoint_dir=tmp_path)

    for other, name in [
        ({"rule": fb.NeverSplit()}, "rule"),
        ({"seed": 5}, "seed"),
        ({"model": make_model(has_buffers=True)}, "model"),
    ]:
        with pytest.raises(UnusableRun, match=f"its {name} is not the one given now"):
            start(make_grid(), num_rounds=4, checkpoint_dir=tmp_path, resume=True, **other)


def test_a_changed_initial_model_is_damage(tmp_path):
    start(make_grid(), num_rounds=2, checkpoint_dir=tmp_path)
    (file,) = (tmp_path / "initial").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")

    with pytest.raises(DamagedFile, match="was cut or changed"):
        start(make_grid(), num_rounds=4, checkpoint_dir=tmp_path, resume=True)


def test_a_federations_folder_is_shown_like_a_simulations(tmp_path):
    result = start(make_grid(), checkpoint_dir=tmp_path)

    run = read_run(RunFolder(tmp_path))

    assert run.is_complete
    assert run.main_metric == "accuracy"
    assert run.clusters == result.clusters
    assert len(run.splits) == 1
    assert json.loads((tmp_path / "run.json").read_text())["driver"] == "flower"
