"""What a server learns that knows the plain updates, or the records, of some other clients."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.fft import idct

__all__ = ["blended", "labels_of_the_nearest", "revealed"]

Numbers: TypeAlias = NDArray[np.floating[Any]]


def revealed(seen: Numbers, known_seen: Numbers, known_plain: Numbers) -> Numbers:
    """Undo the transform, as far as pairs of plain and hidden updates determine it.

    - If the pairs fit a permutation, it is read off. Equal columns cannot be told apart.
    - If they fit signs behind cosines, the signs are read off.
    - Else each hidden update is written as a combination of the known hidden ones, and the
      same combination of the plain ones is returned. That is right for the part of the update
      within their span.

    Parameters
    ----------
    seen
        Shape (clients, num_hidden).
    known_seen, known_plain
        Shapes (pairs, num_hidden), (pairs, num_plain).
    """
    num_plain = known_plain.shape[1]
    if np.allclose(known_seen[:, :num_plain], known_plain, atol=1e-6):
        return seen  # nothing is hidden
    hidden_order, plain_order = (np.lexsort(rows) for rows in (known_seen, known_plain))
    if known_seen.shape == known_plain.shape and np.array_equal(
        known_seen[:, hidden_order], known_plain[:, plain_order]
    ):
        plain = np.empty_like(seen)
        plain[:, plain_order] = seen[:, hidden_order]
        return plain
    behind = idct(known_seen, norm="ortho")[:, :num_plain]
    if np.allclose(np.abs(behind), np.abs(known_plain), atol=1e-4):
        signs = np.where((behind * known_plain).sum(0) < 0, -1.0, 1.0)
        unsigned: Numbers = idct(seen, norm="ortho")[:, :num_plain] * signs
        return unsigned.astype(seen.dtype)
    shares = np.linalg.lstsq(
        known_seen.T.astype(np.float64), seen.T.astype(np.float64), rcond=1e-6
    )[0]
    combined: Numbers = (shares.T @ known_plain).astype(seen.dtype)
    return combined


def labels_of_the_nearest(
    seen: Numbers, known_seen: Numbers, known_labels: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Guess the label of the known client at the smallest angle; no model is needed."""
    ours, theirs = (rows / np.linalg.norm(rows, axis=1)[:, None] for rows in (seen, known_seen))
    labels: NDArray[np.int64] = known_labels[(ours @ theirs.T).argmax(1)]
    return labels


def blended(seen: Numbers, known_seen: Numbers, known_images: Numbers) -> Numbers:
    """Blend known clients' images with the shares that their updates have in the seen update.

    Needs neither the model nor the transform: the shares follow from lengths and angles.

    Returns
    -------
    NDArray
        Shape (clients, 64).
    """
    ours, theirs = (rows.astype(np.float64) for rows in (seen, known_seen))
    products = theirs @ theirs.T
    steadied = products + 0.05 * products.trace() / len(products) * np.eye(len(products))
    middle = known_images.mean(0)
    shares = np.linalg.solve(steadied, theirs @ ours.T).T
    images: Numbers = middle + shares @ (known_images - middle)
    return images
