"""The stack of models must do what :mod:`fedbranch.training.client` does, client by client."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fedbranch as fb
from fedbranch.errors import ClientFailed
from fedbranch.sim.engines.stacked import engine as vectorised
from fedbranch.sim.engines.stacked.engine import Vectorised
from fedbranch.sim.engines.stacked.model import CannotStack
from fedbranch.training.client import evaluate, local_update
from fedbranch.training.model_state import ModelState

RAGGED = [1, 5, 11, 21, 30, 30, 7, 41, 2]
TOLERANCE = 3e-5  # of an update's length, after up to 20 steps in float32


def make_clients(sizes=RAGGED, shape=(6,), num_classes=3, seed=0):
    rng = np.random.default_rng(seed)

    def examples(rows):
        x = rng.normal(size=(rows, *shape)).astype(np.float32)
        return x, rng.integers(0, num_classes, rows)

    return {
        f"c{i}": fb.ClientData(train=examples(size), test=examples(size // 2 + 1))
        for i, size in enumerate(sizes)
    }


def seeded(make):
    torch.manual_seed(0)
    return make()


def mlp(*between):
    return seeded(lambda: nn.Sequential(nn.Linear(6, 8), *between, nn.ReLU(), nn.Linear(8, 3)))


def small_cnn():
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.2), nn.Flatten(),
            nn.Linear(36, 3),
        )
    )  # fmt: skip


class Words(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embedding = nn.Embedding(20, 5)
        self.recurrent = layer(5, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.output = nn.Linear(12, 20)

    def forward(self, words):
        return self.output(self.recurrent(self.embedding(words))[0]).transpose(1, 2)


def word_clients():
    rng = np.random.default_rng(0)
    return {
        f"c{i}": fb.ClientData(
            train=(rng.integers(0, 20, (size, 7)), rng.integers(0, 20, (size, 7))),
            test=(rng.integers(0, 20, (4, 7)), rng.integers(0, 20, (4, 7))),
        )
        for i, size in enumerate([5, 9, 13])
    }


def weighted_cross_entropy(outputs, targets):
    weight = torch.tensor([1.0, 2.0, 3.0])
    return nn.functional.cross_entropy(outputs, targets, weight=weight)


def tasks_at_two_leaves(model, clients):
    initial = ModelState.of(model)
    rng = np.random.default_rng(1)
    places = [
        fb.Task(
            node_id=i,
            params=(0.05 * rng.normal(size=initial.params.numel())).astype(np.float32),
            buffers=np.zeros(initial.buffers.numel(), dtype=np.float32),
            base=f"{i}.0",
            purpose="train",
        )
        for i in range(2)
    ]
    return initial, {client_id: places[i % 2] for i, client_id in enumerate(clients)}


SGD = {"epochs": 2, "batch_size": 10}
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
def test_many_clients_at_once_give_what_each_gives_alone(case):
    model, clients, settings = CASES[case]
    training = fb.LocalTraining(**settings)
    initial, tasks = tasks_at_two_leaves(model, clients)
    seeds = {client_id: 7 + i for i, client_id in enumerate(clients)}
    engine = Vectorised(copy.deepcopy(model), initial, clients, training)

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


def test_a_model_that_mixes_rows_is_never_padded():
    clients = make_clients([30] * 3)
    training = fb.LocalTraining(epochs=1)

    def pads(model):
        return Vectorised(model, ModelState.of(model), clients, training).pads

    assert pads(mlp())
    assert not pads(mlp(nn.BatchNorm1d(8)))


def params_after_three_rounds(**settings):
    training = fb.LocalTraining(epochs=2, batch_size=10)
    run = fb.fedavg(
        mlp(nn.Dropout(0.2)), make_clients(), rounds=3, training=training, engine="vectorised",
        **settings,
    )  # fmt: skip
    return run.tree.root.params


def test_it_repeats_to_the_bit():
    assert np.array_equal(params_after_three_rounds(), params_after_three_rounds())


def test_small_chunks_change_no_more_than_rounding(monkeypatch):
    whole = params_after_three_rounds()
    monkeypatch.setattr(vectorised, "CPU_CHUNK_BYTES", 20_000)  # two or three clients

    np.testing.assert_allclose(params_after_three_rounds(), whole, atol=1e-5)


def test_where_memory_does_not_suffice_chunks_are_halved(monkeypatch):
    whole = params_after_three_rounds()
    train = Vectorised._train

    def train_few(self, ids, *rest):
        if len(ids) > 2:
            raise torch.OutOfMemoryError("not for so many")
        return train(self, ids, *rest)

    monkeypatch.setattr(Vectorised, "_train", train_few)

    np.testing.assert_allclose(params_after_three_rounds(), whole, atol=1e-5)


class ReadsANumber(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1.0 if x.sum().item() > 0 else 0.5)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


@pytest.mark.parametrize(
    ("model", "settings", "reason"),
    [
        (ReadsANumber(6, 3), {}, "item"),
        (Noisy(6, 3), {}, "random"),
        (mlp(nn.AlphaDropout(0.2)), {}, "random"),
        (mlp(), {"optimizer": lambda params: torch.optim.LBFGS(params, lr=0.1)}, "LBFGS"),
        (mlp(), {"optimizer": lambda params: torch.optim.SGD(
            [{"params": [p], "lr": 0.1 * i} for i, p in enumerate(params)])}, "differently"),
    ],
)  # fmt: skip
def test_what_cannot_be_stacked_falls_back_with_a_note(model, settings, reason):
    training = fb.LocalTraining(epochs=1, **settings)

    run = fb.fedavg(model, make_clients(), rounds=1, training=training, engine="vectorised")

    assert run.engine.name == "workers"
    assert reason in run.engine.reason
    assert np.any(run.tree.root.params)


def test_clients_of_different_shapes_cannot_be_stacked():
    clients = make_clients() | {"wide": make_clients([4], shape=(7,))["c0"]}

    with pytest.raises(CannotStack, match="differ in shape"):
        Vectorised(mlp(), ModelState.of(mlp()), clients, fb.LocalTraining(epochs=1))


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


def test_images_may_stay_bytes():
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
