"""Samples of rows that do not depend on any pattern in the order of the rows.

Every tenth row would be a bad sample where every tenth client belongs to one group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["some_rows"]


def some_rows(num_rows: int, num_wanted: int, *where: int) -> NDArray[np.intp]:
    """Draw some of the rows, each as likely as any other.

    Parameters
    ----------
    num_rows
        Rows 0 to num_rows - 1 can be drawn.
    num_wanted
        Size of the sample; if there are no more rows than this, all are returned.
    where
        Names the draw, for example by the round. The same name gives the same rows, with every
        version of NumPy.

    Returns
    -------
    NDArray
        Ascending.

    Examples
    --------
    >>> some_rows(5, 9)
    array([0, 1, 2, 3, 4])
    >>> len(some_rows(1000, 9, 3)), np.array_equal(some_rows(1000, 9, 3), some_rows(1000, 9, 4))
    (9, False)
    """
    if num_rows <= num_wanted:
        return np.arange(num_rows)
    keys = np.random.PCG64((num_rows, *where)).random_raw(num_rows)
    return np.sort(np.argsort(keys, kind="stable")[:num_wanted])
