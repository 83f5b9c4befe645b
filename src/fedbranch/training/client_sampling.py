"""The clients that are asked in a round.

The draw depends on the seed and the present clients alone. So two drivers that ask the same
number of clients ask the same ones, and so does a run that was resumed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

__all__ = ["draw_clients"]


def draw_clients(
    present: Sequence[str], num_asked: int, seed: int, *, first: Collection[str] = ()
) -> list[str]:
    """Draw present clients at random, without replacement.

    Parameters
    ----------
    present
        Client ids, sorted.
    num_asked
        The number of clients to draw. If no more are present, all are drawn.
    seed
        The same seed draws the same clients.
    first
        Ids of clients that are drawn before all others; ids that are not present are ignored.

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
