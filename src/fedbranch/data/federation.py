"""One data set becomes a federation: rows for each client, transforms for each group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedbranch.data.clients import ClientData
from fedbranch.data.examples import Examples, as_examples
from fedbranch.data.groups import Transform
from fedbranch.data.partition import ClientRows, iid

__all__ = ["Partition", "federate"]

Partition: TypeAlias = Callable[..., list[ClientRows]]
Arrays: TypeAlias = tuple[NDArray[Any], NDArray[Any]]


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
    """Divide one data set among clients in groups.

    Parameters
    ----------
    x, y
        One row for each example.
    num_clients
        How many clients to make.
    groups
        A transform for each group. Without any there is one group with unchanged data.
    group_of
        The group of each client, as a position in ``groups``. By default client i is in group
        i modulo the number of groups.
    partition
        ``partition(labels, num_clients, seed=seed)`` returns the rows of each client.
    test
        The data set's own test rows. Every client is tested on all of them, changed by its
        group's transform. No row of ``x`` and ``y`` is held out.
    held_out
        Used without ``test``. With ``"shared"`` every client is tested on all held-out rows,
        changed by its group's transform, as in the paper. With ``"own"`` every client is
        tested on held-out rows of its own.
    test_fraction
        Used without ``test``: the fraction of rows that is held out, in (0, 1).
    validation_fraction
        The fraction of every client's own training rows that becomes validation rows, in
        [0, 1). The other training rows and the test rows do not depend on it.
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
    rows = as_examples((x, y), "the data set")
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction is {test_fraction}; it must lie between 0 and 1")
    if not 0 <= validation_fraction < 1:
        raise ValueError(
            f"validation_fraction is {validation_fraction}; it must be at least 0 and below 1"
        )
    if held_out not in ("shared", "own"):
        raise ValueError(f"held_out is {held_out!r}; it must be 'shared' or 'own'")
    chosen = _groups_of_clients(num_clients, max(1, len(groups)), group_of)
    split_seed, part_seed, *group_seeds, validation_seed = _independent_seeds(
        seed, 3 + 2 * num_clients
    )
    tested = rows if test is None else as_examples(test, "test")
    if test is not None:
        parts = partition(rows.y, num_clients, seed=part_seed)
        tests = [np.arange(len(tested.y))] * num_clients
    elif held_out == "shared":
        train_rows, test_rows = _split_off(
            np.arange(len(rows.y)), test_fraction, split_seed, "test"
        )
        parts = [
            train_rows[part] for part in partition(rows.y[train_rows], num_clients, seed=part_seed)
        ]
        tests = [test_rows] * num_clients
    else:
        whole = partition(rows.y, num_clients, seed=part_seed)
        pairs = [_split_off(part, test_fraction, split_seed, "test") for part in whole]
        parts, tests = [train for train, _ in pairs], [test for _, test in pairs]

    is_shared = test is not None or held_out == "shared"
    num_digits = len(str(num_clients - 1))
    clients = {}
    # Test rows that are the same for a whole group are kept once: with many clients or large
    # images that is the difference between megabytes and gigabytes.
    shared_tests: dict[int, Arrays] = {}
    for i, group in enumerate(chosen):
        train, _ = _see(rows, parts[i], groups, group, group_seeds[2 * i])
        own_test = shared_tests.get(group)
        if own_test is None:
            own_test, was_random = _see(tested, tests[i], groups, group, group_seeds[2 * i + 1])
            if not was_random and is_shared:
                shared_tests[group] = own_test
        validation = None
        if validation_fraction > 0:
            # After the transform, so that a row is the same on either side.
            train, validation = _with_validation(train, validation_fraction, validation_seed)
        clients[f"client-{i:0{num_digits}d}"] = ClientData(
            train, own_test, validation=validation, group=str(group)
        )
    return clients


def _groups_of_clients(
    num_clients: int, num_groups: int, group_of: Sequence[int] | None
) -> list[int]:
    chosen = [i % num_groups for i in range(num_clients)] if group_of is None else list(group_of)
    if len(chosen) != num_clients or not all(0 <= group < num_groups for group in chosen):
        raise ValueError(
            f"group_of is {chosen}; it must have one of the {num_groups} groups, counted from 0, "
            f"for each of the {num_clients} clients"
        )
    return chosen


def _see(
    rows: Examples, part: ClientRows, groups: Sequence[Transform], group: int, seed: int
) -> tuple[Arrays, bool]:
    """Return a group's view of rows, and whether the transform drew random numbers."""
    x, y = rows.x[part], rows.y[part]
    if not groups:
        return (x, y), False
    rng = np.random.default_rng(seed)
    before = rng.bit_generator.state
    seen = groups[group](x, y, rng)
    return seen, rng.bit_generator.state != before


def _split_off(
    rows: ClientRows, fraction: float, seed: int, name: str
) -> tuple[ClientRows, ClientRows]:
    num_aside = min(max(1, round(len(rows) * fraction)), len(rows) - 1)
    if num_aside < 1:
        raise ValueError(f"{len(rows)} row(s) cannot be split into training and {name} rows")
    order = np.random.default_rng(seed).permutation(rows)
    return np.sort(order[num_aside:]), np.sort(order[:num_aside])


def _with_validation(train: Arrays, fraction: float, seed: int) -> tuple[Arrays, Arrays]:
    x, y = train
    kept, aside = _split_off(np.arange(len(y)), fraction, seed, "validation")
    return (x[kept], y[kept]), (x[aside], y[aside])


def _independent_seeds(seed: int, count: int) -> list[int]:
    return [int(s) for s in np.random.SeedSequence(seed).generate_state(count, np.uint64)]
