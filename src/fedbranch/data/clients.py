"""What a client holds, and how one data set becomes a federation of clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedbranch.core.geometry import to_numpy
from fedbranch.data.groups import Transform
from fedbranch.data.partition import Rows, iid

__all__ = ["ClientData", "Examples", "PartName", "Partition", "federate"]

Partition: TypeAlias = Callable[..., list[Rows]]
PartName: TypeAlias = Literal["train", "test", "validation", "held_out"]


class Examples(NamedTuple):
    """Inputs and targets, one row for each example."""

    x: NDArray[Any]
    y: NDArray[Any]


class Pairs(Protocol):
    """A map-style dataset: ``dataset[i]`` is an input and its target."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's data.

    Parameters
    ----------
    train
        ``(x, y)``, arrays or tensors with one row for each example; or a dataset whose
        items are such pairs, for example a ``torch.utils.data.Dataset``.
    test
        The same, held out for evaluation.
    validation
        The same, held out for decisions: whether a split paid, and which model on the path
        is best. Without it the test examples are used for these.
    group
        Its true group, where that is known. Used to judge the clusters, never to find them.
    joins, leaves
        The first round in which it takes part, and the first in which it no longer does.

    Notes
    -----
    Floating numbers are kept as float32 and whole-number targets as int64, which is what
    models and losses expect. Inputs of other types stay as they are.

    Examples
    --------
    >>> ClientData(train=([[0.0], [1.0]], [0, 1]), group="a").train.x.shape
    (2, 1)
    """

    train: Examples
    test: Examples | None = None
    validation: Examples | None = None
    group: str | None = None
    joins: int = 1
    leaves: int | None = None

    def __init__(
        self,
        train: tuple[ArrayLike, ArrayLike] | Pairs,
        test: tuple[ArrayLike, ArrayLike] | Pairs | None = None,
        *,
        validation: tuple[ArrayLike, ArrayLike] | Pairs | None = None,
        group: str | None = None,
        joins: int = 1,
        leaves: int | None = None,
    ) -> None:
        if joins < 1 or (leaves is not None and leaves <= joins):
            raise ValueError(
                f"joins is {joins} and leaves {leaves}; rounds count from 1 and a client leaves "
                "after it has joined"
            )
        values = {
            "train": _as_examples(train, "train"),
            "test": None if test is None else _as_examples(test, "test"),
            "validation": None if validation is None else _as_examples(validation, "validation"),
            "group": group,
            "joins": joins,
            "leaves": leaves,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def held_out(self) -> Examples | None:
        """What decisions are made on: the validation examples or, without any, the test ones."""
        return self.test if self.validation is None else self.validation

    def takes_part(self, in_round: int) -> bool:
        """Say whether the client is there in a round."""
        return self.joins <= in_round and (self.leaves is None or in_round < self.leaves)


def federate(
    x: ArrayLike,
    y: ArrayLike,
    *,
    num_clients: int,
    groups: Sequence[Transform] = (),
    group_of: Sequence[int] | None = None,
    partition: Partition = iid,
    test: tuple[ArrayLike, ArrayLike] | None = None,
    held_out: Literal["shared", "own"] = "shared",
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    seed: int,
) -> dict[str, ClientData]:
    """Deal one data set out to clients in groups.

    Parameters
    ----------
    x, y
        One row for each example.
    num_clients
        How many clients to make.
    groups
        A transform for each group; without any there is one group that sees the data as
        they are.
    group_of
        The group of each client, by its position in ``groups``. By default the groups take
        turns.
    partition
        ``partition(labels, num_clients, seed=seed)`` gives the rows of each client.
    test
        The data set's own test rows. Every client is tested on all of them, seen through its
        group's transform, and no row of ``x`` and ``y`` is held out.
    held_out
        Without ``test``: ``"shared"``: every client is tested on all rows that are held out,
        seen through its group's transform, as in the paper. ``"own"``: on a part of its own.
    test_fraction
        Without ``test``: the share of rows that is held out, in (0, 1).
    validation_fraction
        The share of every client's own training rows that is set aside for validation, in
        [0, 1). The others and the test rows stay what they are without it.
    seed
        The same seed gives the same federation.

    Returns
    -------
    dict
        Client id -> data.

    Examples
    --------
    >>> from fedbranch.data import digits, label_swaps
    >>> clients = federate(*digits(), num_clients=4, groups=label_swaps(2, seed=0), seed=0)
    >>> [(client_id, client.group) for client_id, client in clients.items()]
    [('client-0', '0'), ('client-1', '1'), ('client-2', '0'), ('client-3', '1')]
    """
    rows = _as_examples((x, y), "the data set")
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction is {test_fraction}; it must lie between 0 and 1")
    if not 0 <= validation_fraction < 1:
        raise ValueError(
            f"validation_fraction is {validation_fraction}; it must be at least 0 and below 1"
        )
    if held_out not in ("shared", "own"):
        raise ValueError(f"held_out is {held_out!r}; it must be 'shared' or 'own'")
    num_groups = max(1, len(groups))
    chosen = [i % num_groups for i in range(num_clients)] if group_of is None else list(group_of)
    if len(chosen) != num_clients or not all(0 <= group < num_groups for group in chosen):
        raise ValueError(
            f"group_of is {chosen}; name one of the {num_groups} groups, counted from 0, for each "
            f"of the {num_clients} clients"
        )
    split_seed, part_seed, *noise_seeds, validation_seed = _independent_seeds(
        seed, 3 + 2 * num_clients
    )
    all_rows = np.arange(len(rows.y))
    is_shared = test is not None or held_out == "shared"
    tested = rows
    if test is not None:
        tested = _as_examples(test, "test")
        parts = partition(rows.y, num_clients, seed=part_seed)
        tests = [np.arange(len(tested.y))] * num_clients
    elif held_out == "shared":
        train_rows, test_rows = _split_off(all_rows, test_fraction, split_seed, "test")
        parts = [
            train_rows[part] for part in partition(rows.y[train_rows], num_clients, seed=part_seed)
        ]
        tests = [test_rows] * num_clients
    else:
        whole = partition(rows.y, num_clients, seed=part_seed)
        pairs = [_split_off(part, test_fraction, split_seed, "test") for part in whole]
        parts, tests = [train for train, _ in pairs], [test for _, test in pairs]

    digits = len(str(num_clients - 1))
    clients = {}
    # What a whole group sees alike is kept once: with many clients, or large images, that is
    # the difference between megabytes and gigabytes.
    seen_alike: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}
    for i, group in enumerate(chosen):
        train, _ = _see(rows, parts[i], groups, group, noise_seeds[2 * i])
        own_test = seen_alike.get(group)
        if own_test is None:
            own_test, was_random = _see(tested, tests[i], groups, group, noise_seeds[2 * i + 1])
            if not was_random and is_shared:
                seen_alike[group] = own_test
        validation = None
        if validation_fraction > 0:
            # After the transform, so that a row is the same whichever side it comes to.
            x, y = train
            kept, aside = _split_off(
                np.arange(len(y)), validation_fraction, validation_seed, "validation"
            )
            train, validation = (x[kept], y[kept]), (x[aside], y[aside])
        clients[f"client-{i:0{digits}d}"] = ClientData(
            train, own_test, validation=validation, group=str(group)
        )
    return clients


def _see(
    rows: Examples, part: Rows, groups: Sequence[Transform], group: int, seed: int
) -> tuple[tuple[NDArray[Any], NDArray[Any]], bool]:
    """Give rows as a group sees them, and whether that was drawn at random."""
    x, y = rows.x[part], rows.y[part]
    if not groups:
        return (x, y), False
    rng = np.random.default_rng(seed)
    before = rng.bit_generator.state
    seen = groups[group](x, y, rng)
    return seen, rng.bit_generator.state != before


def _split_off(rows: Rows, fraction: float, seed: int, name: str) -> tuple[Rows, Rows]:
    num_aside = min(max(1, round(len(rows) * fraction)), len(rows) - 1)
    if num_aside < 1:
        raise ValueError(f"{len(rows)} row(s) cannot be split into training and {name} rows")
    order = np.random.default_rng(seed).permutation(rows)
    return np.sort(order[num_aside:]), np.sort(order[:num_aside])


def _independent_seeds(seed: int, count: int) -> list[int]:
    return [int(s) for s in np.random.SeedSequence(seed).generate_state(count, np.uint64)]


def _as_examples(data: tuple[ArrayLike, ArrayLike] | Pairs, name: str) -> Examples:
    if isinstance(data, tuple):
        if len(data) != 2:
            raise ValueError(f"{name} is a tuple of {len(data)}; pass inputs and targets (x, y)")
        examples = Examples(_as_array(data[0]), _as_targets(data[1]))
    else:
        items = [data[i] for i in range(len(data))]
        if not items:
            raise ValueError(f"{name} has no examples; every client needs at least one")
        try:
            pairs = [(x, y) for x, y in items]
        except (TypeError, ValueError):
            raise ValueError(
                f"{name} is a {type(data).__name__} whose items are not pairs of an input and a "
                "target; pass arrays as a tuple: (x, y)"
            ) from None
        examples = Examples(
            np.stack([_as_array(x) for x, _ in pairs]), np.stack([_as_targets(y) for _, y in pairs])
        )
    if examples.x.ndim == 0 or examples.y.ndim == 0 or len(examples.x) != len(examples.y):
        raise ValueError(
            f"{name} has inputs of shape {examples.x.shape} and targets of shape "
            f"{examples.y.shape}; they need one row for each example"
        )
    if len(examples.x) == 0:
        raise ValueError(f"{name} has no examples; every client needs at least one")
    return examples


def _as_array(value: object) -> NDArray[Any]:
    """Make an array that torch can take: in memory order, of the machine's byte order."""
    array = to_numpy(value) if hasattr(value, "__array__") else np.asarray(value)
    array = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    # Python floats become float64, for which almost no model is made.
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _as_targets(value: object) -> NDArray[Any]:
    array = _as_array(value)
    return array.astype(np.int64) if array.dtype.kind in "iub" else array
