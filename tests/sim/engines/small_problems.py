"""Small models, clients and tasks, to compare engines on."""

import numpy as np
import torch
from torch import nn

import fedbranch as fb
from fedbranch.training.model_state import ModelState

RAGGED = [1, 5, 11, 21, 30, 30, 7, 41, 2]
TOLERANCE = 3e-5  # of an update's length, after up to 20 steps in float32
SGD = {"epochs": 2, "batch_size": 10}


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


def cnn(flatten=None):
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), flatten or nn.Flatten(),
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
