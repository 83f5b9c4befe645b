"""The Separation Theorem: bounds of similarities, and when a split is guaranteed to be right.

Symbols: k is the number of data distributions; γ_i is a client's relative noise,
‖∇R − ∇r_i‖ / ‖∇R‖, the distance of its empirical gradient from its distribution's true
one; H_ij bounds from below the similarity of two clients of one distribution.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "cross_similarity_bound",
    "guaranteed_noise",
    "intra_similarity_bound",
    "is_split_guaranteed",
    "tolerated_noise",
    "true_cross_similarity_bound",
    "typical_intra_similarity",
]


def intra_similarity_bound(noise: ArrayLike, other_noise: ArrayLike) -> NDArray[np.float64]:
    """Bound the similarity of two clients of one distribution from below (H_ij).

    Parameters
    ----------
    noise, other_noise
        γ_i and γ_j, each in [0, 1); broadcast against each other.

    Returns
    -------
    NDArray
        −γ_i γ_j + √(1 − γ_i²) √(1 − γ_j²).

    Examples
    --------
    >>> float(intra_similarity_bound(0.0, 0.0))
    1.0
    """
    a, b = _checked_noise(noise), _checked_noise(other_noise)
    return np.asarray(-a * b + np.sqrt(1 - a**2) * np.sqrt(1 - b**2))


def true_cross_similarity_bound(num_groups: int) -> float:
    """Bound the cross-similarity of k vectors that sum to zero: cos(π / (k − 1)).

    At a stationary point the distributions' true gradients sum to zero, so some split of
    them has no larger similarity across (the paper's third lemma).

    Examples
    --------
    >>> true_cross_similarity_bound(2)
    -1.0
    """
    if num_groups < 2:
        raise ValueError(f"num_groups is {num_groups}; a split needs at least 2")
    return math.cos(math.pi / (num_groups - 1))


def cross_similarity_bound(
    num_groups: int, noise: ArrayLike, other_noise: ArrayLike
) -> NDArray[np.float64]:
    """Bound the optimal bipartition's cross-similarity from above (the theorem's first part).

    Parameters
    ----------
    num_groups
        k, the number of data distributions.
    noise, other_noise
        γ_i and γ_j, each in [0, 1). Over all clients the bound is the largest over the
        pairs, so pass ``noise[:, None]`` and ``noise[None, :]`` and take the maximum.

    Returns
    -------
    NDArray
        cos(π/(k−1)) H + sin(π/(k−1)) √(1 − H²) if H ≥ cos(π/(k−1)), else 1.

    Examples
    --------
    >>> float(cross_similarity_bound(2, 0.0, 0.0))
    -1.0
    """
    weakest = true_cross_similarity_bound(num_groups)
    h = intra_similarity_bound(noise, other_noise)
    bound = weakest * h + math.sqrt(max(0.0, 1 - weakest**2)) * np.sqrt(np.maximum(0.0, 1 - h**2))
    return np.where(h >= weakest, bound, 1.0)


def is_split_guaranteed(num_groups: int, noise: ArrayLike) -> bool:
    """Return whether the theorem guarantees a correct split for these clients' noise.

    Parameters
    ----------
    num_groups
        k, the number of data distributions.
    noise
        γ_i of every client, shape (num_clients,).

    Examples
    --------
    >>> is_split_guaranteed(3, [0.38, 0.38]), is_split_guaranteed(3, [0.39, 0.39])
    (True, False)
    """
    gammas = np.atleast_1d(np.asarray(noise, dtype=np.float64))
    intra = intra_similarity_bound(gammas[:, None], gammas[None, :])
    cross = cross_similarity_bound(num_groups, gammas[:, None], gammas[None, :])
    return bool(intra.min() > cross.max())


def guaranteed_noise(num_groups: int) -> float:
    """Compute the noise below which k groups always separate: γ*(k) = sin(π / (4 (k − 1))).

    Examples
    --------
    >>> round(guaranteed_noise(4), 4)
    0.2588
    """
    if num_groups < 2:
        raise ValueError(f"num_groups is {num_groups}; a split needs at least 2")
    return math.sin(math.pi / (4 * (num_groups - 1)))


def tolerated_noise(cross_similarity: float) -> float:
    """Compute the noise up to which a split is correct in the worst case: √((1 − α_cross) / 2).

    A split may be trusted if every client's γ_i is smaller. The paper compares γ_max with this
    bound, which does not depend on the number of groups.

    Examples
    --------
    >>> tolerated_noise(-1.0), tolerated_noise(1.0)
    (1.0, 0.0)
    """
    if not -1 <= cross_similarity <= 1:
        raise ValueError(f"cross_similarity is {cross_similarity}; a cosine lies in [-1, 1]")
    return math.sqrt((1 - cross_similarity) / 2)


def typical_intra_similarity(noise: ArrayLike) -> NDArray[np.float64]:
    """Compute the similarity to expect within a group in high dimension: 1 / (1 + γ²).

    Independent noise is then nearly orthogonal to everything; the theorem's 1 − 2γ² is
    the worst case, in which the noise of two clients points in opposite directions.

    Examples
    --------
    >>> float(typical_intra_similarity(1.0))
    0.5
    """
    return np.asarray(1 / (1 + np.asarray(noise, dtype=np.float64) ** 2))


def _checked_noise(noise: ArrayLike) -> NDArray[np.float64]:
    gamma = np.asarray(noise, dtype=np.float64)
    if not ((gamma >= 0) & (gamma < 1)).all():
        raise ValueError(f"noise is {noise!r}; the theorem holds for values in [0, 1)")
    return gamma
