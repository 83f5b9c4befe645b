"""Whose update is this? The server has N records, or batches, one of which is behind it."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment, quadratic_assignment

from fedbranch.privacy.audit.matching import nearest_rows
from fedbranch.privacy.audit.victims import NUM_UNITS

__all__ = [
    "by_angles",
    "by_loss",
    "by_norm",
    "by_pixel_counts",
    "by_place",
    "by_values",
    "pixel_counts",
]

Numbers: TypeAlias = NDArray[np.floating[Any]]
Rows: TypeAlias = NDArray[np.intp]

LEVELS = np.arange(1, 17) / 16  # the brightness of a scanned digit is a multiple of 1/16


def by_norm(seen: Numbers, candidates: Numbers, noise: float = 0.0) -> Rows:
    """Take the candidate whose gradient is as long: no orthonormal transform changes lengths.

    Noise of a known relative length makes every update longer by a known factor on average,
    which the server takes out.
    """
    lengths = np.linalg.norm(seen.astype(np.float64), axis=1) / (1 + noise**2) ** 0.5
    expected = np.linalg.norm(candidates.astype(np.float64), axis=1)
    return np.asarray(np.argmin(np.abs(lengths[:, None] - expected), axis=1))


def by_loss(reported: Numbers, expected: Numbers) -> Rows:
    """Take the candidate whose loss is the one that the client reports beside its update."""
    return np.asarray(np.argmin(np.abs(reported[:, None] - expected), axis=1))


def by_values(seen: Numbers, candidates: Numbers) -> Rows:
    """Take the candidate whose sorted values are nearest, where places are secret."""
    values, expected = np.sort(seen, axis=1), np.sort(candidates, axis=1)
    places = np.linspace(0, values.shape[1] - 1, expected.shape[1]).round().astype(np.intp)
    return nearest_rows(values[:, places], expected)


def by_place(seen: Numbers, candidates: Numbers) -> Rows:
    """Take the nearest candidate, number by number: what is left if nothing is hidden."""
    return nearest_rows(seen[:, : candidates.shape[1]], candidates)


def pixel_counts(seen: Numbers) -> Numbers:
    """Count an image's pixels of every brightness from the values alone, without the model.

    Of one record, a unit's weight gradients are its bias gradient times the pixels. So among
    the values there is one, the bias gradient, that has its 1/16, 2/16, ... as company, each
    as often as there are such pixels. Which one it is, is seen by trying all of them.

    Returns
    -------
    NDArray
        Shape (clients, 16): how many pixels are 1/16, 2/16, ..., 1.
    """
    counts = np.zeros((len(seen), len(LEVELS)))
    for row, values in enumerate(np.sort(seen.astype(np.float64), axis=1)):
        tolerance = 1e-6 * np.abs(values).max()
        bases = np.unique(values[np.abs(values) > 1e3 * tolerance])
        if not len(bases):
            continue
        expected = bases[:, None] * LEVELS
        found = np.searchsorted(values, expected + tolerance, "right") - np.searchsorted(
            values, expected - tolerance, "left"
        )
        found[:, -1] -= 1  # itself
        # Those with most company are the bias gradients; by chance some values are near others.
        best = np.argsort(found.sum(1))[-NUM_UNITS // 2 :]
        counts[row] = np.median(found[best], axis=0)
    return counts


def by_pixel_counts(seen: Numbers, images: Numbers) -> Rows:
    """Take the candidate that has as many pixels of every brightness, without the model."""
    levels = np.rint(images * len(LEVELS)).astype(np.intp)
    expected = np.stack([np.bincount(row, minlength=len(LEVELS) + 1)[1:] for row in levels])
    return nearest_rows(pixel_counts(seen), expected.astype(np.float64))


def by_angles(seen: Numbers, candidates: Numbers) -> Rows:
    """Match all clients with all candidates so that lengths and angles between them agree.

    Where one length is blurred by noise, the angles to all others still say who is who.

    Parameters
    ----------
    seen, candidates
        As many clients as candidates, in any order.
    """
    ours, theirs = (_products(rows) for rows in (seen, candidates))
    lengths = (np.sqrt(np.diag(products)) for products in (ours, theirs))
    start = linear_sum_assignment(np.abs(np.subtract.outer(*lengths)))[1]
    # The second start is every client's sorted angles: they say who it is without names.
    profiles = [np.sort(products, axis=1) for products in (ours, theirs)]
    distances = ((profiles[0][:, None] - profiles[1][None]) ** 2).sum(2)
    starts = [start, linear_sum_assignment(distances)[1]]
    best, most = start, -np.inf
    for rows in starts:
        weights = np.eye(len(rows))[rows]
        options = {
            "P0": weights,
            "maximize": True,
            "maxiter": 60,
            "rng": np.random.default_rng(
                0
            ),  # nothing is drawn, but SciPy would look at NumPy's own
        }
        result = quadratic_assignment(ours, theirs, method="faq", options=options)
        if result.fun > most:
            best, most = result.col_ind, result.fun
    return np.asarray(best, np.intp)


def _products(vectors: Numbers) -> Numbers:
    rows = vectors.astype(np.float64)
    products: Numbers = rows @ rows.T
    return products
