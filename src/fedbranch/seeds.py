"""Seeds for every place of a run, and who is drawn in a round.

What is drawn depends on (seed, round, ...) and on who is there alone: two drivers that ask the
same number of clients ask the same ones, and so does a run that was resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import numpy as np

__all__ = ["draw_clients", "stream_seed"]


def stream_seed(seed: int, *where: int | str) -> int:
    """Derive an independent seed for one place of a run, such as (round, client id).

    Examples
    --------
    >>> stream_seed(0, 3, "client-07") == stream_seed(0, 3, "client-07")
    True
    >>> stream_seed(0, 3, "client-07") == stream_seed(0, 3, "client-08")
    False
    """
    name = "\x1f".join(str(part) for part in (seed, *where))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1


def draw_clients(
    present: Sequence[str], num_asked: int, seed: int, *, first: Collection[str] = ()
) -> list[str]:
    """Draw some of the clients that are there, without replacement.

    Parameters
    ----------
    present
        Client ids, sorted.
    num_asked
        How many to draw; all of them if there are no more.
    seed
        The same seed draws the same clients.
    first
        Clients that are drawn before all others.

    Returns
    -------
    list
        Client ids, sorted.

    Examples
    --------
    >>> draw_clients(["a", "b", "c", "d"], 2, seed=1, first={"d"})
    ['a', 'd']
    """
    if num_asked >= len(present):
        return list(present)
    order = np.random.default_rng(seed).permutation(len(present))
    if first:
        wanted = set(first)
        is_first = np.fromiter((i in wanted for i in present), bool, len(present))
        order = order[np.argsort(~is_first[order], kind="stable")]
    return sorted(present[row] for row in order[:num_asked])
