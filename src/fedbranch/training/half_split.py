"""A client's data as two random halves.

Two models that are trained from the same start, each on one half, differ by what the choice
of examples does to an update: its noise, which one update alone does not show.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbranch.training.seeds import stream_seed

__all__ = ["Halves", "half_rows", "halves_seed", "training_seeds"]

FEWEST_ROWS = 4  # so that each half has two, which BatchNorm needs


class Halves(NamedTuple):
    """Rows of a client's training data; ascending, each row in one of them."""

    first_rows: NDArray[np.intp]
    second_rows: NDArray[np.intp]


def halves_seed(seed: int, client_id: str) -> int:
    """Derive the seed for all halves of a client from that of a run."""
    return stream_seed(seed, "halves", client_id)


def half_rows(num_rows: int, seed: int, halves: int) -> Halves | None:
    """Divide a client's rows into two random halves.

    Parameters
    ----------
    num_rows
        How many rows the client trains on.
    seed
        The client's own, from :func:`halves_seed`.
    halves
        Which halves: the same number, the same halves.

    Returns
    -------
    Halves or None
        The second half has one row more if their number is odd. None for fewer than four
        rows, which cannot be divided so that a model could be trained on both sides.

    Examples
    --------
    >>> half_rows(5, seed=0, halves=4)
    Halves(first_rows=array([0, 3]), second_rows=array([1, 2, 4]))
    """
    if num_rows < FEWEST_ROWS:
        return None
    order = np.random.default_rng(stream_seed(seed, halves)).permutation(num_rows)
    middle = num_rows // 2
    return Halves(np.sort(order[:middle]), np.sort(order[middle:]))


def training_seeds(seed: int) -> tuple[int, int]:
    """Derive the seeds for training on each half from the one for training on all."""
    return stream_seed(seed, "first half"), stream_seed(seed, "second half")
