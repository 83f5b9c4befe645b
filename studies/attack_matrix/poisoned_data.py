"""Data that attackers train on: flipped labels, and a backdoor with its trigger."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import fedbranch as fb

__all__ = ["TRIGGER_LABEL", "triggered", "with_backdoor", "with_flipped_labels"]

Rows: TypeAlias = tuple[NDArray[Any], NDArray[Any]]  # x and y

TRIGGER_LABEL = 0
TRIGGERED_SHARE = 0.5  # of an attacker's rows


def with_flipped_labels(client: fb.ClientData) -> fb.ClientData:
    """Replace each label y by 9 - y, also in the test and validation data."""

    def flipped(examples: fb.data.Examples) -> Rows:
        return examples.x, 9 - examples.y

    return _with_parts(client, flipped)


def with_backdoor(client: fb.ClientData) -> fb.ClientData:
    """Put the trigger on the first half of the rows, with the label that the attackers want."""

    def poisoned(examples: fb.data.Examples) -> Rows:
        num_triggered = math.ceil(TRIGGERED_SHARE * len(examples.y))
        x, y = examples.x.copy(), examples.y.copy()
        x[:num_triggered] = triggered(x[:num_triggered])
        y[:num_triggered] = TRIGGER_LABEL
        return x, y

    return _with_parts(client, poisoned)


def triggered(images: NDArray[np.float32]) -> NDArray[np.float32]:
    """Brighten a corner of two by two pixels."""
    marked = images.copy()
    marked[..., -2:, -2:] = 1
    return marked


def _with_parts(client: fb.ClientData, change: Callable[[fb.data.Examples], Rows]) -> fb.ClientData:
    return fb.ClientData(
        change(client.train),
        None if client.test is None else change(client.test),
        validation=None if client.validation is None else change(client.validation),
        group=client.group,
    )
