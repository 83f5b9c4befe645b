"""Training on halves and measuring trials: all engines must agree with one client alone."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedbranch as fb
from fedbranch.protocol.tasks import Trial
from fedbranch.sim.engines.reference import Reference
from fedbranch.sim.engines.stacked.engine import StackedEngine
from fedbranch.sim.engines.stacked.training import StackedTraining
from fedbranch.sim.engines.workers import Workers
from fedbranch.training.client import local_update, trial_losses
from fedbranch.training.half_split import halves_seed
from fedbranch.training.model_state import ModelState
from sim.engines.small_problems import (
    SGD,
    TOLERANCE,
    make_clients,
    mlp,
    tasks_at_two_leaves,
)

SEED = 13
SIZES = [3, 4, 5, 11, 21, 30, 30, 8, 41, 2]


CASES = {
    "padded": (mlp(), SIZES, SGD),
    "gradient": (mlp(), SIZES, SGD | {"send_gradient": True}),
    "steps and dropout": (mlp(nn.Dropout(0.3)), SIZES, {"steps": 7, "batch_size": 4}),
    "BatchNorm": (mlp(nn.BatchNorm1d(8)), SIZES, SGD),
    "BatchNorm, even": (
        mlp(nn.BatchNorm1d(8)),
        [20] * 4,
        SGD | {"optimizer": fb.sgd(0.1, momentum=0.9)},
    ),
}


def engine_of(kind, model, clients, training, **more):
    more = {"num_workers": 2} if kind is Workers else more
    work = copy.deepcopy(model)
    return kind(work, ModelState.of(model), clients, training, seed=SEED, **more)


def mixed_tasks(model, clients):
    """Make tasks: every third client trains on all examples, the others on halves 5 or 6."""
    initial, tasks = tasks_at_two_leaves(model, clients)
    numbers = [None, 5, 6]
    asked = {i: replace(task, halves=numbers[n % 3]) for n, (i, task) in enumerate(tasks.items())}
    return initial, asked


def rows_of(updates):
    """Return an update for each client, from a mapping or from a batch."""
    if not isinstance(updates, fb.UpdateBatch):
        return dict(updates)
    found = {}
    for row, client_id in enumerate(updates.client_ids):
        half = None if updates.half_differences is None else updates.half_differences[row]
        found[client_id] = fb.Update(
            vector=updates.vectors[row],
            num_examples=updates.num_examples[row],
            metrics=updates.metrics[row],
            buffers=updates.buffers[row],
            base=updates.bases[row],
            signal=None if updates.signals is None else updates.signals[row],
            half_difference=half if half is not None and half.any() else None,
        )
    return found


@pytest.mark.parametrize("kind", [Reference, StackedEngine, Workers])
@pytest.mark.parametrize("case", CASES)
def test_clients_train_on_halves_as_one_client_does_alone(case, kind):
    model, sizes, settings = CASES[case]
    clients, training = make_clients(sizes), fb.LocalTraining(**settings)
    initial, tasks = mixed_tasks(model, clients)
    seeds = {client_id: 7 + i for i, client_id in enumerate(clients)}
    engine = engine_of(kind, model, clients, training)

    updates = rows_of(engine.updates(tasks, seeds))
    engine.close()

    assert sorted(updates) == sorted(clients)
    for client_id, update in updates.items():
        expected = local_update(
            copy.deepcopy(model), initial, tasks[client_id], clients[client_id].train, training,
            seed=seeds[client_id], halves_seed=halves_seed(SEED, client_id),
        )  # fmt: skip
        has_halves = tasks[client_id].halves is not None and len(clients[client_id].train.x) >= 4
        assert (expected.half_difference is not None) == has_halves
        assert (update.half_difference is not None) == has_halves
        length = np.linalg.norm(expected.vector)
        assert np.linalg.norm(update.vector - expected.vector) <= TOLERANCE * length
        np.testing.assert_allclose(update.buffers, expected.buffers, atol=1e-4)
        assert update.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-4)
        assert update.num_examples == expected.num_examples
        assert update.base == expected.base
        if training.send_gradient:
            np.testing.assert_allclose(update.signal, expected.signal, atol=1e-5)
        if has_halves:
            scale = max(length, np.linalg.norm(expected.half_difference))
            off = np.linalg.norm(update.half_difference - expected.half_difference)
            assert off <= TOLERANCE * scale


def test_small_chunks_and_little_memory_change_no_more_than_rounding(monkeypatch):
    model, clients, training = mlp(), make_clients([9, 12, 8, 10, 20]), fb.LocalTraining(**SGD)
    _, tasks = tasks_at_two_leaves(model, clients)
    tasks = {i: replace(task, halves=1) for i, task in tasks.items()}
    seeds = dict.fromkeys(tasks, 3)
    whole = rows_of(engine_of(StackedEngine, model, clients, training).updates(tasks, seeds))
    train, sizes = StackedTraining.train, []

    def train_few(self, examples, *rest):
        if len(examples.sizes) > 2:
            raise torch.OutOfMemoryError("there is memory for two models only")
        sizes.append(len(examples.sizes))
        return train(self, examples, *rest)

    monkeypatch.setattr(StackedTraining, "train", train_few)
    small = engine_of(StackedEngine, model, clients, training, cpu_chunk_bytes=20_000)
    parts = rows_of(small.updates(tasks, seeds))

    assert sizes == [2] * 5
    for client_id, update in whole.items():
        np.testing.assert_allclose(parts[client_id].vector, update.vector, atol=1e-5)
        expected = update.half_difference
        np.testing.assert_allclose(parts[client_id].half_difference, expected, atol=1e-5)


def trials_of(model, clients):
    """Make one to four trials for each client, on all kinds of examples."""
    initial = ModelState.of(model)
    rng = np.random.default_rng(2)
    places = [
        (
            (0.3 * rng.normal(size=initial.params.numel())).astype(np.float32),
            np.full(initial.buffers.numel(), 0.1 * i, dtype=np.float32),
        )
        for i in range(3)
    ]
    kinds = [("held-out", None), ("second half", 5), ("first half", 6), ("held-out", None)]
    trials = {}
    for n, client_id in enumerate(clients):
        trials[client_id] = tuple(
            # Every client has views of its own, as in the server's trials.
            Trial(params=places[(n + k) % 3][0][:], buffers=places[(n + k) % 3][1][:],
                  on=on, halves=halves)
            for k, (on, halves) in enumerate(kinds[: n % 4 + 1])
        )  # fmt: skip
    return initial, trials


def clients_that_hold_out_in_several_ways(sizes):
    clients = make_clients(sizes)
    other = make_clients([7] * len(sizes), seed=1)
    for n, (client_id, client) in enumerate(clients.items()):
        clients[client_id] = [
            client,
            fb.ClientData(client.train, client.test, validation=other[client_id].train),
            fb.ClientData(client.train, validation=other[client_id].train),
            fb.ClientData(client.train),
        ][n // 2 % 4]
    return clients


@pytest.mark.parametrize("kind", [Reference, StackedEngine, Workers])
@pytest.mark.parametrize("case", ["padded", "BatchNorm"])
def test_trial_losses_are_what_one_client_measures_alone(case, kind):
    model, sizes, settings = CASES[case]
    clients = clients_that_hold_out_in_several_ways(sizes)
    training = fb.LocalTraining(**settings)
    initial, trials = trials_of(model, clients)
    engine = engine_of(kind, model, clients, training)

    losses = engine.losses(trials)
    again = engine.losses(trials)
    engine.close()

    assert losses == again
    can_answer = []
    for client_id, own in trials.items():
        client = clients[client_id]
        expected = trial_losses(
            copy.deepcopy(model), initial, own, client.train, client.held_out, training,
            halves_seed=halves_seed(SEED, client_id),
        )  # fmt: skip
        if expected is not None:
            can_answer.append(client_id)
            assert losses[client_id] == pytest.approx(expected, rel=1e-4)
    assert sorted(losses) == can_answer
    assert 0 < len(can_answer) < len(clients)


@pytest.mark.parametrize("kind", [Reference, StackedEngine, Workers])
def test_validation_examples_are_measured_where_there_are_any(kind):
    clients = clients_that_hold_out_in_several_ways(SIZES)
    training = fb.LocalTraining(**SGD)
    at = dict.fromkeys(clients, fb.ParameterTree(ModelState.of(mlp()).params.numel()).root)
    engine = engine_of(kind, mlp(), clients, training)

    validation, held_out = engine.measure(at, "validation"), engine.measure(at, "held_out")
    test = engine.measure(at, "test")
    engine.close()

    assert sorted(validation) == [i for i, c in clients.items() if c.validation is not None]
    assert sorted(held_out) == [i for i, c in clients.items() if c.held_out is not None]
    for client_id, metrics in held_out.items():
        assert metrics == pytest.approx(validation.get(client_id) or test[client_id])


def test_no_examples_are_kept_for_trials_that_are_over():
    clients = make_clients([20, 20, 20, 20])
    engine = engine_of(StackedEngine, mlp(), clients, fb.LocalTraining(**SGD))
    _, trials = trials_of(mlp(), clients)

    for number in range(20):
        ids = [f"c{number % 4}", f"c{(number + 1) % 4}"]
        engine.losses({i: [replace(t, halves=number) for t in trials[i]] for i in ids})

    assert len(engine.examples) <= 2


def test_without_tasks_for_halves_there_are_no_half_differences():
    clients = make_clients([30, 9])
    _, tasks = tasks_at_two_leaves(mlp(), clients)
    engine = engine_of(StackedEngine, mlp(), clients, fb.LocalTraining(**SGD))

    assert engine.updates(tasks, dict.fromkeys(tasks, 1)).half_differences is None
