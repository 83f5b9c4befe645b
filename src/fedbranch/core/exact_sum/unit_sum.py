"""The sum of updates that share a unit, in two accumulators of whole numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.exact_sum.machine_code import worthwhile_machine_code

__all__ = ["CARRY", "MOST_UNITS", "UnitSum"]

MOST_UNITS = 2.0**53  # larger whole numbers are not all floats
CARRY = 2.0**30  # units of the low accumulator that are one of the high one


class UnitSum:
    """A sum in whole units: ``low + CARRY * high``.

    Attributes
    ----------
    low, high
        Shape (dim,); ``high`` is None before the first carry.
    most
        Bound of the absolute entries of ``low``.
    """

    def __init__(self, dim: int) -> None:
        self.low = np.zeros(dim)
        self.high: NDArray[np.float64] | None = None
        self.most = 0.0

    @classmethod
    def of(cls, low: NDArray[np.float64], high: NDArray[np.float64]) -> UnitSum:
        """Make a sum of its accumulators, as :meth:`carried` returns them."""
        made = cls(len(low))
        made.low, made.high, made.most = low, high, CARRY / 2
        return made

    def reserve(self, units: float) -> None:
        """Make sure that ``low`` stays exact when up to ``units`` are added to any entry."""
        assert units <= MOST_UNITS - CARRY
        if self.most + units > MOST_UNITS:
            self.carry()
        self.most += units

    def release(self, units: float) -> None:
        """Free units that were reserved and not added."""
        self.most -= units

    def carry(self) -> None:
        """Move multiples of ``CARRY`` from low to high; low is then in [-CARRY / 2, CARRY / 2)."""
        self.most = CARRY / 2
        if self.high is None:
            self.high = np.zeros_like(self.low)
        compiled = worthwhile_machine_code(self.low.size)
        if compiled is not None:
            compiled.carry(self.low, self.high, CARRY)
            return
        moved = np.floor(self.low / CARRY + 0.5)
        self.high += moved
        moved *= CARRY
        self.low -= moved

    def carried(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Carry, and return low and high: the same whatever the order of additions."""
        self.carry()
        assert self.high is not None
        return self.low, self.high

    def merge(self, other: UnitSum) -> None:
        """Add another sum of the same unit."""
        if other.most > MOST_UNITS / 2:
            other.carry()
        self.reserve(other.most)
        self.low += other.low
        if other.high is not None:
            self.high = other.high.copy() if self.high is None else self.high + other.high
