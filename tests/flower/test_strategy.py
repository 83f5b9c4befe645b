"""The strategy in place of FedAvg, and beside the simulator."""

import copy
import dataclasses
import inspect
import re

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp.strategy import FedAvg, Result, Strategy

import fedbranch as fb
from fakes import fingerprint
from fedbranch.flower import ClusteredStrategy
from fedbranch.flower.testing import FakeNode
from fedbranch.server.options import OptionKeywords
from fedbranch.server.state import ServerState
from flower.federations import (
    RULE,
    SEED,
    make_clients,
    make_grid,
    make_model,
    simulate,
    start,
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


def test_a_strategy_without_start_says_what_to_do():
    strategy = ClusteredStrategy(rule=RULE)

    with pytest.raises(RuntimeError, match="call its own start"):
        strategy.configure_train(1, ArrayRecord(), ConfigRecord(), make_grid())


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
def test_settings_out_of_range_are_an_error(settings, problem):
    with pytest.raises(ValueError, match=problem):
        ClusteredStrategy(rule=RULE, **settings)


def test_help_names_every_option_of_the_server():
    documented = set(re.findall(r"- ``(\w+)``:", ClusteredStrategy.__doc__))

    assert documented == set(OptionKeywords.__annotations__)
    assert documented == {field.name for field in dataclasses.fields(fb.ServerOptions)}
