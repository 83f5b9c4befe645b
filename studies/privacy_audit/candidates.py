"""Which candidate an update belongs to: the server has N records, or batches, to choose from."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment, quadratic_assignment

from studies.privacy_audit.victims import NUM_UNITS

__all__ = [
    "by_angles",
    "by_loss",
    "by_norm",
    "by_pixel_counts",
    "by_place",
    "by_values",
    "nearest_rows",
    "pixel_counts",
]

Numbers: TypeAlias = NDArray[np.floating[Any]]
Rows: TypeAlias = NDArray[np.intp]

LEVELS = np.arange(1, 17) / 16  # the brightness of a scanned digit is a multiple of 1/16
MAX_MATCHING_STEPS = 60


def by_norm(seen: Numbers, candidates: Numbers, noise: float = 0.0) -> Rows:
    """Choose the candidate with the gradient of the same length.

    No orthonormal transform changes lengths. Noise of a known relative length makes all
    updates longer by a known factor on average, which the server takes out.
    """
    lengths = np.linalg.norm(seen.astype(np.float64), axis=1) / (1 + noise**2) ** 0.5
    expected = np.linalg.norm(candidates.astype(np.float64), axis=1)
    return np.asarray(np.argmin(np.abs(lengths[:, None] - expected), axis=1))


def by_loss(reported: Numbers, expected: Numbers) -> Rows:
    """Choose the candidate with the loss that the client reports beside its update."""
    return np.asarray(np.argmin(np.abs(reported[:, None] - expected), axis=1))


def by_values(seen: Numbers, candidates: Numbers) -> Rows:
    """Choose the candidate with the nearest sorted values, where places are secret."""
    values, expected = np.sort(seen, axis=1), np.sort(candidates, axis=1)
    places = np.linspace(0, values.shape[1] - 1, expected.shape[1]).round().astype(np.intp)
    return nearest_rows(values[:, places], expected)


def by_place(seen: Numbers, candidates: Numbers) -> Rows:
    """Choose the nearest candidate, number by number: this works if nothing is hidden."""
    return nearest_rows(seen[:, : candidates.shape[1]], candidates)


def nearest_rows(rows: Numbers, among: Numbers) -> Rows:
    """Return, for each row, the position of the nearest row of ``among``."""
    squares = (among.astype(np.float64) ** 2).sum(1)
    distances = squares - 2 * rows.astype(np.float64) @ among.astype(np.float64).T
    return np.asarray(np.argmin(distances, axis=1))


def pixel_counts(seen: Numbers) -> Numbers:
    """Count an image's pixels of each brightness from the values alone, without the model.

    For one record, a unit's weight gradients are its bias gradient times the pixels. So one of
    the values, the bias gradient, comes with 1/16, 2/16, ... of itself, each as often as the
    image has pixels of that brightness. All values are tried as bias gradients.

    Returns
    -------
    NDArray
        Shape (clients, 16): the numbers of pixels that are 1/16, 2/16, ..., 1.
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
        found[:, -1] -= 1  # the value itself
        # The bias gradients have the most multiples; a few other values are near by chance.
        best = np.argsort(found.sum(1))[-NUM_UNITS // 2 :]
        counts[row] = np.median(found[best], axis=0)
    return counts


def by_pixel_counts(seen: Numbers, images: Numbers) -> Rows:
    """Choose the candidate with as many pixels of each brightness, without the model."""
    levels = np.rint(images * len(LEVELS)).astype(np.intp)
    expected = np.stack([np.bincount(row, minlength=len(LEVELS) + 1)[1:] for row in levels])
    return nearest_rows(pixel_counts(seen), expected.astype(np.float64))


def by_angles(seen: Numbers, candidates: Numbers) -> Rows:
    """Match all clients with all candidates so that lengths and angles between them agree.

    Noise may blur one length, but the angles to all other clients still identify a client.

    Parameters
    ----------
    seen, candidates
        Equal numbers of clients and candidates, in any order.
    """
    ours, theirs = (_products(rows) for rows in (seen, candidates))
    lengths = (np.sqrt(np.diag(products)) for products in (ours, theirs))
    start = linear_sum_assignment(np.abs(np.subtract.outer(*lengths)))[1]
    # The second start compares sorted angles, which do not depend on the order of the others.
    profiles = [np.sort(products, axis=1) for products in (ours, theirs)]
    distances = ((profiles[0][:, None] - profiles[1][None]) ** 2).sum(2)
    starts = [start, linear_sum_assignment(distances)[1]]
    best, most = start, -np.inf
    for rows in starts:
        # Nothing is drawn, but without a generator SciPy would use NumPy's global one.
        unused = np.random.default_rng(0)
        options = {
            "P0": np.eye(len(rows))[rows],
            "maximize": True,
            "maxiter": MAX_MATCHING_STEPS,
            "rng": unused,
        }
        result = quadratic_assignment(ours, theirs, method="faq", options=options)
        if result.fun > most:
            best, most = result.col_ind, result.fun
    return np.asarray(best, np.intp)


def _products(vectors: Numbers) -> Numbers:
    rows = vectors.astype(np.float64)
    products: Numbers = rows @ rows.T
    return products
