"""What the server asks of its clients, and what they send back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from array_api_compat import array_namespace

from fedbranch.core.exact_sum.raw_updates import Differences
from fedbranch.protocol.client_ids import checked_ids
from fedbranch.types import Array, Vector

__all__ = ["Task", "Trial", "TrialRows", "Update", "UpdateBatch"]

TrialRows = Literal["held-out", "first half", "second half"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """The request to train at some parameters and to send back the update.

    Attributes
    ----------
    node_id
        The client's position.
    params, buffers
        Displacements from the initial model: the client trains at θ0 + params. Read-only.
    base
        The name of these exact parameters; the :class:`Update` carries it back.
    purpose
        ``"train"`` if the update will be averaged, ``"route"`` if it decides on a child.
    halves
        If not None, the client is asked to train twice from these parameters, on two random
        halves of its data, and to send the mean of the two updates and half their difference.
        The number is the seed of the halves: the same number makes the same halves. A client
        that cannot do this trains as usual.
    """

    node_id: int
    params: Vector
    buffers: Vector
    base: str
    purpose: Literal["train", "route"]
    halves: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """The request to measure the loss under a model, without training.

    Attributes
    ----------
    params, buffers
        Displacements from the initial model.
    on
        Which of the client's examples: those it holds out from training, or one of the halves
        that it trained on.
    halves
        The seed of the halves, as in :class:`Task`; None for held-out examples.
    """

    params: Vector
    buffers: Vector
    on: TrialRows = "held-out"
    halves: int | None = None


@dataclass(frozen=True, eq=False)
class Update:
    """A client's reply.

    Attributes
    ----------
    vector
        Shape (num_params,): parameters after training minus before.
    num_examples
        How many examples the client trained on: its weight ``|D_i|``.
    metrics
        Numbers that the client reports, by name.
    buffers
        Shape (num_buffers,): buffers after minus before.
    base
        ``task.base`` of the task that the reply answers. Without it the reply counts as the
        answer to this round's task.
    signal
        Shape (num_signal,), by default as long as ``vector``: what to compare instead of it,
        for a server with ``compare="signal"``, for example the negative full-batch gradient.
    half_difference
        As long as what is compared: with a and b the updates (or signals) from the two halves
        of the client's data that the task asked for, (a - b) / 2; ``vector`` (or ``signal``)
        is then (a + b) / 2.
    """

    vector: Array
    num_examples: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    buffers: Array | None = None
    base: str | None = None
    signal: Array | None = None
    half_difference: Array | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateBatch:
    """The replies of many clients, one row each, in arrays of any library on any device.

    The server computes with the arrays on their device; only what it keeps goes to the host.
    They must not be changed afterwards.

    Attributes
    ----------
    client_ids
        The client of each row, each once.
    vectors, buffers, signals, half_differences
        Shape (num_clients, length): as in :class:`Update`, all of one library and device. A
        client without a half difference has a row of zeros. Vectors may also be
        :class:`fedbranch.core.exact_sum.raw_updates.Differences`, which are evaluated only when
        they are needed.
    num_examples, metrics, bases
        One for each client, as in :class:`Update`.
    refused
        Client id -> why its row, if it has one, is not to be used.
    """

    client_ids: Sequence[str]
    vectors: Array | Differences
    num_examples: Sequence[float]
    bases: Sequence[str]
    metrics: Sequence[Mapping[str, float]]
    buffers: Array | None = None
    signals: Array | None = None
    half_differences: Array | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked_ids(self.client_ids)
        for name in (
            "vectors",
            "num_examples",
            "bases",
            "metrics",
            "buffers",
            "signals",
            "half_differences",
        ):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.client_ids):
                raise ValueError(
                    f"{name} has {len(column)} rows for {len(self.client_ids)} clients; "
                    "give one row for each"
                )

    def __len__(self) -> int:
        return len(self.client_ids)

    def written(self, rows: Sequence[int]) -> UpdateBatch:
        """Return some rows, with their differences evaluated; for a batch of differences only."""
        assert isinstance(self.vectors, Differences)
        columns = (self.buffers, self.signals, self.half_differences)
        buffers, signals, halves = (
            None
            if column is None
            else array_namespace(column).take(
                column, array_namespace(column).asarray(rows, dtype=int), axis=0
            )
            for column in columns
        )
        return UpdateBatch(
            client_ids=[self.client_ids[row] for row in rows],
            vectors=self.vectors.written(rows),
            buffers=buffers,
            signals=signals,
            half_differences=halves,
            num_examples=[self.num_examples[row] for row in rows],
            bases=[self.bases[row] for row in rows],
            metrics=[self.metrics[row] for row in rows],
            refused=self.refused,
        )
