"""Secret orthonormal transforms of what clients send: norms, angles and means survive them.

The server averages and compares hidden vectors as it would plain ones. Members, which know the
secret, undo the transform.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.fft import dct, idct, next_fast_len

from fedbranch.privacy.secret import Secret

__all__ = ["Kind", "Orthonormal", "Permutation", "Rotation", "Transform"]

Kind: TypeAlias = Literal["rotation", "permutation"]
Vectors: TypeAlias = NDArray[np.floating[Any]]


class Orthonormal(Protocol):
    """A map of vectors to hidden ones with the same lengths and angles, and back."""

    @property
    def num_plain(self) -> int:
        """The length of a plain vector."""

    @property
    def num_hidden(self) -> int:
        """The length of a hidden vector."""

    def hide(self, vectors: Vectors) -> Vectors:
        """Map (..., num_plain) to (..., num_hidden)."""

    def reveal(self, vectors: Vectors) -> Vectors:
        """Map (..., num_hidden) back to (..., num_plain)."""


@dataclass(frozen=True)
class Permutation:
    """A secret order of the numbers: the paper's transform.

    Means of hidden vectors are hidden means to the bit. But the values themselves stay the same,
    and they reveal a lot; see docs/privacy.md.

    Examples
    --------
    >>> numbers = np.arange(5, dtype=np.float32)
    >>> hidden = Permutation(Secret(bytes(32), "demo"), 5, purpose="params").hide(numbers)
    >>> hidden
    array([0., 1., 3., 2., 4.], dtype=float32)
    """

    secret: Secret
    num_plain: int
    purpose: str

    @property
    def num_hidden(self) -> int:
        """The length of a hidden vector: that of a plain one."""
        return self.num_plain

    @cached_property
    def order(self) -> NDArray[np.intp]:
        """Position in a hidden vector -> position in the plain one."""
        return _secret_order(self.secret, self.purpose, self.num_plain)

    def hide(self, vectors: Vectors) -> Vectors:
        """Put the numbers in the secret order."""
        _check(vectors, self.num_plain, "plain")
        return np.take(vectors, self.order, axis=-1)

    def reveal(self, vectors: Vectors) -> Vectors:
        """Put the numbers back in their places."""
        _check(vectors, self.num_hidden, "hidden")
        plain = np.empty_like(vectors)
        plain[..., self.order] = vectors
        return plain


@dataclass(frozen=True)
class Rotation:
    """Secret signs, a cosine transform that mixes all numbers, and a secret order.

    Each hidden number is a sum of all numbers with secret signs. Without the secret order, the
    server could undo the cosine transform, which is public. It would then have the numbers in
    their places, but for their signs: worse than a permutation.

    Examples
    --------
    >>> rotation = Rotation(Secret(bytes(32), "demo"), 3, purpose="params")
    >>> hidden = rotation.hide(np.float32([3.0, 4.0, 0.0]))
    >>> hidden.shape, float(np.linalg.norm(hidden))
    ((3,), 5.0)
    >>> rotation.reveal(hidden).round(6)
    array([3., 4., 0.], dtype=float32)
    """

    secret: Secret
    num_plain: int
    purpose: str

    @property
    def num_hidden(self) -> int:
        """The length of a hidden vector: a little longer, so that the transform is fast."""
        return int(next_fast_len(self.num_plain, real=True)) if self.num_plain else 0

    @cached_property
    def order(self) -> NDArray[np.intp]:
        """Position in a hidden vector -> position after the cosine transform."""
        return _secret_order(self.secret, self.purpose, self.num_hidden)

    @cached_property
    def signs(self) -> NDArray[np.float64]:
        """1 or -1 for each number of a plain vector."""
        num_bytes = -(-self.num_plain // 8)
        drawn = np.frombuffer(self.secret.stream(f"{self.purpose}: signs", num_bytes), np.uint8)
        bits = np.unpackbits(drawn)[: self.num_plain]
        return np.where(bits, -1.0, 1.0)

    def hide(self, vectors: Vectors) -> Vectors:
        """Mix the numbers."""
        _check(vectors, self.num_plain, "plain")
        if not self.num_plain:
            return vectors
        padded = np.zeros((*vectors.shape[:-1], self.num_hidden))
        np.multiply(vectors, self.signs, out=padded[..., : self.num_plain])
        mixed = dct(padded, norm="ortho", overwrite_x=True)
        return np.take(mixed, self.order, axis=-1).astype(vectors.dtype)

    def reveal(self, vectors: Vectors) -> Vectors:
        """Undo the mixing."""
        _check(vectors, self.num_hidden, "hidden")
        if not self.num_plain:
            return vectors
        mixed = np.empty(vectors.shape)
        mixed[..., self.order] = vectors
        padded: Vectors = idct(mixed, norm="ortho", overwrite_x=True)
        return (padded[..., : self.num_plain] * self.signs).astype(vectors.dtype)


@dataclass(frozen=True)
class Transform:
    """The transforms of all that the server averages, in three blocks.

    Attributes
    ----------
    params
        Parameters, which the server also compares.
    buffers
        Statistics, such as those of BatchNorm.
    counters
        Whole numbers among the buffers. They may be large, so rounding errors of rotating them
        must not get into the statistics. They are rounded to whole numbers again.
    """

    params: Orthonormal
    buffers: Orthonormal
    counters: Orthonormal

    @classmethod
    def of(
        cls,
        secret: Secret,
        kind: Kind,
        *,
        num_params: int,
        num_buffers: int = 0,
        num_counters: int = 0,
    ) -> Transform:
        """Make the transform that follows from a secret.

        Examples
        --------
        >>> transform = Transform.of(Secret(bytes(32), "demo"), "rotation", num_params=1000)
        >>> transform.params.num_hidden, transform.buffers.num_hidden
        (1000, 0)
        """
        if kind not in get_args(Kind):
            raise ValueError(f"the transform is {kind!r}; it must be one of {get_args(Kind)}")
        make = Rotation if kind == "rotation" else Permutation
        return cls(
            make(secret, num_params, f"{kind} of parameters"),
            make(secret, num_buffers, f"{kind} of buffers"),
            make(secret, num_counters, f"{kind} of counters"),
        )


def _secret_order(secret: Secret, purpose: str, size: int) -> NDArray[np.intp]:
    """Draw a permutation: the order of random 64-bit numbers, which are hardly ever equal."""
    drawn = np.frombuffer(secret.stream(f"{purpose}: order", 8 * size), "<u8")
    return np.argsort(drawn, kind="stable")


def _check(vectors: Vectors, expected: int, which: str) -> None:
    if not np.issubdtype(vectors.dtype, np.floating):
        raise TypeError(f"{which} vectors have dtype {vectors.dtype}; only floats can be mixed")
    if vectors.shape[-1:] != (expected,):
        raise ValueError(
            f"{which} vectors have shape {vectors.shape}; the last axis must be {expected} long"
        )
