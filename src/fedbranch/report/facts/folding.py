"""Make numbers, curves and matrices small enough for a page."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["folded", "number", "numbers", "thinned"]


def number(value: float | None) -> float | None:
    """Round to four digits, more than can be seen; return None for a number that is not finite.

    Examples
    --------
    >>> number(0.123456), number(math.nan), number(12)
    (0.1235, None, 12)
    """
    if value is None or not math.isfinite(value):
        return None
    if isinstance(value, int):
        return value
    rounded = float(f"{value:.4g}")
    return rounded if math.isfinite(rounded) else value  # the largest floats round to infinity


def numbers(values: Iterable[float | None]) -> list[float | None]:
    """Round every value as :func:`number` does."""
    return [number(value) for value in values]


def thinned(rounds: Sequence[int], kept: Collection[int], most: int) -> list[int]:
    """Leave rounds out at equal distances until at most ``most`` remain.

    Parameters
    ----------
    rounds
        Ascending.
    kept
        Rounds that stay, like the first and the last. If there are too many of them, some at
        equal distances stay.
    most
        At least 2.

    Examples
    --------
    >>> thinned(range(1, 101), {50}, 5)
    [1, 26, 50, 75, 100]
    """
    if len(rounds) <= most:
        return list(rounds)
    chosen = {rounds[0], rounds[-1]}
    chosen |= set(_evenly(sorted(set(rounds) & set(kept) - chosen), most - 2))
    chosen |= set(_evenly(sorted(set(rounds) - chosen), most - len(chosen)))
    return sorted(chosen)


def folded(matrix: NDArray[np.floating], size: int) -> NDArray[np.float64]:
    """Average neighbouring rows and columns of a square matrix to ``size`` cells per side.

    Cell i has the rows from ``i * len(matrix) // size`` on, up to the next cell's.

    Examples
    --------
    >>> folded(np.array([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [0.5, 0.5, 1.0]]), 1).tolist()
    [[0.5555555555555556]]
    """
    starts = np.arange(size) * len(matrix) // size
    counts = np.diff(np.append(starts, len(matrix)))
    sums = np.add.reduceat(np.add.reduceat(matrix.astype(np.float64), starts, 0), starts, 1)
    means: NDArray[np.float64] = sums / np.outer(counts, counts)
    return means


def _evenly(rounds: Sequence[int], most: int) -> list[int]:
    """Choose ``most`` rounds at equal distances from each other and from both ends."""
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[(2 * i + 1) * len(rounds) // (2 * most)] for i in range(most)]
