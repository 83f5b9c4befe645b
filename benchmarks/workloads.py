"""The six workloads of benchmarks/simulate.py: model, clients and training of each."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fedbranch as fb
from fedbranch.data import cifar10, digits, mnist
from fedbranch.sim import Normalised

VOCABULARY, SEQUENCE = 10_000, 30


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and how often."""

    name: str
    about: str
    model: Callable[[], nn.Module]
    clients: dict[str, fb.ClientData]
    training: fb.LocalTraining
    learning_rate: float
    participation: float = 1.0

    @property
    def num_visits(self) -> int:
        """Examples seen in a round, each as often as it is seen."""
        visits = (self.training.num_visits(len(c.train.x)) for c in self.clients.values())
        return round(sum(visits) * self.participation)


def w1(data: Path) -> Workload:
    """MNIST, 20 clients x 500, a CNN with batches of 20."""
    images, labels = mnist("train", data, raw=True)
    x = images[:10_000].astype(np.float32) / 255
    return Workload(
        name="W1",
        about="MNIST, 20 clients x 500, CNN 16-32 (5x5) + 64, batch 20, 3 epochs",
        model=seeded(mnist_cnn),
        clients=dealt(x, labels[:10_000], 20),
        training=fb.LocalTraining(optimizer=fb.sgd(0.1), epochs=3, batch_size=20),
        learning_rate=0.1,
    )


def w2(_: Path | None = None) -> Workload:
    """1000 clients x 50 digits, a small MLP."""
    return digits_workload("W2", 1000, participation=1.0)


def w3(num_known: int) -> Workload:
    """Many clients known, 100 of them in a round."""
    return digits_workload("W3", num_known, participation=100 / num_known)


def w4(data: Path) -> Workload:
    """CIFAR-10 in full, 20 clients with four label permutations."""
    (x, y), (x_test, y_test) = (cifar10(part, data, raw=True) for part in ("train", "test"))
    rng = np.random.default_rng(0)
    order = rng.permutation(len(x))
    permutations = [np.arange(10), *(rng.permutation(10) for _ in range(3))]
    clients = {}
    for i, rows in enumerate(np.array_split(order, 20)):
        relabel = permutations[i % 4]
        clients[f"client-{i:02}"] = fb.ClientData(
            train=(x[rows], relabel[y[rows]]), test=(x_test, relabel[y_test]), group=str(i % 4)
        )
    return Workload(
        name="W4",
        about="CIFAR-10, 20 clients x 2500, CNN 32-64-64 (3x3) + 64, batch 100, 3 epochs",
        model=seeded(cifar_cnn),
        clients=clients,
        training=fb.LocalTraining(optimizer=fb.sgd(0.1), epochs=3, batch_size=100),
        learning_rate=0.1,
    )


def w5(data: Path) -> Workload:
    """Rotated MNIST, 4800 clients x 50, full-batch steps."""
    images, labels = mnist("train", data, raw=True)
    clients = {}
    for i in range(4800):
        rows = np.arange(50 * i, 50 * i + 50) % len(images)
        turn = 50 * i // len(images)  # every image four times, each time another way up
        turned = np.rot90(images[rows], turn, axes=(2, 3))
        x = np.ascontiguousarray(turned, dtype=np.float32).reshape(50, 784) / 255
        clients[f"client-{i:04}"] = fb.ClientData(train=(x, labels[rows]), group=str(turn))
    return Workload(
        name="W5",
        about="rotated MNIST, 4800 clients x 50, MLP 784-200-10, 10 full-batch steps",
        model=seeded(lambda: mlp(784, 200, 10)),
        clients=clients,
        training=fb.LocalTraining(optimizer=fb.sgd(0.1), steps=10, batch_size=50),
        learning_rate=0.1,
    )


def w6(_: Path | None = None) -> Workload:
    """Train a language model; speed does not depend on the words, so they are drawn (Zipf)."""
    rng = np.random.default_rng(0)
    shares = 1 / np.arange(1, VOCABULARY + 1)
    clients = {}
    for i in range(20):
        words = rng.choice(VOCABULARY, size=(400, SEQUENCE + 1), p=shares / shares.sum())
        clients[f"client-{i:02}"] = fb.ClientData(train=(words[:, :-1], words[:, 1:]))
    return Workload(
        name="W6",
        about="two-layer LSTM 200-200, 20 clients x 400 sentences of 30 words, vocabulary 10k",
        model=seeded(LanguageModel),
        clients=clients,
        training=fb.LocalTraining(optimizer=fb.sgd(1.0), epochs=1, batch_size=20),
        learning_rate=1.0,
    )


def digits_workload(name: str, num_clients: int, participation: float) -> Workload:
    """Clients with 50 handwritten digits each."""
    x, y = digits()
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.choice(len(x), 50) for _ in range(num_clients)])
    return Workload(
        name=name,
        about=f"{num_clients} clients x 50 digits, MLP 64-32-10, batch 10, 1 epoch",
        model=seeded(lambda: mlp(64, 32, 10)),
        clients=dealt(x.reshape(len(x), -1)[rows], y[rows], num_clients),
        training=fb.LocalTraining(optimizer=fb.sgd(0.1), epochs=1, batch_size=10),
        learning_rate=0.1,
        participation=participation,
    )


def dealt(x: np.ndarray, y: np.ndarray, num_clients: int) -> dict[str, fb.ClientData]:
    """Divide the examples among the clients, in order."""
    parts = zip(np.split(x, num_clients), np.split(y, num_clients), strict=True)
    width = len(str(num_clients - 1))
    return {f"client-{i:0{width}}": fb.ClientData(train=part) for i, part in enumerate(parts)}


# Models


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Draw the initial weights from a seed."""

    def make_seeded() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()

    return make_seeded


def mlp(*widths: int) -> nn.Sequential:
    """Make a perceptron with one hidden layer."""
    inputs, hidden, outputs = widths
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def mnist_cnn() -> nn.Sequential:
    """Make W1's model; benchmarks/peers has the same."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def cifar_cnn() -> nn.Sequential:
    """Make W4's model: the paper's five layers."""
    layers: list[nn.Module] = [Normalised((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))]
    depth = 3
    for width in (32, 64, 64):
        layers += [nn.Conv2d(depth, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        depth = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))


class LanguageModel(nn.Module):
    """Predicts every next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 200)
        self.lstm = nn.LSTM(200, 200, num_layers=2, batch_first=True)
        self.output = nn.Linear(200, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        """Map words (rows, length) to scores (rows, vocabulary, length)."""
        hidden, _ = self.lstm(self.embedding(words))
        return self.output(hidden).transpose(1, 2)


def checksum(arrays: list[np.ndarray]) -> str:
    """Name data by their bytes, so that two machines can tell that they measured the same."""
    value = 0
    for array in arrays:
        value = zlib.crc32(np.ascontiguousarray(array).tobytes(), value)
    return f"{value:08x}"
