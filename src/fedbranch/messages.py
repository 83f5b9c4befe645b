"""What the server and its clients say to each other."""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from fedbranch.checkpoint import Tensors
from fedbranch.core.differences import Differences
from fedbranch.core.extents import Extent
from fedbranch.core.geometry import Array, take_rows, to_numpy
from fedbranch.files import JSON
from fedbranch.tree import Vector

__all__ = [
    "LENGTHS_OF",
    "Reply",
    "Rows",
    "Task",
    "Trial",
    "TrialRows",
    "Update",
    "UpdateBatch",
    "checked_ids",
    "one_line",
    "replies_from_state",
    "replies_to_state",
    "replies_to_tensors",
    "shortened",
    "shown_id",
    "some_of",
    "stacked",
]

# Whatever a client says is kept for ever in the history, so nobody may say much.
LONGEST_REASON = 300  # characters of a reason, part of which a client may have written
LONGEST_ID = 1000  # characters of a client id

LENGTHS_OF = ("update", "signal", "buffers")  # what is measured of a reply

TrialRows = Literal["held-out", "first half", "second half"]


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
    halves
        If not None, the client is asked to train twice from these parameters, on two random
        halves of its data, and to send the mean of the two updates and half their difference.
        The number names the halves: the same number, the same halves. Who cannot do that
        trains as usual.
    """

    node_id: int
    params: Vector
    buffers: Vector
    base: str
    purpose: Literal["train", "route"]
    halves: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """A model that a client is asked to measure its loss under, without training.

    Attributes
    ----------
    params, buffers
        Displacements from the initial model.
    on
        Which of the client's examples: those it holds out from training, or one of the halves
        that it trained on.
    halves
        Which halves, as in :class:`Task`; None for held-out examples.
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
        ``task.base`` of the task that it answers. Without it the reply counts as the
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

    The server computes with them where they are; only what it keeps goes to the host. They
    must not be changed afterwards.

    Attributes
    ----------
    client_ids
        Who replies, each once.
    vectors, buffers, signals, half_differences
        Shape (num_clients, length): as in :class:`Update`, all of one library and device. A
        client without a half difference has a row of zeros. Vectors may also be
        :class:`fedbranch.core.differences.Differences`, which are not written down yet.
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
        """Give some rows of a batch whose vectors are not written down, with these written."""
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Numbers that passed all checks, of one client or of many: one row each.

    Attributes
    ----------
    vector, buffers
        The updates; of length 0 where they were added up and not kept.
    compared
        The updates or the signals, or sketches of them.
    half_difference
        Of what is compared; sketches where that are sketches.
    signal, whole_half_difference
        Where sketches are compared and updates kept: the signals, if it is these, and the half
        differences in full.
    lengths
        Where sketches are compared, shape (num_clients, 3): how long each update, what is
        compared of it in full, and its buffers are.
    extent
        What was measured of the updates when they were checked.
    """

    vector: Array
    compared: Array
    buffers: Array
    half_difference: Array | None = None
    signal: Array | None = None
    whole_half_difference: Array | None = None
    lengths: NDArray[np.float64] | None = None
    extent: Extent | None = None

    @property
    def whole(self) -> Array:
        """What is compared, in full."""
        if self.lengths is None:
            return self.compared
        return self.vector if self.signal is None else self.signal

    @property
    def compares_update(self) -> bool:
        """Whether it is the updates that are compared, not a signal."""
        return self.whole is self.vector

    @property
    def whole_half(self) -> Array | None:
        """The half differences, in full."""
        return self.half_difference if self.lengths is None else self.whole_half_difference


@dataclass(frozen=True, kw_only=True, eq=False)
class Reply:
    """An update that passed all checks, as the server keeps it: a row among others."""

    rows: Rows
    row: int
    weight: float
    metrics: Mapping[str, float | None]
    has_halves: bool = False  # whether its row of half differences is one

    @property
    def compared(self) -> Vector:
        """What is compared, for keeping: on the host, in memory of its own."""
        return np.array(to_numpy(self.rows.compared[self.row]), dtype=np.float32)


Column = Literal[
    "vector",
    "compared",
    "buffers",
    "half_difference",
    "lengths",
    "signal",
    "whole",
    "whole_half",
    "whole_half_difference",
]


def stacked(replies: Sequence[Reply], column: Column) -> Array:
    """Put replies on top of each other: shape (num_replies, length).

    They stay where they are. Replies of several rounds may be in several places; they go to
    where the last one is.
    """
    rows = replies[-1].rows
    if all(reply.rows is rows for reply in replies):
        return take_rows(getattr(rows, column), [reply.row for reply in replies])
    target = getattr(rows, column)
    if all(isinstance(getattr(reply.rows, column), np.ndarray) for reply in replies):
        return _stacked_on_host(replies, column, target)
    xp = array_namespace(target)
    parts = [getattr(reply.rows, column)[reply.row][None, :] for reply in replies]
    together: Array = xp.concat(
        [
            xp.asarray(
                part if isinstance(part, type(target)) else to_numpy(part),
                dtype=target.dtype,
                device=device(target),
            )
            for part in parts
        ]
    )
    return together


def _stacked_on_host(replies: Sequence[Reply], column: Column, like: NDArray[Any]) -> NDArray[Any]:
    """Take the rows of each source at once: there may be thousands of replies of few sources."""
    places: dict[int, list[int]] = {}
    for place, reply in enumerate(replies):
        places.setdefault(id(reply.rows), []).append(place)
    together = np.empty((len(replies), *like.shape[1:]), like.dtype)
    for own in places.values():
        source = getattr(replies[own[0]].rows, column)
        if source.shape[1:] != like.shape[1:]:
            raise ValueError(f"rows of shapes {source.shape[1:]} and {like.shape[1:]} do not stack")
        together[own] = source[[replies[place].row for place in own]]
    return together


def replies_to_state(replies: Mapping[str, Reply]) -> JSON:
    """Describe replies, by client id, but for their numbers."""
    return {
        i: {"weight": r.weight, "metrics": r.metrics, "has_halves": r.has_halves}
        for i, r in sorted(replies.items())
    }


def replies_to_tensors(replies: Mapping[str, Reply]) -> Tensors:
    """Give the numbers of replies, at least one, with a row each in the order of client ids."""
    replied = [reply for _, reply in sorted(replies.items())]
    columns: tuple[Column, ...] = ("vector", "compared", "buffers")
    if all(reply.rows.compared is reply.rows.vector for reply in replied):
        columns = ("vector", "buffers")
    tensors: dict[str, NDArray[Any]] = {name: to_numpy(stacked(replied, name)) for name in columns}
    if any(reply.has_halves for reply in replied):
        rows = [row for row, reply in enumerate(replied) if reply.has_halves]
        tensors["half_difference"] = np.zeros_like(tensors.get("compared", tensors["vector"]))
        tensors["half_difference"][rows] = to_numpy(
            stacked([replied[row] for row in rows], "half_difference")
        )
        if all(replied[row].rows.whole_half_difference is not None for row in rows):
            halves = to_numpy(stacked([replied[row] for row in rows], "whole_half_difference"))
            tensors["whole_half_difference"] = np.zeros((len(replied), halves.shape[1]), np.float32)
            tensors["whole_half_difference"][rows] = halves
    if replied[0].rows.lengths is not None:  # a server compares sketches, or it does not
        tensors["lengths"] = to_numpy(stacked(replied, "lengths"))
        if all(reply.rows.signal is not None for reply in replied):
            tensors["signal"] = to_numpy(stacked(replied, "signal"))
    return tensors


def replies_from_state(state: JSON, tensors: Tensors) -> dict[str, Reply]:
    """Rebuild replies from what :func:`replies_to_state` and :func:`replies_to_tensors` gave.

    Raises
    ------
    ValueError, KeyError, TypeError, AttributeError
        If that cannot be.
    """
    if {len(tensor) for tensor in tensors.values()} != {len(state)}:
        raise ValueError(f"the tensors of {len(state)} replies have other numbers of rows")
    vector = tensors["vector"]
    are_updates = not {"compared", "lengths"} & set(tensors)
    rows = Rows(
        vector=vector,
        compared=vector if are_updates else tensors["compared"],
        buffers=tensors["buffers"],
        half_difference=tensors.get("half_difference"),
        signal=tensors.get("signal"),
        whole_half_difference=tensors.get("whole_half_difference"),
        lengths=tensors.get("lengths"),
    )
    return {
        client_id: Reply(
            rows=rows,
            row=row,
            weight=entry["weight"],
            metrics=entry["metrics"],
            has_halves=entry["has_halves"] and rows.half_difference is not None,
        )
        for row, (client_id, entry) in enumerate(sorted(state.items()))
    }


def checked_ids(client_ids: Iterable[str]) -> list[str]:
    """Check that client ids are what every file and every message can carry, each once.

    They are compared code point by code point. Two that only look alike, because they differ
    in case or in how an accent is written, are two clients.

    Raises
    ------
    TypeError, ValueError
        If one is not a string, empty, too long, not printable or begins or ends with a blank,
        or is there twice.
    """
    ids = list(client_ids)
    if isinstance(client_ids, str) or not all(isinstance(i, str) and i for i in ids):
        raise TypeError(f"client_ids are {shortened(ids)}; pass a list of non-empty strings")
    for client_id in ids:
        if (
            len(client_id) <= LONGEST_ID
            and client_id.isprintable()
            and client_id.strip() == client_id
        ):
            continue
        if len(client_id) > LONGEST_ID:
            problem = f"has {len(client_id)} characters; use at most {LONGEST_ID}"
        elif any("\ud800" <= character <= "\udfff" for character in client_id):
            problem = "is not valid Unicode"
        else:
            problem = "begins or ends with a blank, or has characters that cannot be seen"
        raise ValueError(f"the client id {shortened(client_id)} {problem}")
    twice = [client_id for client_id, count in Counter(ids).items() if count > 1]
    if twice:
        raise ValueError(f"clients {some_of(twice)} are named more than once; name each once")
    return ids


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # another one each time
_briefly = reprlib.Repr()
_briefly.maxstring = _briefly.maxother = _briefly.maxlong = 80


def shortened(value: object) -> str:
    """Show a value from outside in a few words, however large it is."""
    try:
        text = _briefly.repr(value)
    except Exception:  # a whole number with too many digits, or an object with a broken repr
        return f"a {type(value).__name__} that cannot be shown"
    return one_line(_ADDRESS.sub("", text), 80)


def some_of(client_ids: Collection[str], most: int = 10) -> str:
    """Name clients in a message: so many, and how many others.

    Examples
    --------
    >>> some_of(["a", "b", "c"], most=2)
    "['a', 'b'] and 1 more"
    """
    named = f"{list(islice(client_ids, most))}"
    return named if len(client_ids) <= most else f"{named} and {len(client_ids) - most:,} more"


def shown_id(client_id: object) -> str:
    """Name a client in the record, also if it has not even an id."""
    return client_id if isinstance(client_id, str) else shortened(client_id)


def one_line(text: str, longest: int = LONGEST_REASON) -> str:
    r"""Give a text from outside as one line that a terminal only prints.

    Examples
    --------
    >>> one_line("out of memory\n\x1b[2Jtry again")
    'out of memory ?[2Jtry again'
    """
    words = " ".join(text[: 2 * longest].split())
    line = "".join(c if c.isprintable() else "?" for c in words)
    return (
        line if len(line) <= longest and len(text) <= 2 * longest else line[: longest - 3] + "..."
    )
