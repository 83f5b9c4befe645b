"""The simulated clients: visits to examples, and halves."""

from dataclasses import replace

import numpy as np
import pytest

import fedbranch as fb
from fedbranch.sim.clients import SimulatedClients
from sim.engines.small_problems import SGD, mlp, tasks_at_two_leaves
from sim.engines.small_problems import make_clients as make_random_clients
from sim.two_groups import make_clients, make_model


def test_every_round_records_its_visits_to_examples():
    run = fb.fedavg(
        make_model(),
        make_clients(),
        rounds=2,
        training=fb.LocalTraining(epochs=3, batch_size=7),
        participation=0.5,
    )

    assert [entry.num_visits for entry in run.history] == [3 * 3 * 40] * 2


@pytest.mark.parametrize("settings", [SGD, {"steps": 3, "batch_size": 4}])
def test_every_visit_is_counted_on_halves_too(settings):
    clients, training = make_random_clients([3, 30, 41]), fb.LocalTraining(**settings)
    simulated = SimulatedClients(mlp(), clients, training, seed=0, device="cpu", engine="reference")
    _, tasks = tasks_at_two_leaves(mlp(), clients)
    on_halves = {i: replace(task, halves=1) for i, task in tasks.items()}

    expected = sum(map(training.num_visits, [3, 30, 41]))
    assert simulated.num_visits(tasks) == expected
    if "epochs" in settings:  # then each example is visited twice as often as without halves
        few = training.num_visits(3)  # too few examples for halves
        assert simulated.num_visits(on_halves) == 2 * (expected - few) + few
    else:
        assert simulated.num_visits(on_halves) == 9 + 4 * (3 * 4)


def test_the_seed_of_the_run_decides_on_the_halves():
    clients, training = make_random_clients([30]), fb.LocalTraining(**SGD)
    _, tasks = tasks_at_two_leaves(mlp(), clients)
    on_halves = {i: replace(task, halves=1) for i, task in tasks.items()}

    def difference(seed):
        simulated = SimulatedClients(mlp(), clients, training, seed=seed, device="cpu")
        batch = simulated.engine.updates(on_halves, {"c0": 1})
        return batch.half_differences

    assert np.array_equal(difference(1), difference(1))
    assert not np.array_equal(difference(1), difference(2))
