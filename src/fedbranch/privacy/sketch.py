"""A sample of a hidden update's coordinates, with nearly the same cosines.

For the decision to split, the server only compares directions. After a secret rotation, a small
sample of an update's coordinates is enough for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.projection import SMALLEST_SIZE, Variances, bound_from_variances, check_cosine

__all__ = ["Sketch"]


@dataclass(frozen=True)
class Sketch:
    """The first coordinates of a rotated vector, which are a random sample of all.

    Only for vectors that :class:`fedbranch.privacy.Rotation` has hidden. Its secret signs and
    cosine transform spread each vector over all coordinates, and its secret order makes the
    first ones a random sample. If a vector was only permuted, or not hidden at all, its first
    coordinates may be all zero, or miss the largest.

    Attributes
    ----------
    num_hidden
        The length of a hidden vector.
    size
        The number of coordinates that are kept.

    Notes
    -----
    Squared lengths and inner products are unbiased over the secrets. For two vectors
    with cosine c, let N = (a² + b²) / 2 and H = (a² - b²) / 2, with a and b the lengths of the
    sketches of their unit vectors, and e the inner product of these sketches minus c N. Over
    the secrets, e and H have mean 0, N has mean 1, and with f = (num_hidden - size) /
    (num_hidden - 1)

    - Var(e) <= 3/2 f (1 - c²)² / size,
    - Var(N) <= f (1 + c²) / size,
    - Var(H) <= 3/2 f (1 - c²) / size

    for any two vectors that were chosen without knowing the secret. Each of the three is the
    sum of a quadratic form of the signs over a sample without replacement; the bounds follow
    from the fourth moments of the cosine transform, n Σ_i d_ij² d_il² = 1 - 1/n + [l = j] / 2 +
    [l = n - 1 - j] / 2. The factor 3/2 is needed only for vectors with their weight in places
    that mirror each other; for all others it is 1.

    So the error of the cosine is about (1 - c²) / sqrt(size), which is :meth:`typical_error`.
    :func:`fedbranch.core.projection.bound_from_variances` computes :meth:`error_bound` from the
    three variances.

    Examples
    --------
    >>> sketch = Sketch(num_hidden=80_000, size=1000)
    >>> round(sketch.typical_error(0.0), 3), round(sketch.error_bound(0.0, failure=0.05), 3)
    (0.031, 0.386)
    """

    num_hidden: int
    size: int

    def __post_init__(self) -> None:
        if not SMALLEST_SIZE <= self.size <= self.num_hidden:
            raise ValueError(
                f"the sketch has size {self.size}; it must be at least {SMALLEST_SIZE} and at "
                f"most {self.num_hidden}, the length of a hidden vector; 1000 is often enough"
            )

    def of(self, hidden: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
        """Map hidden vectors (..., num_hidden) to their sketches (..., size).

        They are scaled so that squared lengths and inner products are unbiased.
        """
        if hidden.shape[-1:] != (self.num_hidden,):
            raise ValueError(
                f"hidden vectors have shape {hidden.shape}; the last axis must be "
                f"{self.num_hidden} long"
            )
        scale = hidden.dtype.type(math.sqrt(self.num_hidden / self.size))
        return np.asarray(hidden[..., : self.size] * scale)

    def typical_error(self, cosine: float = 0.0) -> float:
        """Compute the standard deviation of the cosine of two sketches, for a true cosine."""
        check_cosine(cosine)
        return (1 - cosine**2) * math.sqrt(self._unseen / self.size)

    def error_bound(self, cosine: float = 0.0, *, failure: float = 0.05) -> float:
        """Compute a bound on the error of the cosine of two sketches.

        Parameters
        ----------
        cosine
            The true one.
        failure
            The bound holds with at least probability 1 - ``failure``, over the secrets.

        Returns
        -------
        float
            Infinite if the size is too small for any bound.
        """
        check_cosine(cosine)
        variance = self._unseen / self.size
        variances = Variances(
            e=1.5 * variance * (1 - cosine**2) ** 2,
            n=variance * (1 + cosine**2),
            h=1.5 * variance * (1 - cosine**2),
        )
        return bound_from_variances(cosine, variances, failure)

    @property
    def _unseen(self) -> float:
        """The factor by which sampling without replacement lowers variances."""
        return (self.num_hidden - self.size) / max(self.num_hidden - 1, 1)
