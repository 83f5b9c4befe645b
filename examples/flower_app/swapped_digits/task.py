"""The model, its training, and every client's data. NumPy only.

A deployed client app is started anew for every message, so it should import little.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

NUM_PIXELS, NUM_CLASSES = 64, 10
BATCH_SIZE = 20


class Examples(NamedTuple):
    """Images (num_examples, 64) and labels (num_examples,)."""

    x: np.ndarray
    y: np.ndarray


def load_client(
    partition_id: int, num_partitions: int, num_groups: int
) -> tuple[Examples, Examples]:
    """Return a client's examples for training and for evaluation.

    Every client has digits of all kinds; but those of group g have swapped the labels
    2g and 2g + 1, so that no single model suits them all.
    """
    table = load_digits()
    rows = np.random.default_rng(0).permutation(len(table))[partition_id::num_partitions]
    x, y = table[rows, :-1].astype(np.float32) / 16, table[rows, -1].astype(np.int64)
    group = partition_id % num_groups
    a, b = 2 * group, 2 * group + 1
    y = np.where(y == a, b, np.where(y == b, a, y))
    num_test = len(rows) // 3
    return Examples(x[num_test:], y[num_test:]), Examples(x[:num_test], y[:num_test])


@cache
def load_digits() -> np.ndarray:
    """Read the digits that come with scikit-learn: 64 pixels and a label in each row."""
    # Not by its own reader, which would take longer to import than the client takes to train.
    package = Path(find_spec("sklearn").submodule_search_locations[0])
    return np.loadtxt(package / "datasets" / "data" / "digits.csv.gz", delimiter=",")


def initial_model() -> dict[str, np.ndarray]:
    """Make a softmax regression that knows nothing."""
    return {
        "weight": np.zeros((NUM_PIXELS, NUM_CLASSES), np.float32),
        "bias": np.zeros(NUM_CLASSES, np.float32),
    }


def train(
    model: dict[str, np.ndarray], data: Examples, *, epochs: int, learning_rate: float, seed: int
) -> dict[str, np.ndarray]:
    """Train by stochastic gradient descent on the cross-entropy."""
    weight, bias = model["weight"].copy(), model["bias"].copy()
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(len(data.x))
        for start in range(0, len(order), BATCH_SIZE):
            x, y = (part[order[start : start + BATCH_SIZE]] for part in data)
            slope = _probabilities(x @ weight + bias)
            slope[np.arange(len(y)), y] -= 1
            weight -= learning_rate / len(y) * (x.T @ slope)
            bias -= learning_rate / len(y) * slope.sum(axis=0)
    return {"weight": weight, "bias": bias}


def evaluate(model: dict[str, np.ndarray], data: Examples) -> dict[str, float]:
    """Measure the loss and the accuracy."""
    probabilities = _probabilities(data.x @ model["weight"] + model["bias"])
    of_label = probabilities[np.arange(len(data.y)), data.y]
    return {
        "loss": float(-np.log(of_label + 1e-12).mean()),
        "accuracy": float((probabilities.argmax(axis=1) == data.y).mean()),
    }


def _probabilities(outputs: np.ndarray) -> np.ndarray:
    powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)
