"""Partitions: which rows each client gets. Every row goes to exactly one client."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["ClientRows", "dirichlet", "iid", "quantity_skew", "shards"]

ClientRows: TypeAlias = NDArray[np.intp]
"""The rows of one client: positions in the data set, ascending."""


def iid(labels: ArrayLike, num_clients: int, *, seed: int) -> list[ClientRows]:
    """Divide the rows at random, in equal numbers.

    Parameters
    ----------
    labels
        Shape (num_rows,): the label of each row.
    num_clients
        Number of parts.
    seed
        The same seed gives the same parts.

    Returns
    -------
    list of NDArray
        The rows of each client, ascending.

    Examples
    --------
    >>> [rows.tolist() for rows in iid([0, 1, 0, 1], 2, seed=0)]
    [[0, 2], [1, 3]]
    """
    order = np.random.default_rng(seed).permutation(_num_rows(labels, num_clients))
    return [np.sort(part) for part in np.array_split(order, num_clients)]


def dirichlet(
    labels: ArrayLike, num_clients: int, *, alpha: float, seed: int, min_rows: int = 2
) -> list[ClientRows]:
    """Divide the rows of each label by proportions from a Dirichlet distribution: label skew.

    Parameters
    ----------
    labels
        Shape (num_rows,): the label of each row.
    num_clients
        Number of parts.
    alpha
        Concentration. Large values give nearly iid parts; with 0.1 most clients have few labels.
    seed
        The same seed gives the same parts.
    min_rows
        Proportions are drawn again until every client has at least this number of rows.

    Returns
    -------
    list of NDArray
        The rows of each client, ascending.
    """
    names = np.asarray(labels)
    if _num_rows(labels, num_clients) < min_rows * num_clients:
        raise ValueError(
            f"{len(names)} rows cannot give each of {num_clients} clients {min_rows}; "
            "use fewer clients or a smaller min_rows"
        )
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha is {alpha}; it must be a positive number")
    rng = np.random.default_rng(seed)
    for _ in range(1000):
        parts: list[list[ClientRows]] = [[] for _ in range(num_clients)]
        for label in np.unique(names):
            rows = rng.permutation(np.flatnonzero(names == label))
            proportions = rng.dirichlet(np.full(num_clients, alpha))
            ends = np.round(np.cumsum(proportions)[:-1] * len(rows)).astype(int)
            for part, dealt in zip(parts, np.split(rows, ends), strict=True):
                part.append(dealt)
        joined = [np.sort(np.concatenate(part)) for part in parts]
        if min(len(rows) for rows in joined) >= min_rows:
            return joined
    raise ValueError(
        f"1000 draws with alpha = {alpha} left some client with fewer than {min_rows} rows; "
        "raise alpha or lower min_rows"
    )


def shards(
    labels: ArrayLike, num_clients: int, *, shards_per_client: int = 2, seed: int
) -> list[ClientRows]:
    """Sort the rows by label, cut them into equal shards and divide those: few labels per client.

    Parameters
    ----------
    labels
        Shape (num_rows,): the label of each row.
    num_clients
        Number of parts.
    shards_per_client
        Number of shards that a client gets. With 2, it has rows of about two labels.
    seed
        The same seed gives the same parts.

    Returns
    -------
    list of NDArray
        The rows of each client, ascending.
    """
    if shards_per_client < 1:
        raise ValueError(f"shards_per_client is {shards_per_client}; it must be at least 1")
    num_shards = num_clients * shards_per_client
    if _num_rows(labels, num_clients) < num_shards:
        raise ValueError(
            f"{np.asarray(labels).shape[0]} rows cannot make {num_shards} shards; use fewer"
        )
    by_label = np.argsort(np.asarray(labels), kind="stable")
    pieces = np.array_split(by_label, num_shards)
    order = np.random.default_rng(seed).permutation(num_shards)
    return [
        np.sort(np.concatenate([pieces[shard] for shard in order[client::num_clients]]))
        for client in range(num_clients)
    ]


def quantity_skew(
    labels: ArrayLike, num_clients: int, *, ratio: float, seed: int
) -> list[ClientRows]:
    """Divide the rows at random, in numbers that grow geometrically from client to client.

    Parameters
    ----------
    labels
        Shape (num_rows,): the label of each row.
    num_clients
        Number of parts.
    ratio
        Rows of the largest client divided by those of the smallest.
    seed
        Decides the rows and the size of each client.

    Returns
    -------
    list of NDArray
        The rows of each client, ascending.
    """
    num_rows = _num_rows(labels, num_clients)
    if not 1 <= ratio < np.inf:
        raise ValueError(f"ratio is {ratio}; it must be at least 1")
    rng = np.random.default_rng(seed)
    sizes = rng.permutation(np.geomspace(1, ratio, num_clients))
    # Every client gets one row first, so that none is empty; the other rows go by size.
    ends = np.round(np.cumsum(sizes / sizes.sum()) * (num_rows - num_clients)).astype(int)
    ends += np.arange(1, num_clients + 1)
    return [np.sort(part) for part in np.split(rng.permutation(num_rows), ends[:-1])]


def _num_rows(labels: ArrayLike, num_clients: int) -> int:
    num_rows = len(np.asarray(labels))
    if not 1 <= num_clients <= num_rows:
        raise ValueError(
            f"num_clients is {num_clients}; {num_rows} rows can be divided among 1 to {num_rows} clients"
        )
    return num_rows
