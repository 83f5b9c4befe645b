"""Sums of weighted updates that do not depend on the order, to the last bit.

Floating-point sums depend on the order of their terms; sums of whole numbers do not. So every
update is rounded to multiples of a unit that depends on this update alone and is far below the
precision of float32. These multiples are added without any further rounding. The sum is the same
in any order and in any number of parts.

With Numba (``pip install 'fedbranch[fast]'``) large updates go through machine code, which touches
every number once and is several times as fast. The NumPy code here is its specification: both
compute the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.exact_sum.block_norms import (
    NUMBERS_PER_BLOCK,
    SHORTEST_SAFE,
    Extent,
    extents,
    is_plain,
    lengths_of,
    strongest_of,
)
from fedbranch.core.exact_sum.machine_code import machine_code, worthwhile_machine_code
from fedbranch.core.exact_sum.raw_updates import Differences
from fedbranch.core.exact_sum.unit_sum import CARRY, MOST_UNITS, UnitSum
from fedbranch.core.exact_sum.units import (
    CLASS_WIDTH,
    LARGEST_UNIT,
    LARGEST_UNIT_OF_SKETCHES,
    NO_UNIT,
    UNIT_BITS,
    most_units,
    plain_units_of,
    units_of,
    usual_unit,
)
from fedbranch.core.projection import Projection

__all__ = ["Added", "ExactSum", "can_be_added_whole"]

# Whole weights up to this multiply updates that are rounded already: times 2**40 units each,
# several of them are still exact.
LARGEST_WHOLE_WEIGHT = 1000.0
MOST_UNITS_AT_ONCE = MOST_UNITS / 2
LARGEST_SCALE = 120  # power of two by which float32 numbers can be scaled
ROWS_AT_ONCE = 8
COLUMNS_AT_ONCE = 5120  # eight rows of these stay in the cache in float64
NEARLY = 1 - 1e-9  # room for lengths whose squares are summed in another order
NO_SKETCHES = np.zeros((0, 0), np.float32)


class Added(NamedTuple):
    """The result of :meth:`ExactSum.add_plain`.

    Attributes
    ----------
    is_added
        Shape (n,): true for updates that were added.
    squares
        Shape (n, num_blocks): the squared length of every block; 0 for updates of weight 0.
    sketches
        Shape (n, size). Rows of updates that were not added are arbitrary.
    """

    is_added: NDArray[np.bool_]
    squares: NDArray[np.float64]
    sketches: NDArray[np.float32]

    @property
    def lengths(self) -> NDArray[np.float64]:
        """Shape (n,): the lengths of the updates."""
        return lengths_of(self.squares)


def can_be_added_whole(weights: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which weights multiply updates that are rounded already, as most weights do."""
    is_whole: NDArray[np.bool_] = (weights <= LARGEST_WHOLE_WEIGHT) & (weights == np.rint(weights))
    return is_whole


class ExactSum:
    """A weighted sum of updates, to which updates are added in any order.

    Parameters
    ----------
    dim
        Length of an update.
    projection
        Sketches the updates while they are added.

    Notes
    -----
    An update whose strongest block of 1024 numbers has length s is rounded to multiples of a
    unit, a power of two between 2**-40 and 2**-36 of s. The rounding is less than 2**-32 of its
    largest entry. Updates of similar size share a unit. The sums of each unit are exact whole
    numbers, held in two float64 accumulators. Only :meth:`total` rounds: it adds the sums of the
    few units, the smallest first. Whole weights up to 1000 multiply the rounded updates; with
    other weights, the product of update and weight is rounded.

    So the bits are the same for any order, any batches and any merging of sums. Only one thread
    at a time may add; several threads need a sum each, and merge these in the end.

    Examples
    --------
    >>> updates = np.float32([[0.1, 1.0], [0.2, -1.0], [0.3, 1e-6]])
    >>> forward, backward = ExactSum(2), ExactSum(2)
    >>> _ = forward.add(updates, [1, 1, 1]), backward.add(updates[::-1], [1, 1, 1])
    >>> forward.total().tobytes() == backward.total().tobytes()
    True
    """

    def __init__(self, dim: int, projection: Projection | None = None) -> None:
        if dim < 0 or (projection is not None and projection.dim != dim):
            raise ValueError(f"dim is {dim} and the projection is {projection}; they must agree")
        self.dim = dim
        self.projection = projection
        # The terms are s_i x_i, with the projection's signs, as sketches need these anyway.
        self._signs = None if projection is None else projection.signs
        self._unit_sums: dict[int, UnitSum] = {}  # by the exponent of the unit
        self._tables: dict[int, NDArray[np.float32]] = {}
        self._memory: (
            tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.float64]] | None
        ) = None
        self._usual_unit: int | None = None  # of the updates of the last add_plain

    def add(
        self,
        updates: NDArray[np.float32],
        weights: NDArray[np.float64] | list[float],
        extent: Extent | None = None,
    ) -> NDArray[np.float32] | None:
        """Add updates, shape (n, dim), finite, each times its weight, shape (n,), positive.

        Returns
        -------
        NDArray or None
            The updates' sketches, shape (n, size), to the bit those of
            :meth:`fedbranch.core.projection.Projection.of`; None without a projection.
        """
        if updates.dtype != np.float32 or updates.ndim != 2 or updates.shape[1] != self.dim:
            raise ValueError(
                f"updates have shape {updates.shape} and dtype {updates.dtype}; add float32 of "
                f"shape (n, {self.dim})"
            )
        factors = np.asarray(weights, dtype=np.float64)
        if factors.shape != (len(updates),):
            raise ValueError(f"there are {len(factors)} weights for {len(updates)} updates")
        extent = extents(updates) if extent is None else extent
        sketches = None
        if self.projection is not None:
            sketches = np.zeros((len(updates), self.projection.size), dtype=np.float32)
        strongest = extent.strongest
        is_good = np.isfinite(strongest) & (factors >= 0) & (factors < np.inf)
        if not is_good.all():
            row = int(np.argmin(is_good))
            raise ValueError(
                f"update {row} has weight {factors[row]} and a block of length {strongest[row]}; "
                "only finite ones can be added"
            )
        units = units_of(strongest)
        is_whole = can_be_added_whole(factors) & (np.abs(units) <= LARGEST_SCALE)
        for row in np.flatnonzero(~is_whole).tolist():
            self._add_weighted(updates[row], float(factors[row]), float(strongest[row]))
            if self.projection is not None and sketches is not None:
                sketches[row] = self.projection.of(updates[row : row + 1])[0]
        for unit in sorted(set(units[is_whole].tolist())):
            rows = np.flatnonzero(is_whole & (units == unit))
            most = most_units(factors[rows], strongest[rows], unit)
            for part in _chunks_within(most, MOST_UNITS_AT_ONCE):
                at_once = rows[part]
                self._of_unit(unit).reserve(float(most[part].sum()))
                self._add_whole(updates, at_once, factors[at_once], unit, sketches)
                if unit > LARGEST_UNIT_OF_SKETCHES and sketches is not None:
                    assert self.projection is not None
                    sketches[at_once] = self.projection.of(updates[at_once])
        return sketches

    def add_plain(
        self, updates: Differences, weights: NDArray[np.float64], longest: float = math.inf
    ) -> Added:
        """Add updates straight from the replies, except updates of unusual size.

        Parameters
        ----------
        updates
            Updates that are not finite are not added.
        weights
            Shape (n,): whole and at most 1000. Updates of weight 0 are neither measured nor added.
        longest
            Longer updates are not added.

        Returns
        -------
        Added
            Updates that were not added have to be written down and examined. Those that were
            added change the sum as :meth:`add` does, to the last bit.
        """
        if updates.shape[1] != self.dim or weights.shape != (len(updates),):
            raise ValueError(
                f"updates have shape {updates.shape} and weights {weights.shape}; add updates of "
                f"{self.dim} numbers with a weight each"
            )
        assert self.projection is not None
        assert can_be_added_whole(weights).all()
        num_updates = len(updates)
        found = Added(
            np.zeros(num_updates, bool),
            np.zeros((num_updates, -(-self.dim // NUMBERS_PER_BLOCK))),
            np.zeros((num_updates, self.projection.size), np.float32),
        )
        rows = np.flatnonzero(weights > 0)
        limit = longest * NEARLY
        if not len(rows):
            return found
        if self._usual_unit is None:
            self._usual_unit = usual_unit(plain_units_of(strongest_of(updates.squares[rows])))
        expected = -UNIT_BITS if self._usual_unit == NO_UNIT else self._usual_unit
        self._add_plain_of(updates, rows, weights, expected, limit, found)
        units = plain_units_of(strongest_of(found.squares[rows]))
        for unit in sorted(set(units.tolist()) - {expected, NO_UNIT}):
            self._add_plain_of(updates, rows[units == unit], weights, unit, limit, found)
        self._usual_unit = usual_unit(units)
        return found

    def _add_plain_of(
        self,
        updates: Differences,
        rows: NDArray[np.intp],
        weights: NDArray[np.float64],
        unit: int,
        longest: float,
        found: Added,
    ) -> None:
        """Add the updates of this unit."""
        compiled = machine_code()
        assert compiled is not None
        most = math.ldexp(1.0, unit + UNIT_BITS)  # of a strongest block
        at_most = most_units(weights[rows], most, unit)
        of_unit = self._of_unit(unit)
        for part in _chunks_within(at_most, MOST_UNITS_AT_ONCE):
            of_unit.reserve(float(at_most[part].sum()))
            compiled.add_plain(
                updates.addresses,
                updates.lengths,
                updates.before,
                rows[part],
                weights,
                max(SHORTEST_SAFE, math.ldexp(most, -CLASS_WIDTH)),
                most,
                longest,
                self._table(unit),
                of_unit.low,
                *self._folding,
                np.float32(2.0**unit),
                found.sketches,
                found.squares,
                found.is_added,
            )
            added = rows[part][found.is_added[rows[part]]]
            strongest = strongest_of(found.squares[added])
            needed = float(most_units(weights[added], strongest, unit).sum())
            of_unit.release(float(at_most[part].sum()) - needed)

    def _add_weighted(self, update: NDArray[np.float32], weight: float, strongest: float) -> None:
        """Add one update, multiplied by its weight and then rounded."""
        unit = int(units_of(np.array(strongest * weight)))
        of_unit = self._of_unit(unit)
        of_unit.reserve(float(most_units(np.array(weight), strongest, unit)))
        for columns in _chunks(self.dim, COLUMNS_AT_ONCE):
            wide = update[columns].astype(np.float64)
            wide *= weight
            if self._signs is not None:
                wide *= self._signs[columns]
            np.ldexp(wide, -unit, out=wide)
            np.rint(wide, out=wide)
            of_unit.low[columns] += wide

    def _add_whole(
        self,
        updates: NDArray[np.float32],
        rows: NDArray[np.intp],
        weights: NDArray[np.float64],
        unit: int,
        sketches: NDArray[np.float32] | None,
    ) -> None:
        """Add some updates of one unit, with whole weights, and sketch them."""
        low, table = self._of_unit(unit).low, self._table(unit)
        compiled = worthwhile_machine_code(len(rows) * self.dim) if is_plain(updates) else None
        if compiled is not None:
            compiled.add_rows(
                updates,
                rows.astype(np.int64, copy=False),
                weights,
                table,
                low,
                *self._folding,
                # A power of two, of which nothing is rounded.
                np.float32(0.0 if sketches is None else 2.0**unit),
                NO_SKETCHES if sketches is None else sketches,
            )
            return
        for few in _chunks(len(rows), ROWS_AT_ONCE):
            self._add_few(updates, rows[few], weights[few], unit, sketches)

    def _add_few(
        self,
        updates: NDArray[np.float32],
        rows: NDArray[np.intp],
        weights: NDArray[np.float64],
        unit: int,
        sketches: NDArray[np.float32] | None,
    ) -> None:
        """Add at most ``ROWS_AT_ONCE`` rows of one unit, in NumPy."""
        of_unit, table = self._of_unit(unit), self._table(unit)
        first, end = int(rows[0]), int(rows[-1]) + 1
        together = updates[first:end] if end - first == len(rows) else None
        projection = self.projection
        width = COLUMNS_AT_ONCE
        if projection is not None:
            folded = projection.begin(len(rows))
            width = projection.block_width
        scaled, wide, sums = self._buffers(width)
        for columns in _chunks(self.dim, width):
            num_columns = columns.stop - columns.start
            part = scaled[: len(rows), :num_columns]
            if together is not None:
                np.multiply(together[:, columns], table[columns], out=part)
            else:
                for place, row in enumerate(rows.tolist()):
                    np.multiply(updates[row, columns], table[columns], out=part[place])
            if projection is not None:
                projection.fold(folded, part, columns.start // width)
            np.rint(part, out=part)
            for few in _chunks(num_columns, COLUMNS_AT_ONCE):
                num_few = few.stop - few.start
                exact, added = wide[: len(rows), :num_few], sums[:num_few]
                np.copyto(exact, part[:, few])
                np.dot(weights, exact, out=added)
                low = of_unit.low[columns.start + few.start : columns.start + few.stop]
                np.add(low, added, out=low)
        if projection is not None:
            assert sketches is not None
            # A power of two, of which nothing is rounded.
            sketches[rows] = projection.end(folded) * np.float32(2.0**unit)

    @cached_property
    def _folding(
        self,
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
        """Memory for updates that are folded, and the shifts of the first and the next fold."""
        # Without a projection, all is folded into a few columns, which are ignored.
        width = COLUMNS_AT_ONCE
        shifts: tuple[tuple[int, ...], ...] = ((0,) * -(-self.dim // COLUMNS_AT_ONCE),)
        if self.projection is not None:
            width, shifts = self.projection.block_width, self.projection.shifts
        first, following = (np.array(of_fold, np.int64) for of_fold in (*shifts, ())[:2])
        return np.empty((ROWS_AT_ONCE, width), np.float32), first, following

    def _of_unit(self, unit: int) -> UnitSum:
        if unit not in self._unit_sums:
            self._unit_sums[unit] = UnitSum(self.dim)
        return self._unit_sums[unit]

    def _table(self, unit: int) -> NDArray[np.float32]:
        """Return the factors that turn an update into signed units."""
        if unit not in self._tables:
            signs = np.ones(self.dim, np.float32) if self._signs is None else self._signs
            self._tables[unit] = np.ldexp(signs, -unit)
        return self._tables[unit]

    def _buffers(
        self, width: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.float64]]:
        """Return memory for some columns of some updates: in float32, in float64, and their sums."""
        if self._memory is None or self._memory[0].shape[1] != width:
            self._memory = (
                np.empty((ROWS_AT_ONCE, width), np.float32),
                np.empty((ROWS_AT_ONCE, COLUMNS_AT_ONCE)),
                np.empty(COLUMNS_AT_ONCE),
            )
        return self._memory

    def merge(self, other: ExactSum) -> None:
        """Add another sum of the same length and projection."""
        if (other.dim, other.projection) != (self.dim, self.projection):
            raise ValueError(
                f"a sum of {other.dim} numbers with {other.projection} cannot be merged into one "
                f"of {self.dim} with {self.projection}"
            )
        for unit, theirs in other._unit_sums.items():
            self._of_unit(unit).merge(theirs)

    def total(self) -> NDArray[np.float64]:
        """Compute the sum, shape (dim,); this is where it is rounded."""
        total = np.zeros(self.dim)
        for _, unit, low, high in self._canonical():
            sums = high * CARRY + low
            # ldexp computes the same and takes long, but not every unit is a float.
            total += sums * 2.0**unit if abs(unit) < 1000 else np.ldexp(sums, unit)
        return total

    def _canonical(
        self,
    ) -> Iterator[tuple[str, int, NDArray[np.float64], NDArray[np.float64]]]:
        """List the sums of units in a form that does not depend on the order of additions."""
        for unit, of_unit in sorted(self._unit_sums.items()):
            low, high = of_unit.carried()
            if not (low.any() or high.any()):
                continue  # an empty sum may come from another update of the same batch
            if self._signs is not None:
                # CARRY / 2 can be written in two ways; one of them is chosen.
                low, high = low * self._signs, high * self._signs
                moved = low == CARRY / 2
                low, high = np.where(moved, -low, low), high + moved
            yield f"unit{unit:+05d}", unit, low + 0.0, high + 0.0

    # Files

    def to_tensors(self, prefix: str = "") -> dict[str, NDArray[np.float64]]:
        """Describe the sum as arrays by name, for a checkpoint; the projection is not in it."""
        return {
            f"{prefix}{name}": np.stack([low, high]) for name, _, low, high in self._canonical()
        }

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, NDArray[np.float64]],
        dim: int,
        projection: Projection | None = None,
        prefix: str = "",
    ) -> ExactSum:
        """Rebuild a sum from what :meth:`to_tensors` returned.

        Raises
        ------
        ValueError
            If the arrays cannot be those of a sum.
        """
        rebuilt = cls(dim, projection)
        for name, parts in tensors.items():
            if not name.startswith(f"{prefix}unit"):
                continue
            unit = int(name.removeprefix(f"{prefix}unit"))
            if parts.shape != (2, dim) or parts.dtype != np.float64 or abs(unit) > LARGEST_UNIT:
                raise ValueError(f"the sum {name} has shape {parts.shape} and dtype {parts.dtype}")
            if (parts != np.rint(parts)).any() or (np.abs(parts[0]) > CARRY / 2).any():
                raise ValueError(f"the sum {name} does not hold whole units")
            signs = 1.0 if rebuilt._signs is None else rebuilt._signs
            rebuilt._unit_sums[unit] = UnitSum.of(parts[0] * signs, parts[1] * signs)
        return rebuilt


def _chunks_within(amounts: NDArray[np.float64], most: float) -> Iterator[slice]:
    """Cut a sequence into parts whose sums are at most ``most``, or that have one member."""
    start, total = 0, 0.0
    for place, amount in enumerate(amounts.tolist()):
        if place > start and total + amount > most:
            yield slice(start, place)
            start, total = place, 0.0
        total += amount
    if len(amounts):
        yield slice(start, len(amounts))


def _chunks(dim: int, width: int) -> Iterator[slice]:
    for start in range(0, dim, width):
        yield slice(start, min(start + width, dim))
