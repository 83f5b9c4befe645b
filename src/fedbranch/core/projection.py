"""Sketches: short projections of updates that nearly keep the angles between them.

For sketches of any kind, the error of an angle follows from three variances, see
:func:`bound_from_variances`. :class:`Projection` is the kind that a server can make by itself, of
any vectors.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from fedbranch.core.products import column_blocks
from fedbranch.types import Array

__all__ = ["SMALLEST_SIZE", "Projection", "Variances", "bound_from_variances", "check_cosine"]

SMALLEST_SIZE = 16  # at which a cosine is typically off by 1/4
# If an update has more blocks than this, it is folded twice: first to more numbers than the sketch.
MOST_BLOCKS = 16
ENTRIES_AT_ONCE = 2**16  # in the processor's cache
ENTRIES_AT_ONCE_ELSEWHERE = 2**26  # where every operation is a launch


class Variances(NamedTuple):
    """Variances of three quantities of the sketches of two unit vectors with cosine c.

    With a and b the lengths of the sketches, ``N = (a² + b²) / 2`` has mean 1. ``H = (a² - b²) / 2``
    and ``e``, their inner product minus c N, have mean 0.
    """

    e: float
    n: float
    h: float


def bound_from_variances(cosine: float, variances: Variances, failure: float) -> float:
    """Bound the error of the cosine of two sketches.

    Parameters
    ----------
    cosine
        The true cosine.
    variances
        Or upper bounds of them.
    failure
        The bound holds with at least probability 1 - ``failure``.

    Returns
    -------
    float
        Infinite if the variances are too large to promise anything.

    Notes
    -----
    The cosine of the sketches is off by at most ``(|e| + |c| (N - ab)) / ab``, where ab =
    sqrt(N² - H²). Chebyshev's inequality for each of the three gives the bound. It is wide,
    but needs no assumption.

    Examples
    --------
    >>> round(bound_from_variances(0.0, Variances(e=1e-3, n=1e-3, h=1e-3), failure=0.05), 3)
    0.303
    """
    check_cosine(cosine)
    if not 0 < failure < 1:
        raise ValueError(f"failure is {failure}; it must be between 0 and 1")
    # Half of the failures for e, a quarter each for N and H.
    e = math.sqrt(variances.e * 2 / failure)
    n = 1 - math.sqrt(variances.n * 4 / failure)
    h = math.sqrt(variances.h * 4 / failure)
    if n <= h:
        return math.inf
    product = math.sqrt(n**2 - h**2)
    return (e + abs(cosine) * (n - product)) / product


def check_cosine(cosine: float) -> None:
    """Raise ValueError unless this can be a cosine."""
    if not -1 <= cosine <= 1:
        raise ValueError(f"the cosine is {cosine}; it must be between -1 and 1")


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A sparse random projection of updates to a few numbers, which nearly keeps their angles.

    Every coordinate is added to one of ``size`` buckets, with a sign (a count-sketch).

    Attributes
    ----------
    dim
        Length of an update.
    size
        Length of its sketch.
    seed
        The same seed gives the same projection, with every library and on every device.

    Notes
    -----
    The signs are random and independent. An update is cut into blocks of ``size`` coordinates,
    which are rolled by random shifts and added up. So two coordinates share a bucket with a
    probability of at most p = 1 / size, and never if they are of one block. Where there would
    be many blocks, the update is first folded in the same way into w > size numbers, and these
    into the sketch: then p = 1 / size + 1 / w. The signs stay independent, whatever the shifts.
    A projection to another size has other signs and shifts, also with the same seed. So a sketch
    may be sketched again, to fewer numbers; p is then the sum of both.

    Inner products and squared lengths are right on average over the seeds. Each is a quadratic
    form Σ M_ij s_i s_j [i and j share a bucket] of the signs, of variance 2 Σ_{i≠j} M_ij²
    P(i and j share a bucket) <= 2 p ‖M‖². Two unit vectors with cosine c are u = αp + βq and v = αp -
    βq with p and q orthonormal, α² = (1 + c) / 2 and β² = (1 - c) / 2; so e, N and H of
    :class:`Variances` have the matrices (1 - c²) / 2 (pp' - qq'), α² pp' + β² qq' and
    αβ (pq' + qp'), and

    - Var(e) <= p (1 - c²)²,
    - Var(N) <= p (1 + c²),
    - Var(H) <= p (1 - c²)

    for any two vectors that were chosen without knowing the seed. The cosine is off by e to first
    order in e, N - 1 and H. So where both vectors are spread over many coordinates, which keeps
    these three small, it is off by about (1 - c²) sqrt(p), which is :meth:`typical_error`. Two
    vectors of few coordinates mostly keep their cosine exactly, and are off by far more if these
    coordinates share a bucket. :meth:`error_bound` assumes nothing.

    Sums are formed in float32, in an order that only ``dim`` and ``size`` determine. A bucket
    collects at most about 2 dim / size numbers; entries of up to 1e30 so cannot leave float32
    below dim = 1e8 size.

    Examples
    --------
    >>> projection = Projection(dim=100_000, size=1024)
    >>> projection.of(np.ones((2, 100_000), dtype=np.float32)).shape
    (2, 1024)
    >>> round(projection.typical_error(0.0), 3), round(projection.error_bound(0.0), 3)
    (0.033, 0.322)
    """

    dim: int
    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("dim", "size", "seed"):
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        if self.dim < 1:
            raise ValueError(f"dim is {self.dim}; an update has at least one number")
        if self.size < SMALLEST_SIZE:
            raise ValueError(
                f"size is {self.size}; it must be at least {SMALLEST_SIZE}; 1024 is often enough"
            )
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be at least 0")

    def of(self, updates: Array) -> Array:
        """Project updates.

        Parameters
        ----------
        updates
            Shape (n, dim), floating and finite; float32, or else converted.

        Returns
        -------
        Array
            Shape (n, size), float32, of the same library and on the same device. A row depends
            on nothing but the update, bit for bit. With dim <= size a row is the update, with
            other signs and in another order.
        """
        xp = array_namespace(updates)
        if updates.ndim != 2 or updates.shape[1] != self.dim:
            raise ValueError(
                f"updates have shape {tuple(updates.shape)}; this projection is for "
                f"(num_updates, {self.dim})"
            )
        if not xp.isdtype(updates.dtype, "real floating"):
            raise TypeError(f"updates are {updates.dtype}; convert them to float32")
        on_host = isinstance(updates, np.ndarray)
        signs = xp.asarray(self.signs, device=device(updates))
        at_once = ENTRIES_AT_ONCE if on_host else ENTRIES_AT_ONCE_ELSEWHERE
        sketches: Array = xp.zeros(
            (updates.shape[0], self.size), dtype=xp.float32, device=device(updates)
        )
        for rows in column_blocks(updates.shape[0], at_once // self.block_width + 1):
            folded = self.begin(rows.stop - rows.start, like=updates)
            for block, columns in enumerate(column_blocks(self.dim, self.block_width)):
                part = xp.astype(updates[rows, columns], xp.float32, copy=False)
                self.fold(folded, part * signs[columns], block)
            sketches[rows] = self.end(folded)
        return sketches

    # The same in steps, for callers that read the updates block by block anyway

    @property
    def block_width(self) -> int:
        """Count of columns that are folded at once."""
        return self.widths[0]

    @cached_property
    def signs(self) -> NDArray[np.float32]:
        """Shape (dim,): the sign of every coordinate."""
        raw = self._stream(0).random_raw(-(-self.dim // 64)).astype("<u8")
        bits = np.unpackbits(raw.view(np.uint8), count=self.dim)
        return np.where(bits, np.float32(1), np.float32(-1))

    def begin(self, num_rows: int, like: Array | None = None) -> Array:
        """Begin the sketches of ``num_rows`` updates, in memory like that of an array."""
        shape = (num_rows, self.block_width)
        if like is None:
            return np.zeros(shape, dtype=np.float32)
        xp = array_namespace(like)
        begun: Array = xp.zeros(shape, dtype=xp.float32, device=device(like))
        return begun

    def fold(self, folded: Array, part: Array, block: int) -> None:
        """Add a block of columns, which have their signs already, to sketches that were begun."""
        _add_rolled(folded, part, self.shifts[0][block])

    def end(self, folded: Array) -> Array:
        """Compute the sketches when all blocks were added."""
        sketches = folded
        for narrower, shifts in zip(self.widths[1:], self.shifts[1:], strict=True):
            sums = array_namespace(sketches).zeros_like(sketches[:, :narrower])
            for shift, columns in zip(
                shifts, column_blocks(sketches.shape[1], narrower), strict=True
            ):
                _add_rolled(sums, sketches[:, columns], shift)
            sketches = sums
        return sketches

    # The error

    def typical_error(self, cosine: float = 0.0) -> float:
        """Estimate the standard deviation of the cosine of two sketches, for a true cosine.

        It is an upper limit for that of e, the error of the cosine to first order (see the
        class's notes). For two vectors that are spread over many coordinates the cosine's own is
        nearly the same. For vectors of few coordinates it may be many times larger: of
        (1, 0.9) and (0.9, 1) on any two of 2,000 coordinates it is 0.18 with size 64, not 0.0015.
        """
        check_cosine(cosine)
        return (1 - cosine**2) * math.sqrt(self._collisions)

    def error_bound(self, cosine: float = 0.0, *, failure: float = 0.05) -> float:
        """Bound the error of the cosine of two sketches.

        Parameters
        ----------
        cosine
            The true cosine.
        failure
            The bound holds with at least probability 1 - ``failure``, over the seeds.

        Returns
        -------
        float
            Infinite if the size is too small to promise anything.
        """
        check_cosine(cosine)
        variances = Variances(
            e=self._collisions * (1 - cosine**2) ** 2,
            n=self._collisions * (1 + cosine**2),
            h=self._collisions * (1 - cosine**2),
        )
        return bound_from_variances(cosine, variances, failure)

    @property
    def _collisions(self) -> float:
        """Bound the probability that two coordinates share a bucket."""
        widths = (self.dim, *self.widths)
        return sum(1 / new for old, new in zip(widths, self.widths, strict=False) if new < old)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Count of numbers after each fold; the last is the size of the sketch."""
        num_blocks = math.ceil(self.dim / self.size)
        if num_blocks <= MOST_BLOCKS:
            return (self.size,)
        return (self.size * round(math.sqrt(num_blocks)), self.size)

    @cached_property
    def shifts(self) -> tuple[tuple[int, ...], ...]:
        """For each fold, the bucket at which each block of columns begins."""
        shifts = []
        num_before = self.dim
        for fold, width in enumerate(self.widths):
            # 64 bits modulo a width are even enough for any width.
            raw = self._stream(fold + 1).random_raw(-(-num_before // width))
            shifts.append(tuple((raw % np.uint64(width)).tolist()))
            num_before = width
        return tuple(shifts)

    def _stream(self, number: int) -> np.random.PCG64:
        """Begin a stream of random bits that no other size nor seed shares."""
        return np.random.PCG64((number, self.size, self.seed))


def _add_rolled(sums: Array, part: Array, shift: int) -> None:
    """Add columns to those that begin at a shift, and around the end."""
    before_end = min(part.shape[1], sums.shape[1] - shift)
    sums[:, shift : shift + before_end] += part[:, :before_end]
    if part.shape[1] > before_end:
        sums[:, : part.shape[1] - before_end] += part[:, before_end:]
