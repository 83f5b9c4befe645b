"""The simulated clients: presence, visits to examples, halves, description."""

from dataclasses import replace

import numpy as np
import pytest
from torch import nn

import fedbranch as fb
from fedbranch.sim.clients import Population
from sim.engines.small_problems import SGD, mlp, tasks_at_two_leaves
from sim.engines.small_problems import make_clients as make_random_clients
from sim.two_groups import TRAINING, make_clients, make_model


def test_every_round_records_its_visits_to_examples():
    run = fb.fedavg(
        make_model(),
        make_clients(),
        rounds=2,
        training=fb.LocalTraining(epochs=3, batch_size=7),
        participation=0.5,
    )

    assert [entry.num_visits for entry in run.history] == [3 * 3 * 40] * 2


def test_clients_join_and_leave_in_their_rounds():
    rng = np.random.default_rng(0)
    times = [(1, None), (1, 3), (2, None), (3, 5), (4, None)]
    clients = {
        f"c{i}": fb.ClientData(
            train=(rng.normal(size=(9, 3)), rng.integers(0, 2, 9)), joins=joins, leaves=leaves
        )
        for i, (joins, leaves) in enumerate(times)
    }

    run = fb.fedavg(nn.Linear(3, 2), clients, rounds=6, training=fb.LocalTraining(epochs=1))

    for entry in run.history:
        expected = [i for i, client in clients.items() if client.takes_part(entry.record.round)]
        assert sorted(entry.record.metrics) == expected


@pytest.mark.parametrize("settings", [SGD, {"steps": 3, "batch_size": 4}])
def test_every_visit_is_counted_on_halves_too(settings):
    clients, training = make_random_clients([3, 30, 41]), fb.LocalTraining(**settings)
    population = Population(mlp(), clients, training, seed=0, device="cpu", engine="reference")
    _, tasks = tasks_at_two_leaves(mlp(), clients)
    on_halves = {i: replace(task, halves=1) for i, task in tasks.items()}

    expected = sum(map(training.num_visits, [3, 30, 41]))
    assert population.num_visits(tasks) == expected
    if "epochs" in settings:  # then each example is visited twice as often as without halves
        few = training.num_visits(3)  # too few examples for halves
        assert population.num_visits(on_halves) == 2 * (expected - few) + few
    else:
        assert population.num_visits(on_halves) == 9 + 4 * (3 * 4)


def test_the_seed_of_the_run_decides_on_the_halves():
    clients, training = make_random_clients([30]), fb.LocalTraining(**SGD)
    _, tasks = tasks_at_two_leaves(mlp(), clients)
    on_halves = {i: replace(task, halves=1) for i, task in tasks.items()}

    def difference(seed):
        population = Population(mlp(), clients, training, seed=seed, device="cpu")
        batch = population.engine.updates(on_halves, {"c0": 1})
        return batch.half_differences

    assert np.array_equal(difference(1), difference(1))
    assert not np.array_equal(difference(1), difference(2))


def digests_of(**parts):
    x, y = np.arange(6, dtype=np.float32).reshape(3, 2), [0, 1, 0]
    client = fb.ClientData((x, y), **{name: (x[:n], y[:n]) for name, n in parts.items()})
    population = Population(
        nn.Linear(2, 2), {"a": client}, TRAINING, seed=0, device="cpu", engine="reference"
    )
    return population.describe()["clients"][0]


def test_only_clients_with_validation_examples_are_described_by_them():
    described = [digests_of(), digests_of(test=2), digests_of(validation=2)]
    both = digests_of(test=2, validation=2)

    assert len({entry["data"] for entry in [*described, both]}) == 4
    assert "num_validation" not in described[1]
    assert both["num_validation"] == 2
    # The digest of run folders that are older than validation examples.
    assert described[1]["data"].startswith("b49ad62510ab")
