"""The stack of models must compute what :mod:`fedbranch.training.client` computes, client by client."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fedbranch as fb
from fedbranch.errors import ClientFailed
from fedbranch.sim.engines.stacked.engine import StackedEngine
from fedbranch.sim.engines.stacked.training import StackedTraining
from fedbranch.training.client import evaluate, local_update
from fedbranch.training.model_state import ModelState
from fedbranch.training.seeds import stream_seed
from sim.engines.small_problems import (
    RAGGED,
    SGD,
    TOLERANCE,
    Words,
    make_clients,
    mlp,
    seeded,
    small_cnn,
    tasks_at_two_leaves,
    weighted_cross_entropy,
    word_clients,
)

CASES = {
    "sgd": (mlp(), make_clients(), SGD),
    "momentum": (mlp(), make_clients(), SGD | {
        "optimizer": fb.sgd(0.1, momentum=0.9, weight_decay=0.01)}),
    "adam": (mlp(), make_clients(), SGD | {"optimizer": fb.adam(0.01, weight_decay=0.1)}),
    "steps": (mlp(), make_clients(), {"steps": 7, "batch_size": 10}),
    "gradient": (mlp(), make_clients(), SGD | {"send_gradient": True}),
    "dropout": (mlp(nn.Dropout(0.3)), make_clients(), SGD),
    "BatchNorm, ragged": (mlp(nn.BatchNorm1d(8)), make_clients([s + 1 for s in RAGGED]), SGD),
    "BatchNorm, even": (mlp(nn.BatchNorm1d(8)), make_clients([30] * 4), SGD),
    "convolution": (small_cnn(), make_clients(shape=(1, 8, 8)), SGD),
    "no mean over rows": (mlp(), make_clients(), SGD | {"loss": weighted_cross_entropy}),
    "double precision": (mlp().double(), make_clients(), SGD),
    "frozen layer": (mlp(), make_clients(), SGD),
    "one row at a time": (mlp(), make_clients([3, 5, 4]), {"epochs": 1, "batch_size": 1}),
    "full batches": (mlp(), make_clients([30] * 3), {"steps": 4, "batch_size": 30}),
    "LSTM": (seeded(lambda: Words(nn.LSTM)), word_clients(), {"epochs": 2, "batch_size": 4}),
    "GRU": (seeded(lambda: Words(nn.GRU)), word_clients(), {"epochs": 2, "batch_size": 4}),
}  # fmt: skip


CASES["frozen layer"][0][0].requires_grad_(False)


@pytest.mark.parametrize("case", CASES)
def test_many_clients_at_once_have_the_updates_of_each_alone(case):
    model, clients, settings = CASES[case]
    training = fb.LocalTraining(**settings)
    initial, tasks = tasks_at_two_leaves(model, clients)
    seeds = {client_id: 7 + i for i, client_id in enumerate(clients)}
    engine = StackedEngine(copy.deepcopy(model), initial, clients, training)

    batch = engine.updates(tasks, seeds)
    measured = engine.measure(tasks, "test")

    assert sorted(batch.client_ids) == sorted(clients)
    alone = copy.deepcopy(model)
    for row, client_id in enumerate(batch.client_ids):
        update = local_update(
            alone, initial, tasks[client_id], clients[client_id].train, training,
            seed=seeds[client_id],
        )  # fmt: skip
        length = np.linalg.norm(update.vector)
        assert np.linalg.norm(batch.vectors[row] - update.vector) <= TOLERANCE * length
        np.testing.assert_allclose(batch.buffers[row], update.buffers, atol=1e-4)
        assert batch.metrics[row]["loss"] == pytest.approx(update.metrics["loss"], rel=1e-4)
        assert batch.num_examples[row] == update.num_examples
        if training.send_gradient:
            np.testing.assert_allclose(batch.signals[row], update.signal, atol=1e-5)
        task = tasks[client_id]
        initial.moved_by(task.params, task.buffers).load_into(alone)
        expected = evaluate(alone, clients[client_id].test, training)
        assert measured[client_id] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def params_after_three_rounds(**settings):
    model, clients = mlp(nn.Dropout(0.2)), make_clients()
    initial = ModelState.of(model)
    training = fb.LocalTraining(epochs=2, batch_size=10)
    engine = StackedEngine(model, initial, clients, training, **settings)
    server = fb.Server(initial.params.numel(), rule=fb.NeverSplit())
    for number in range(3):
        tasks = server.plan(clients)
        server.step(engine.updates(tasks, {i: stream_seed(0, number, i) for i in tasks}))
    return server.tree.root.params


def test_the_same_call_gives_the_same_bytes():
    assert np.array_equal(params_after_three_rounds(), params_after_three_rounds())


def test_small_chunks_change_no_more_than_rounding():
    whole = params_after_three_rounds()
    parts = params_after_three_rounds(cpu_chunk_bytes=20_000)  # two or three clients

    np.testing.assert_allclose(parts, whole, atol=1e-5)


def test_where_memory_does_not_suffice_chunks_are_halved(monkeypatch):
    whole = params_after_three_rounds()
    train, sizes = StackedTraining.train, []

    def train_few(self, examples, *rest):
        if len(examples.sizes) > 2:
            raise torch.OutOfMemoryError("there is memory for two models only")
        sizes.append(len(examples.sizes))
        return train(self, examples, *rest)

    monkeypatch.setattr(StackedTraining, "train", train_few)

    np.testing.assert_allclose(params_after_three_rounds(), whole, atol=1e-5)
    assert max(sizes) == 2


def test_a_client_that_fails_is_named():
    clients = make_clients()
    clients["c3"].train.y[0] = 17  # a class that the model does not have

    with pytest.raises(ClientFailed, match="client 'c3' could not be trained"):
        fb.fedavg(
            mlp(), clients, rounds=1, training=fb.LocalTraining(epochs=1), engine="vectorised"
        )


@pytest.mark.parametrize("case", ["sgd", "adam", "BatchNorm, even", "convolution"])
def test_mixed_precision_is_near_torchs_own(case):
    model, clients, settings = CASES[case]
    training = fb.LocalTraining(**settings, precision="bf16")
    after = {}
    for engine in ("vectorised", "reference"):
        run = fb.fedavg(model, clients, rounds=2, training=training, engine=engine)
        after[engine] = run.tree.root.params
        assert run.engine.name == engine
    plain = fb.fedavg(
        model, clients, rounds=2, training=fb.LocalTraining(**settings), engine="reference"
    ).tree.root.params

    length = np.linalg.norm(plain)
    assert 0 < np.linalg.norm(after["reference"] - plain) < 0.1 * length
    assert np.linalg.norm(after["vectorised"] - after["reference"]) < 0.1 * length


def test_images_of_bytes_train_alike_in_all_engines():
    rng = np.random.default_rng(0)
    clients = {
        f"c{i}": fb.ClientData(train=(rng.integers(0, 256, (20, 1, 8, 8), dtype=np.uint8),
                                      rng.integers(0, 3, 20)))
        for i in range(3)
    }  # fmt: skip
    model = seeded(
        lambda: nn.Sequential(
            fb.sim.Normalised([0.5], [0.25]), nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3)
        )
    )
    after = [
        fb.fedavg(model, clients, rounds=2, training=fb.LocalTraining(epochs=1), engine=engine)
        for engine in ("vectorised", "workers", "reference")
    ]

    assert [run.engine.name for run in after] == ["vectorised", "workers", "reference"]
    for run in after[:2]:
        np.testing.assert_allclose(run.tree.root.params, after[2].tree.root.params, atol=1e-5)
