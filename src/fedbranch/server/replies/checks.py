"""Which replies can be used, and why the others cannot.

A reply comes from outside: it may be anything. Each is checked by itself, so that what is wrong
with one costs the others nothing.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from fedbranch.core.exact_sum.block_norms import Extent, extents
from fedbranch.core.exact_sum.raw_updates import Differences
from fedbranch.core.geometry import to_numpy
from fedbranch.errors import InvalidUpdate
from fedbranch.protocol.plain_text import one_line, shortened
from fedbranch.protocol.tasks import Update, UpdateBatch
from fedbranch.server.replies.reply import Reply, ReplyRows
from fedbranch.types import Array, Vector

__all__ = [
    "MOST_METRICS",
    "SMALLEST_WEIGHT",
    "Expected",
    "check_batch",
    "check_claims",
    "check_losses",
    "check_metric_name",
    "check_update",
    "is_sane",
]

# No sane update comes near this; sums of such numbers would leave float32.
LARGEST_ENTRY = float(np.float32(1e30))
# Below this float32 has hardly any digits left, and processors are slow.
SMALLEST_ENTRY = float(np.finfo(np.float32).smallest_normal)
# An entry is at most as large as its block is long, and the largest at least 1/32 of that.
SURELY_NOT_TINY, SURELY_NOT_LARGE = 1e3 * SMALLEST_ENTRY, 1e-3 * LARGEST_ENTRY

# No client trains on less of an example. Without a limit, a few clients could make a server that
# adds updates up keep a sum for every exponent that a float can have.
SMALLEST_WEIGHT = 1e-9

# What a client says is kept in the history for ever, so its length is limited.
MOST_METRICS = 1000
LONGEST_NAME = 100  # characters of a metric's name

_NOT_FINITE = "contains NaN or infinity; lower the learning rate"
_TOO_LARGE = f"has entries beyond {LARGEST_ENTRY:g}; training diverged"
_IS_ZERO = "is zero: the client did not train"
_IS_TINY = f"has no entry beyond {SMALLEST_ENTRY:.2g}: the client hardly trained"


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
    rows = ReplyRows(
        update=vector[None, :],
        buffers=buffers[None, :],
        signal=compared[None, :] if expected.compares_signal else None,
        half=None if half is None else half[None, :],
    )
    has_half = half is not None and bool(half.any())
    weight, metrics = check_claims(update.num_examples, update.metrics, expected.max_examples)
    return Reply(rows=rows, row=0, weight=weight, metrics=metrics, has_half=has_half)


def check_batch(
    batch: UpdateBatch, expected: Expected
) -> tuple[dict[str, tuple[str, Reply]], dict[str, str]]:
    """Check many updates, as :func:`check_update` checks one.

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
    assert not isinstance(batch.vectors, Differences), "to be written down first"
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
    measured_updates = None
    for name, column in columns.items():
        if column.shape[1]:
            measured = extents(column) if isinstance(column, np.ndarray) else None
            problems = _column_problems(name, column, measured) | problems
            measured_updates = measured if name == "update" else measured_updates
    rows = ReplyRows(
        update=vectors,
        buffers=buffers,
        signal=columns.get("signal"),
        half=halves,
        norms=measured_updates,
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
            weight, metrics = check_claims(
                batch.num_examples[row], batch.metrics[row], expected.max_examples
            )
            reply = Reply(
                rows=rows, row=row, weight=weight, metrics=metrics, has_half=has_halves[row]
            )
            usable[client_id] = (batch.bases[row], reply)
        except InvalidUpdate as error:
            refused[client_id] = str(error)
        except Exception as error:  # objects from outside may fail in ways of their own
            refused[client_id] = one_line(f"the reply cannot be read: {shortened(error)}")
    return usable, refused


def _checked_column(name: str, column: Array, shape: tuple[int, int]) -> Array:
    """Check that a column fits; a masked array must not hide what it holds."""
    if type(column) is np.ndarray and column.shape == shape and column.dtype == np.float32:
        return column  # nearly always, and the other questions take long
    if not hasattr(column, "shape") or not hasattr(column, "dtype"):
        raise TypeError(f"the {name} column is a {type(column).__name__}; send an array")
    if tuple(column.shape) != shape or str(column.dtype).split(".")[-1] != "float32":
        raise ValueError(
            f"the {name} column has shape {tuple(column.shape)} and dtype {column.dtype}; "
            f"send {shape} in float32"
        )
    return np.asarray(column) if isinstance(column, np.ndarray) else column


def _column_problems(name: str, column: Array, extent: Extent | None) -> dict[int, str]:
    """Find the rows that cannot be used: row -> why."""
    if extent is not None:
        # Of nearly all the lengths of some blocks say enough, and these are quickly measured.
        strongest = extent.strongest
        odd = np.flatnonzero(~((strongest > SURELY_NOT_TINY) & (strongest < SURELY_NOT_LARGE)))
        return {int(odd[row]): why for row, why in _problems_of(name, column[odd]).items()}
    return _problems_of(name, column)


def _problems_of(name: str, column: Array) -> dict[int, str]:
    if not column.shape[0]:
        return {}
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


def is_sane(lengths: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Find vectors that surely can be used, by their lengths; for those that need not move.

    For example buffers. The others may be usable or not.
    """
    is_short: NDArray[np.bool_] = lengths < SURELY_NOT_LARGE
    return is_short


def check_claims(
    num_examples: object, metrics: object, max_examples: float
) -> tuple[float, dict[str, float | None]]:
    """Check the numbers that come beside the vectors: the weight, and the metrics by name.

    Raises
    ------
    InvalidUpdate
        If they are none, or too large, or too many.
    """
    weight = _as_float(num_examples)
    if weight is None or not SMALLEST_WEIGHT <= weight <= max_examples:
        raise InvalidUpdate(
            f"num_examples is {shortened(num_examples)}; it must be a number from "
            f"{SMALLEST_WEIGHT:g} to {max_examples:g}"
        )
    if type(metrics) is not dict and not isinstance(metrics, Mapping):
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
    return weight, checked


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
    # A copy of our own is made and checked: the client may go on writing into the original, and a
    # masked array or a wider type may hide what the copy will hold.
    with np.errstate(over="ignore"):
        vector = np.array(original, dtype=np.float32)
    if not np.isfinite(vector).all():
        raise InvalidUpdate(f"the {name} {_NOT_FINITE}")
    if length and float(np.abs(vector).max()) > LARGEST_ENTRY:
        raise InvalidUpdate(f"the {name} {_TOO_LARGE}")
    return vector


def _as_float(value: object) -> float | None:
    """Convert a number to a float; None if it is not a number."""
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
