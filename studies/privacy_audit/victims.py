"""The attacked clients: they hold real handwritten digits and send real updates.

Each client trains for one step, on one digit or on a few, with the reference client of
:mod:`fedbranch.training.client`. One step on one record is the worst case for the client: it
sends that record's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbranch import LocalTraining, Task, sgd
from fedbranch.data import Examples, digits
from fedbranch.training.client import local_update
from fedbranch.training.model_state import ModelState
from fedbranch.training.seeds import stream_seed

__all__ = [
    "LEARNING_RATE",
    "NUM_CLASSES",
    "NUM_PIXELS",
    "NUM_UNITS",
    "Digits",
    "Network",
    "Victims",
    "layers",
    "split_digits",
]

Numbers: TypeAlias = NDArray[np.floating[Any]]

NUM_PIXELS = 64
NUM_UNITS = 32
NUM_CLASSES = 10
LEARNING_RATE = 0.1


@dataclass(frozen=True, eq=False)
class Digits:
    """Images of shape (rows, 64) with values in [0, 1], and their labels."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> Digits:
        return Digits(self.images[rows], self.labels[rows])

    def __len__(self) -> int:
        return len(self.labels)


def split_digits(seed: int) -> tuple[Digits, Digits]:
    """Split the digits at random: half for the clients, half public, which the server has."""
    examples = digits()
    order = np.random.default_rng(stream_seed(seed, "digits")).permutation(len(examples.y))
    shuffled = Digits(
        examples.x.reshape(-1, NUM_PIXELS)[order].astype(np.float32), examples.y[order]
    )
    half = len(order) // 2
    return shuffled[:half], shuffled[half:]


@dataclass(frozen=True, eq=False)
class Network:
    """A dense network, 64-32-10 with tanh, at some parameters; its gradients in closed form.

    Attributes
    ----------
    params
        Shape (2410,), in PyTorch's order: weights and biases of the first and the second layer.
    """

    params: Tensor

    @classmethod
    def drawn(cls, seed: int) -> Network:
        """Draw a fresh model θ0; the server does not know the seed."""
        return cls(ModelState.of(_module(seed)).params)

    @property
    def num_params(self) -> int:
        """The length of an update."""
        return len(self.params)

    def gradients(self, images: Tensor, targets: Tensor) -> Tensor:
        """Compute each record's gradient of the cross-entropy; autograd can differentiate it.

        Parameters
        ----------
        images
            Shape (rows, 64).
        targets
            Shape (rows, 10): for each class its probability.

        Returns
        -------
        Tensor
            Shape (rows, num_params).
        """
        weights, biases, last_weights, last_biases = layers(self.params)
        hidden = torch.tanh(images @ weights.T + biases)
        errors = torch.softmax(hidden @ last_weights.T + last_biases, 1) - targets
        deltas = (errors @ last_weights) * (1 - hidden**2)
        return torch.cat(
            [
                (deltas[:, :, None] * images[:, None, :]).flatten(1),
                deltas,
                (errors[:, :, None] * hidden[:, None, :]).flatten(1),
                errors,
            ],
            1,
        )

    def gradients_of(self, known: Digits, per_client: int = 1) -> Numbers:
        """Compute what clients with these records send: means of ``per_client`` gradients each."""
        targets = nn.functional.one_hot(torch.from_numpy(known.labels), NUM_CLASSES)
        with torch.no_grad():
            rows = self.gradients(torch.from_numpy(known.images), targets.float())
        means: Numbers = rows.view(-1, per_client, rows.shape[1]).mean(1).numpy()
        return means

    def losses_of(self, known: Digits, per_client: int = 1) -> Numbers:
        """Compute the losses that these clients report: means of ``per_client`` losses each."""
        weights, biases, last_weights, last_biases = layers(self.params)
        with torch.no_grad():
            hidden = torch.tanh(torch.from_numpy(known.images) @ weights.T + biases)
            outputs = hidden @ last_weights.T + last_biases
            rows = nn.functional.cross_entropy(
                outputs, torch.from_numpy(known.labels), reduction="none"
            )
        means: Numbers = rows.view(-1, per_client).mean(1).numpy()
        return means


def layers(params: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut (..., num_params) into weights and biases of the first and the second layer."""
    sizes = [NUM_UNITS * NUM_PIXELS, NUM_UNITS, NUM_CLASSES * NUM_UNITS, NUM_CLASSES]
    weights, biases, last_weights, last_biases = torch.split(params[..., : sum(sizes)], sizes, -1)
    return (
        weights.reshape(*params.shape[:-1], NUM_UNITS, NUM_PIXELS),
        biases,
        last_weights.reshape(*params.shape[:-1], NUM_CLASSES, NUM_UNITS),
        last_biases,
    )


@dataclass(frozen=True, eq=False)
class Victims:
    """Clients, and what each of them sends.

    Attributes
    ----------
    digits
        The clients' records. Those of client i begin at row ``i * per_client``.
    per_client
        The number of records of each client.
    gradients
        Shape (num_clients, num_params), float32: the update divided by minus the learning
        rate, which the server knows.
    losses
        Shape (num_clients,): the training loss that each client reports.
    """

    digits: Digits
    per_client: int
    gradients: Numbers
    losses: Numbers

    @classmethod
    def training(cls, network: Network, held: Digits, per_client: int = 1) -> Victims:
        """Let the reference client train on each client's records for one step."""
        module = _module(0)
        initial = ModelState(network.params, torch.zeros(0, dtype=torch.float64))
        training = LocalTraining(optimizer=sgd(LEARNING_RATE), steps=1, batch_size=per_client)
        nothing = np.zeros(network.num_params, np.float32)
        task = Task(
            node_id=0, params=nothing, buffers=np.zeros(0, np.float32), base="", purpose="train"
        )
        updates = [
            local_update(
                module,
                initial,
                task,
                Examples(held.images[start : start + per_client], held.labels[start:][:per_client]),
                training,
                seed=0,
            )
            for start in range(0, len(held), per_client)
        ]
        vectors = np.stack([np.asarray(update.vector) for update in updates])
        losses = np.array([update.metrics["loss"] for update in updates])
        return cls(held, per_client, vectors / np.float32(-LEARNING_RATE), losses)

    def __len__(self) -> int:
        return len(self.gradients)


def _module(seed: int) -> nn.Module:
    """Draw the network as PyTorch would, without touching its global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(NUM_PIXELS, NUM_UNITS), nn.Tanh(), nn.Linear(NUM_UNITS, NUM_CLASSES)
        )
