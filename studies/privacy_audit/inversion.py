"""Images straight from the gradient of a dense layer, also from behind a public transform."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.fft import idct

from studies.privacy_audit.victims import layers

__all__ = ["behind_the_cosines", "inverted", "with_most_zeros"]

Numbers: TypeAlias = NDArray[np.floating[Any]]


def inverted(seen: Numbers, num_guesses: int = 1) -> Numbers:
    """Divide a dense layer's weight gradients by its bias gradients.

    For one record, the gradient of a unit's weights is the gradient of its bias times the
    image. So each unit gives the image; units are weighted by their squared bias gradients.
    For several records, each unit gives a mixture of their images. Then the mixtures that
    leave [0, 1] least are the guesses.

    Parameters
    ----------
    seen
        Shape (clients, at least num_params).

    Returns
    -------
    NDArray
        Shape (clients, num_guesses, 64).
    """
    weights, biases = (part.numpy() for part in layers(torch.from_numpy(seen))[:2])
    if num_guesses == 1:
        scale = np.maximum((biases**2).sum(1), np.finfo(np.float32).tiny)
        images: Numbers = np.einsum("cu,cup->cp", biases, weights) / scale[:, None]
        return images[:, None, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        by_unit = np.nan_to_num(weights / biases[:, :, None], nan=9.0, posinf=9.0, neginf=-9.0)
    outside = np.abs(by_unit - np.clip(by_unit, 0, 1)).sum(2)
    best = np.argsort(outside, axis=1)[:, :num_guesses, None]
    return np.take_along_axis(by_unit, best, axis=1)


def behind_the_cosines(seen: Numbers) -> Numbers:
    """Undo the cosine transform, which is public, and return absolute values.

    If only signs are secret, all values are back in their places but for the signs. Neither
    pixels nor the size of a class's error need the signs.
    """
    return np.abs(with_most_zeros(seen))


def with_most_zeros(seen: Numbers) -> Numbers:
    """Undo the cosine transform if the result has more zeros than what was seen.

    Gradients have many zeros and mixed values have none, so the server sees which of the two
    is plain.
    """
    behind: Numbers = idct(seen, norm="ortho").astype(seen.dtype)
    before, after = (
        (np.abs(rows) < 1e-5 * np.abs(rows).max(1, keepdims=True)).mean() for rows in (seen, behind)
    )
    return seen if before >= after else behind
