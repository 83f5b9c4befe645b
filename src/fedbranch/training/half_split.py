"""A split of a client's examples into two random halves.

Two models are trained from the same parameters, each on one half. Their difference shows the
noise of an update, which comes from the choice of examples. One update alone does not show it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbranch.training.seeds import stream_seed

__all__ = ["Halves", "half_rows", "halves_seed", "training_seeds"]

FEWEST_ROWS = 4  # BatchNorm needs two rows in each half


class Halves(NamedTuple):
    """Rows of a client's training data; ascending, each row in exactly one half."""

    first_rows: NDArray[np.intp]
    second_rows: NDArray[np.intp]


def halves_seed(seed: int, client_id: str) -> int:
    """Derive a client's seed for all its halves from the seed of the run."""
    return stream_seed(seed, "halves", client_id)


def half_rows(num_rows: int, seed: int, halves: int) -> Halves | None:
    """Split a client's rows into two random halves.

    Parameters
    ----------
    num_rows
        Number of rows that the client trains on.
    seed
        The client's own seed, from :func:`halves_seed`.
    halves
        Names the split: the same number gives the same halves.

    Returns
    -------
    Halves or None
        The second half has one row more if ``num_rows`` is odd. None for fewer than four
        rows: then a model could not be trained on both halves.

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
    """Derive the seeds for training on each half from the seed for training on all rows."""
    return stream_seed(seed, "first half"), stream_seed(seed, "second half")
