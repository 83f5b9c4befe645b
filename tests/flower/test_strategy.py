import copy

import numpy as np
import pytest
from flwr.app import MetricRecord

import fedbranch as fb
from fakes import fingerprint
from fedbranch.flower.testing import FakeNode
from flower.federations import (
    RULE,
    SEED,
    TRAINING,
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
    server.tree = tree
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
