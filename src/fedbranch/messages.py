"""What the server and its clients say to each other, and which replies can be used."""

from __future__ import annotations

import math
import numbers
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from fedbranch.checkpoint import Tensors
from fedbranch.core.geometry import Array, take_rows, to_numpy
from fedbranch.errors import InvalidUpdate
from fedbranch.files import JSON
from fedbranch.tree import Vector

__all__ = [
    "Expected",
    "Reply",
    "Task",
    "Trial",
    "TrialRows",
    "Update",
    "UpdateBatch",
    "check_batch",
    "check_losses",
    "check_metric_name",
    "check_update",
    "checked_ids",
    "one_line",
    "replies_from_state",
    "replies_to_state",
    "shortened",
    "stacked",
]

# No sane update comes near this; sums of such numbers would leave float32.
LARGEST_ENTRY = 1e30
# Below this float32 has hardly any digits left, and processors are slow.
SMALLEST_ENTRY = float(np.finfo(np.float32).smallest_normal)

# Whatever a client says is kept for ever in the history, so nobody may say much.
MOST_METRICS = 1000
LONGEST_NAME = 100  # characters of a metric's name
LONGEST_REASON = 300  # characters of a reason, part of which a client may have written
LONGEST_ID = 1000  # characters of a client id

TrialRows = Literal["held-out", "first half", "second half"]

_NOT_FINITE = "contains NaN or infinity; lower the learning rate"
_TOO_LARGE = f"has entries beyond {LARGEST_ENTRY:g}; training diverged"
_IS_ZERO = "is zero: the client did not train"
_IS_TINY = f"has no entry beyond {SMALLEST_ENTRY:.2g}: the client hardly trained"


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
        client without a half difference has a row of zeros.
    num_examples, metrics, bases
        One for each client, as in :class:`Update`.
    refused
        Client id -> why its row, if it has one, is not to be used.
    """

    client_ids: Sequence[str]
    vectors: Array
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Numbers that passed all checks, of one client or of many: one row each."""

    vector: Array
    compared: Array
    buffers: Array
    half_difference: Array | None = None


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


Column = Literal["vector", "compared", "buffers", "half_difference"]


def stacked(replies: Sequence[Reply], column: Column) -> Array:
    """Put replies on top of each other: shape (num_replies, length).

    They stay where they are. Replies of several rounds may be in several places; they go to
    where the last one is.
    """
    sources = {id(reply.rows): getattr(reply.rows, column) for reply in replies}
    if len(sources) == 1:
        (whole,) = sources.values()
        return take_rows(whole, [reply.row for reply in replies])
    target = getattr(replies[-1].rows, column)
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


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What every reply must fit."""

    num_params: int
    num_buffers: int
    compares_signal: bool
    max_examples: float
    num_signal: int | None = None  # None: as many as parameters

    @property
    def num_compared(self) -> int:
        """How many numbers of a reply are compared, and its half difference has."""
        if self.compares_signal and self.num_signal is not None:
            return self.num_signal
        return self.num_params


def check_update(update: Update, expected: Expected) -> Reply:
    """Check everything about an update that can be checked without knowing its sender.

    Raises
    ------
    InvalidUpdate
        Saying what is wrong, with the value.
    """
    vector = _checked_vector(update.vector, expected.num_params, "update")
    compared = vector
    if expected.compares_signal:
        if update.signal is None:
            raise InvalidUpdate("the reply carries no signal, which this server compares")
        compared = _checked_vector(update.signal, expected.num_compared, "signal")
    for name, sent in [("update", vector), ("signal", compared)]:
        largest = float(np.abs(sent).max(initial=0))
        if largest < SMALLEST_ENTRY:
            raise InvalidUpdate(f"the {name} {_IS_TINY if largest else _IS_ZERO}")
    if update.buffers is not None:
        buffers = _checked_vector(update.buffers, expected.num_buffers, "buffers")
    elif expected.num_buffers:
        raise InvalidUpdate(f"the reply lacks the {expected.num_buffers} buffers")
    else:
        buffers = np.zeros(0, dtype=np.float32)
    half = None
    if update.half_difference is not None:
        half = _checked_vector(update.half_difference, expected.num_compared, "half difference")
    matrix = vector[None, :]
    rows = Rows(
        vector=matrix,
        compared=compared[None, :] if expected.compares_signal else matrix,
        buffers=buffers[None, :],
        half_difference=None if half is None else half[None, :],
    )
    has_halves = half is not None and bool(half.any())
    return _reply(rows, 0, update.num_examples, update.metrics, expected.max_examples, has_halves)


def check_batch(
    batch: UpdateBatch, expected: Expected
) -> tuple[dict[str, tuple[str, Reply]], dict[str, str]]:
    """Do for many updates what :func:`check_update` does for one.

    Returns
    -------
    tuple
        Client id -> base and reply of the usable ones, and client id -> why of the others;
        both sorted by id.

    Raises
    ------
    TypeError, ValueError
        If the batch as a whole does not fit the model.
    """
    vectors = _checked_column("update", batch.vectors, (len(batch), expected.num_params))
    if batch.buffers is None:
        buffers = array_namespace(vectors).zeros_like(vectors[:, :0])
    else:
        buffers = batch.buffers
    buffers = _checked_column("buffers", buffers, (len(batch), expected.num_buffers))
    columns = {"update": vectors, "buffers": buffers}
    compared_shape = (len(batch), expected.num_compared)
    if expected.compares_signal:
        if batch.signals is None:
            raise ValueError("the batch carries no signals, which this server compares")
        columns["signal"] = _checked_column("signal", batch.signals, compared_shape)
    halves = batch.half_differences
    if halves is not None:
        halves = _checked_column("half difference", halves, compared_shape)
        columns["half difference"] = halves
    problems: dict[int, str] = {}  # row -> why it cannot be used
    for name, column in columns.items():
        if column.shape[1]:
            problems = _column_problems(name, column) | problems
    rows = Rows(
        vector=vectors,
        compared=columns["signal"] if expected.compares_signal else vectors,
        buffers=buffers,
        half_difference=halves,
    )
    has_halves = [False] * len(batch)
    if halves is not None:
        has_halves = to_numpy(array_namespace(halves).any(halves != 0, axis=1)).tolist()
    usable: dict[str, tuple[str, Reply]] = {}
    refused = dict(batch.refused)
    for client_id, row in sorted(zip(batch.client_ids, range(len(batch)), strict=True)):
        if client_id in refused:
            continue
        try:
            if row in problems:
                raise InvalidUpdate(problems[row])
            reply = _reply(
                rows,
                row,
                batch.num_examples[row],
                batch.metrics[row],
                expected.max_examples,
                has_halves[row],
            )
            usable[client_id] = (batch.bases[row], reply)
        except InvalidUpdate as error:
            refused[client_id] = str(error)
        except Exception as error:  # objects from outside may fail in ways of their own
            refused[client_id] = one_line(f"the reply cannot be read: {shortened(error)}")
    return usable, refused


def _checked_column(name: str, column: Array, shape: tuple[int, int]) -> Array:
    """Check that a column fits; a masked array must not hide what it holds."""
    if not hasattr(column, "shape") or not hasattr(column, "dtype"):
        raise TypeError(f"the {name} column is a {type(column).__name__}; send an array")
    if tuple(column.shape) != shape or str(column.dtype).split(".")[-1] != "float32":
        raise ValueError(
            f"the {name} column has shape {tuple(column.shape)} and dtype {column.dtype}; "
            f"send {shape} in float32"
        )
    return np.asarray(column) if isinstance(column, np.ndarray) else column


def _column_problems(name: str, column: Array) -> dict[int, str]:
    """Find the rows that cannot be used."""
    xp = array_namespace(column)
    largest = to_numpy(xp.maximum(xp.max(column, axis=1), -xp.min(column, axis=1)))
    must_move = name not in ("buffers", "half difference")
    found: dict[int, str] = {}
    for problem, is_so in [
        (_IS_TINY, (largest < SMALLEST_ENTRY) & must_move),
        (_IS_ZERO, (largest == 0) & must_move),
        (_TOO_LARGE, largest > LARGEST_ENTRY),
        (_NOT_FINITE, ~np.isfinite(largest)),
    ]:
        found |= {int(row): f"the {name} {problem}" for row in np.flatnonzero(is_so)}
    return found


def _reply(
    rows: Rows,
    row: int,
    num_examples: object,
    metrics: object,
    max_examples: float,
    has_halves: bool,
) -> Reply:
    """Check the numbers that come beside the vectors."""
    weight = _as_float(num_examples)
    if weight is None or not 0 < weight <= max_examples:
        raise InvalidUpdate(
            f"num_examples is {shortened(num_examples)}; it must be a number above 0 and "
            f"at most {max_examples:g}"
        )
    if not isinstance(metrics, Mapping):
        raise InvalidUpdate(f"metrics are {shortened(metrics)}; send numbers by name")
    checked: dict[str, float | None] = {}
    for name, value in islice(metrics.items(), MOST_METRICS + 1):
        number = _as_float(value)
        if not isinstance(name, str) or number is None:
            raise InvalidUpdate(
                f"the metric {shortened(name)} is {shortened(value)}; send numbers by name"
            )
        check_metric_name(name)
        checked[name] = number if math.isfinite(number) else None
    if len(checked) > MOST_METRICS:
        raise InvalidUpdate(f"there are more than {MOST_METRICS} metrics; send those that matter")
    return Reply(rows=rows, row=row, weight=weight, metrics=checked, has_halves=has_halves)


def check_metric_name(name: str) -> None:
    """Refuse a name that no table, terminal or file could show.

    Raises
    ------
    InvalidUpdate
        If it is too long, or has characters that are not printed.
    """
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise InvalidUpdate(
            f"a metric is called {shortened(name)}; call it something of at most {LONGEST_NAME} "
            "characters, all of them printable"
        )


def check_losses(losses: object, num_trials: int) -> tuple[float, ...]:
    """Check what a client measured under its trials.

    Raises
    ------
    InvalidUpdate
        If it is not one number for each trial. Numbers that are not finite are allowed: a
        model may be that bad.
    """
    try:
        # An array is looked at before it becomes a list, which takes several times its memory.
        if isinstance(losses, np.ndarray) and losses.shape == (num_trials,):
            losses = losses.tolist()
        found: list[float | None] = []
        if isinstance(losses, Sequence) and len(losses) == num_trials:
            found = [_as_float(loss) for loss in islice(losses, num_trials)]
    except Exception as error:  # objects from outside may fail in ways of their own
        raise InvalidUpdate(f"the losses cannot be read: {shortened(error)}") from error
    checked = tuple(number for number in found if number is not None)
    if len(checked) != num_trials:
        raise InvalidUpdate(f"the losses are {shortened(losses)}; send {num_trials} numbers")
    return checked


def replies_to_state(replies: Mapping[str, Reply]) -> tuple[JSON, Tensors]:
    """Describe replies, by client id, as JSON and tensors with one row each."""
    ordered = dict(sorted(replies.items()))  # as the JSON object will have them
    state = {
        i: {"weight": r.weight, "metrics": r.metrics, "has_halves": r.has_halves}
        for i, r in ordered.items()
    }
    if not ordered:
        return state, {}
    columns: tuple[Column, ...] = ("vector", "compared", "buffers")
    replied = list(ordered.values())
    tensors: dict[str, NDArray[Any]] = {name: to_numpy(stacked(replied, name)) for name in columns}
    if any(reply.has_halves for reply in replied):
        rows = [row for row, reply in enumerate(replied) if reply.has_halves]
        tensors["half_difference"] = np.zeros_like(tensors["compared"])
        tensors["half_difference"][rows] = to_numpy(
            stacked([replied[row] for row in rows], "half_difference")
        )
    return state, tensors


def replies_from_state(state: JSON, tensors: Tensors) -> dict[str, Reply]:
    """Rebuild replies from what :func:`replies_to_state` gave."""
    if not state:
        return {}
    vector, compared = tensors["vector"], tensors["compared"]
    rows = Rows(
        vector=vector,
        compared=vector if np.array_equal(vector, compared) else compared,
        buffers=tensors["buffers"],
        half_difference=tensors.get("half_difference"),
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
        raise ValueError(f"clients {twice[:10]} are named more than once; name each once")
    return ids


def _checked_vector(array: Array, length: int, name: str) -> Vector:
    try:
        original = to_numpy(array)
    except Exception as error:
        raise InvalidUpdate(f"the {name} is not an array: {shortened(error)}") from error
    if not np.issubdtype(original.dtype, np.floating):
        raise InvalidUpdate(
            f"the {name} has dtype {one_line(str(original.dtype), 80)}; send float32"
        )
    if original.shape != (length,):
        raise InvalidUpdate(f"the {name} has shape {original.shape}; send shape ({length},)")
    # A copy of our own, and that is what is checked: whoever sent it may go on writing into
    # the original, and a masked array or a wider type may hide what the copy will hold.
    with np.errstate(over="ignore"):
        vector = np.array(original, dtype=np.float32)
    if not np.isfinite(vector).all():
        raise InvalidUpdate(f"the {name} {_NOT_FINITE}")
    if length and float(np.abs(vector).max()) > LARGEST_ENTRY:
        raise InvalidUpdate(f"the {name} {_TOO_LARGE}")
    return vector


def _as_float(value: object) -> float | None:
    """Give a number as a float, and None for what is not a number."""
    if type(value) is float:  # nearly always, and the other question takes long
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except Exception:  # it calls itself a number, but cannot say which
        return None


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
