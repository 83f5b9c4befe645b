"""Zeros in the same updates: weights of one pixel, or of one word, show that they belong together.

This needs many updates that are hidden by the same transform, and a transform that keeps zeros.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment, quadratic_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from studies.privacy_audit.victims import NUM_PIXELS, Digits

__all__ = ["images_from_zeros", "zero_groups"]

Numbers: TypeAlias = NDArray[np.floating[Any]]

MIN_OVERLAP = 0.9  # intersection over union of the updates in which two places are zero, or used
MIN_PLACES_PER_PIXEL = 8
BRIGHTNESS_LEVELS = np.array([0.0, 0.1, 0.25, 0.5, 0.75, 0.9])
MAX_MATCHING_STEPS = 200


def zero_groups(seen: Numbers, least: int) -> list[NDArray[np.intp]]:
    """Group the places that are zero in the same updates.

    Weights that belong to one pixel, or to one word, are zero for each client without it. They
    are recognised as a group in whatever order they come. Places that are never zero, or
    always, belong to no group.

    Parameters
    ----------
    seen
        Shape (clients, places).
    least
        The size of the smallest group that is returned.
    """
    used = (np.abs(seen) > 1e-7 * np.abs(seen).max(1, keepdims=True)).astype(np.float32)
    share = used.mean(0)
    places = np.flatnonzero((share > 0) & (share < 1 - 1e-3))
    alike = np.ones((len(places), len(places)), bool)
    for marks in (used[:, places], 1 - used[:, places]):
        both = marks.T @ marks
        counts = np.diag(both)
        alike &= both >= MIN_OVERLAP * (counts[:, None] + counts[None, :] - both)
    num_groups, group_of = connected_components(csr_array(alike))
    sizes = np.bincount(group_of, minlength=num_groups)
    return [places[group_of == group] for group in np.flatnonzero(sizes >= least)]


def images_from_zeros(seen: Numbers, public: Digits) -> Numbers:
    """Group the weights of each pixel, name the groups by public digits, and read the images.

    Needs neither the model nor the transform, only that the places are the same in all rows.

    Parameters
    ----------
    seen
        Shape (clients, at least num_params), of one record each.

    Returns
    -------
    NDArray
        Shape (clients, 64). The mean image, if there are no groups.
    """
    groups = zero_groups(seen, least=MIN_PLACES_PER_PIXEL)
    if not NUM_PIXELS // 2 <= len(groups) <= NUM_PIXELS:
        return np.tile(public.images.mean(0), (len(seen), 1))
    # All values of a group are a unit's bias gradient times the pixel, so their size is the
    # pixel's brightness but for a factor.
    sizes = np.stack([np.abs(seen[:, places]).mean(1) for places in groups], axis=1)
    brightness = sizes / sizes.max(1, keepdims=True)
    columns = np.zeros((len(seen), NUM_PIXELS))
    columns[:, : len(groups)] = brightness
    images = np.zeros_like(columns)
    images[:, _pixels_of(columns, public.images)] = columns
    return images


def _pixels_of(columns: Numbers, public: Numbers) -> NDArray[np.intp]:
    """Match columns with pixels: by their brightness, and by which are bright together."""
    profiles, together = [], []
    for rows in (columns, public.astype(np.float64)):
        above = [(rows > level + 1e-4).mean(0) for level in BRIGHTNESS_LEVELS]
        profiles.append(np.column_stack([*above, rows.mean(0), rows.std(0)]))
        together.append(np.cov((rows > 1e-4).T.astype(np.float64)) + np.cov(rows.T))
    distances = ((profiles[0][:, None] - profiles[1][None]) ** 2).sum(2)
    start = linear_sum_assignment(distances)[1]
    # Nothing is drawn, but without a generator SciPy would use NumPy's global one.
    unused = np.random.default_rng(0)
    options = {
        "P0": np.eye(NUM_PIXELS)[start],
        "maximize": True,
        "maxiter": MAX_MATCHING_STEPS,
        "rng": unused,
    }
    result = quadratic_assignment(*together, method="faq", options=options)
    return np.asarray(result.col_ind, np.intp)
