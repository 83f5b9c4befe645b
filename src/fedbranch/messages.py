"""What the server and its clients say to each other, and which replies can be used."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fedbranch.core.geometry import Array, to_numpy
from fedbranch.errors import InvalidUpdate
from fedbranch.tree import Vector

__all__ = ["Reply", "Task", "Update", "check_update"]

# No sane update comes near this; sums of such numbers would leave float32.
LARGEST_ENTRY = 1e30


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What a client is asked to do in a round: train at these parameters and send the update.

    Attributes
    ----------
    node_id
        The client's position.
    params, buffers
        Displacements from the initial model: the client trains at θ0 + params. Read-only.
    base
        Names these parameters; comes back with the :class:`Update`.
    purpose
        ``"train"`` if the update will be averaged, ``"route"`` if it decides on a child.
    """

    node_id: int
    params: Vector
    buffers: Vector
    base: str
    purpose: Literal["train", "route"]


@dataclass(frozen=True, eq=False)
class Update:
    """A client's reply.

    Attributes
    ----------
    vector
        Shape (num_params,): parameters after training minus before.
    num_examples
        How many examples the client trained on: its weight |D_i|.
    metrics
        Numbers that the client reports, by name.
    buffers
        Shape (num_buffers,): buffers after minus before.
    base
        ``task.base`` of the task that it answers. Without it the reply counts as the
        answer to this round's task.
    signal
        Shape (num_params,): what to compare instead of ``vector``, for a server with
        ``compare="signal"``, for example the negative full-batch gradient.
    """

    vector: Array
    num_examples: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    buffers: Array | None = None
    base: str | None = None
    signal: Array | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Reply:
    """An update that passed all checks, as the server keeps it."""

    vector: Vector
    compared: Vector
    buffers: Vector
    weight: float
    metrics: Mapping[str, float | None]


def check_update(
    update: Update,
    *,
    num_params: int,
    num_buffers: int,
    compares_signal: bool,
    max_examples: float,
) -> Reply:
    """Check everything about an update that can be checked without knowing its sender.

    Raises
    ------
    InvalidUpdate
        Saying what is wrong, with the value.
    """
    vector = _checked_vector(update.vector, num_params, "update")
    if not vector.any():
        raise InvalidUpdate("the update is zero: the client did not train")
    compared = vector
    if compares_signal:
        if update.signal is None:
            raise InvalidUpdate("the reply carries no signal, which this server compares")
        compared = _checked_vector(update.signal, num_params, "signal")
    if update.buffers is not None:
        buffers = _checked_vector(update.buffers, num_buffers, "buffers")
    elif num_buffers:
        raise InvalidUpdate(f"the reply lacks the {num_buffers} buffers")
    else:
        buffers = np.zeros(0, dtype=np.float32)
    weight = update.num_examples
    if not _is_real(weight) or not 0 < weight <= max_examples:
        raise InvalidUpdate(
            f"num_examples is {weight!r}; it must be a number above 0 and at most {max_examples:g}"
        )
    if not isinstance(update.metrics, Mapping) or not all(
        isinstance(name, str) and _is_real(value) for name, value in update.metrics.items()
    ):
        raise InvalidUpdate(f"metrics are {update.metrics!r}; send numbers by name")
    return Reply(
        vector=vector,
        compared=compared,
        buffers=buffers,
        weight=float(weight),
        metrics={
            name: float(value) if math.isfinite(value) else None
            for name, value in update.metrics.items()
        },
    )


def _checked_vector(array: Array, length: int, name: str) -> Vector:
    try:
        vector = to_numpy(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidUpdate(f"the {name} is not an array: {error}") from error
    if not np.issubdtype(vector.dtype, np.floating):
        raise InvalidUpdate(f"the {name} has dtype {vector.dtype}; send float32")
    if vector.shape != (length,):
        raise InvalidUpdate(f"the {name} has shape {vector.shape}; send shape ({length},)")
    if not np.isfinite(vector).all():
        raise InvalidUpdate(f"the {name} contains NaN or infinity; lower the learning rate")
    if length and float(np.abs(vector).max()) > LARGEST_ENTRY:
        raise InvalidUpdate(f"the {name} has entries beyond {LARGEST_ENTRY:g}; training diverged")
    # A copy of our own: whoever sent it may go on writing into the original.
    return np.array(vector, dtype=np.float32)


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
