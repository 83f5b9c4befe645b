"""Inputs and targets, from arrays, tensors, and datasets of any library.

A dataset is known by its interface alone: a length, and items by number. So no library of
datasets has to be installed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedbranch.core.geometry import to_numpy

__all__ = ["TARGET_COLUMNS", "Data", "Examples", "MapDataset", "as_examples"]

TARGET_COLUMNS = ("label", "labels", "target", "targets", "y")
"""Names of the column with the targets, in a dataset with named columns."""


class Examples(NamedTuple):
    """Inputs and targets, one row for each example."""

    x: NDArray[Any]
    y: NDArray[Any]


class MapDataset(Protocol):
    """A map-style dataset, for example of PyTorch, Hugging Face or Flower Datasets.

    ``dataset[i]`` is a pair of an input and its target, or a mapping from the names of two
    columns to an input and its target.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Data: TypeAlias = tuple[ArrayLike, ArrayLike] | MapDataset


def as_examples(data: Data, name: str) -> Examples:
    """Read data into arrays that models and losses expect.

    Parameters
    ----------
    data
        ``(x, y)`` with one row for each example, or a map-style dataset, which is read once.
    name
        What the data are called in errors.

    Returns
    -------
    fedbranch.data.Examples
        Floating numbers are float32 and whole-number targets int64. Inputs of other types
        keep theirs. Images of Pillow become bytes with channels first: (channels, height,
        width).

    Raises
    ------
    ValueError
        If inputs and targets are not numbers with one row for each example.
    TypeError
        If the data have no length or no items by number.
    """
    examples = (
        _of_arrays(data, name) if isinstance(data, tuple) else _stacked(_pairs(data, name), name)
    )
    if examples.x.ndim == 0 or examples.y.ndim == 0 or len(examples.x) != len(examples.y):
        raise ValueError(
            f"{name} has inputs of shape {examples.x.shape} and targets of shape "
            f"{examples.y.shape}; they need one row for each example"
        )
    if len(examples.x) == 0:
        raise ValueError(f"{name} has no examples; every client needs at least one")
    for values, what in ((examples.x, "inputs"), (examples.y, "targets")):
        if values.dtype.kind in "USOMm":
            raise ValueError(
                f"{name} has {what} of type {values.dtype}; models take numbers: number the "
                "classes, and turn texts into numbers, for example with next_word_windows"
            )
    return examples


def _of_arrays(data: tuple[ArrayLike, ...], name: str) -> Examples:
    if len(data) != 2:
        raise ValueError(f"{name} is a tuple of {len(data)}; pass inputs and targets (x, y)")
    return Examples(_as_array(data[0]), _as_targets(data[1]))


def _pairs(dataset: MapDataset, name: str) -> list[tuple[object, object]]:
    """Read the items of a dataset as pairs of an input and a target."""
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"{name} is a {kind} with the parts {sorted(map(str, dataset))}; pass one of them, "
            "for example data['train'], or arrays as a tuple: (x, y)"
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{name} is a {kind}, which has no length or no items by number; pass arrays as a "
            "tuple (x, y), or a map-style dataset"
        )
    items = [dataset[number] for number in range(len(dataset))]
    if not items:
        raise ValueError(f"{name} has no examples; every client needs at least one")
    if isinstance(items[0], Mapping):
        return _pairs_of_columns(items, kind, name)
    try:
        return [(x, y) for x, y in items]
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} is a {kind} with items that are not pairs of an input and a target; pass "
            "arrays as a tuple: (x, y)"
        ) from None


def _pairs_of_columns(
    rows: Sequence[Mapping[str, object]], kind: str, name: str
) -> list[tuple[object, object]]:
    x_name, y_name = _column_names(rows[0], kind, name)
    for number, row in enumerate(rows):
        if set(row) != {x_name, y_name}:
            raise ValueError(
                f"{name} is a {kind} with the columns {sorted(rows[0])} in row 0 and "
                f"{sorted(row)} in row {number}; all rows need the same columns"
            )
    return [(row[x_name], row[y_name]) for row in rows]


def _column_names(columns: Collection[str], kind: str, name: str) -> tuple[str, str]:
    """Return the names of the columns with inputs and with targets."""
    targets = [column for column in columns if column in TARGET_COLUMNS]
    inputs = [column for column in columns if column not in TARGET_COLUMNS]
    if len(targets) != 1 or len(inputs) != 1:
        raise ValueError(
            f"{name} is a {kind} with the columns {list(columns)}; it needs one column with "
            f"inputs and one with targets, called {' or '.join(map(repr, TARGET_COLUMNS))}: use "
            "dataset.select_columns([...]) and dataset.rename_column(...)"
        )
    return inputs[0], targets[0]


def _stacked(pairs: Sequence[tuple[object, object]], name: str) -> Examples:
    inputs = [_as_array(x) for x, _ in pairs]
    targets = [_as_targets(y) for _, y in pairs]
    for values, what in ((inputs, "an input"), (targets, "a target")):
        for number, value in enumerate(values):
            if value.shape != values[0].shape:
                raise ValueError(
                    f"{name} has {what} of shape {values[0].shape} in row 0 and of "
                    f"{value.shape} in row {number}; pad or cut all examples of a client to one shape"
                )
    return Examples(np.stack(inputs), np.stack(targets))


def _as_array(value: object) -> NDArray[Any]:
    """Make an array that torch can take: in memory order, of the machine's byte order."""
    if hasattr(value, "getbands") and hasattr(value, "convert"):  # an image of Pillow
        array = _as_channels(value)
    else:
        array = to_numpy(value) if hasattr(value, "__array__") else np.asarray(value)
    array = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    # Python floats become float64, for which almost no model is made.
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _as_channels(image: Any) -> NDArray[Any]:
    """Put the channels of an image first, as convolutions expect them."""
    # The bytes of other modes are numbers of colours, or one bit each.
    pixels = np.asarray(image.convert({"P": "RGB", "1": "L"}.get(image.mode, image.mode)))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _as_targets(value: object) -> NDArray[Any]:
    array = _as_array(value)
    return array.astype(np.int64) if array.dtype.kind in "iub" else array
