"""What the server and its clients say to each other, and which replies can be used."""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fedbranch.checkpoint import JSON, Tensors
from fedbranch.core.geometry import Array, to_numpy
from fedbranch.errors import InvalidUpdate
from fedbranch.tree import Vector

__all__ = [
    "Reply",
    "Task",
    "Update",
    "check_update",
    "checked_ids",
    "replies_from_state",
    "replies_to_state",
]

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
    compared = vector
    if compares_signal:
        if update.signal is None:
            raise InvalidUpdate("the reply carries no signal, which this server compares")
        compared = _checked_vector(update.signal, num_params, "signal")
    for name, sent in [("update", vector), ("signal", compared)]:
        if not sent.any():
            raise InvalidUpdate(f"the {name} is zero: the client did not train")
    if update.buffers is not None:
        buffers = _checked_vector(update.buffers, num_buffers, "buffers")
    elif num_buffers:
        raise InvalidUpdate(f"the reply lacks the {num_buffers} buffers")
    else:
        buffers = np.zeros(0, dtype=np.float32)
    weight = _as_float(update.num_examples)
    if weight is None or not 0 < weight <= max_examples:
        raise InvalidUpdate(
            f"num_examples is {_shortened(update.num_examples)}; it must be a number above 0 and "
            f"at most {max_examples:g}"
        )
    if not isinstance(update.metrics, Mapping):
        raise InvalidUpdate(f"metrics are {_shortened(update.metrics)}; send numbers by name")
    metrics = {}
    for name, value in update.metrics.items():
        number = _as_float(value)
        if not isinstance(name, str) or number is None:
            raise InvalidUpdate(
                f"the metric {_shortened(name)} is {_shortened(value)}; send numbers by name"
            )
        metrics[name] = number if math.isfinite(number) else None
    return Reply(vector=vector, compared=compared, buffers=buffers, weight=weight, metrics=metrics)


def replies_to_state(replies: Mapping[str, Reply]) -> tuple[JSON, Tensors]:
    """Describe replies, by client id, as JSON and tensors with one row each."""
    ordered = dict(sorted(replies.items()))  # as the JSON object will have them
    state = {i: {"weight": r.weight, "metrics": r.metrics} for i, r in ordered.items()}
    if not ordered:
        return state, {}
    return state, {
        name: np.stack([getattr(reply, name) for reply in ordered.values()])
        for name in ("vector", "compared", "buffers")
    }


def replies_from_state(state: JSON, tensors: Tensors) -> dict[str, Reply]:
    """Rebuild replies from what :func:`replies_to_state` gave."""
    return {
        client_id: Reply(
            vector=tensors["vector"][row],
            compared=tensors["compared"][row],
            buffers=tensors["buffers"][row],
            weight=entry["weight"],
            metrics=entry["metrics"],
        )
        for row, (client_id, entry) in enumerate(sorted(state.items()))
    }


def checked_ids(client_ids: Iterable[str]) -> list[str]:
    """Check that client ids are what every file and every message can carry, each once."""
    ids = list(client_ids)
    if isinstance(client_ids, str) or not all(isinstance(i, str) and i for i in ids):
        raise TypeError(f"client_ids are {client_ids!r}; pass a list of non-empty strings")
    for client_id in ids:
        try:
            client_id.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the client id {client_id!r} is not valid Unicode") from None
    twice = [client_id for client_id, count in Counter(ids).items() if count > 1]
    if twice:
        raise ValueError(f"clients {twice} are named more than once; name each once")
    return ids


def _checked_vector(array: Array, length: int, name: str) -> Vector:
    try:
        original = to_numpy(array)
    except Exception as error:
        raise InvalidUpdate(f"the {name} is not an array: {error!r}") from error
    if not np.issubdtype(original.dtype, np.floating):
        raise InvalidUpdate(f"the {name} has dtype {original.dtype}; send float32")
    if original.shape != (length,):
        raise InvalidUpdate(f"the {name} has shape {original.shape}; send shape ({length},)")
    # A copy of our own, and that is what is checked: whoever sent it may go on writing into
    # the original, and a masked array or a wider type may hide what the copy will hold.
    with np.errstate(over="ignore"):
        vector = np.array(original, dtype=np.float32)
    if not np.isfinite(vector).all():
        raise InvalidUpdate(f"the {name} contains NaN or infinity; lower the learning rate")
    if length and float(np.abs(vector).max()) > LARGEST_ENTRY:
        raise InvalidUpdate(f"the {name} has entries beyond {LARGEST_ENTRY:g}; training diverged")
    return vector


def _as_float(value: object) -> float | None:
    """Give a number as a float, and None for what is not a number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _shortened(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # a whole number with too many digits, or an object with a broken repr
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else text[:77] + "..."
