"""The units that updates are rounded to before they are added up exactly.

A unit is a power of two, named by its exponent, and follows from the update alone: from the length
of its strongest block. Updates of similar size share one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.exact_sum.block_norms import STRONGEST, WEAKEST

__all__ = [
    "CLASS_WIDTH",
    "LARGEST_UNIT",
    "LARGEST_UNIT_OF_SKETCHES",
    "NO_UNIT",
    "UNIT_BITS",
    "most_units",
    "plain_units_of",
    "units_of",
    "usual_unit",
]

# Updates are put into classes by the exponent of their strongest block, so many exponents wide.
CLASS_WIDTH = 4
# Units are so many powers of two below what a class can hold. The largest entry is at least
# 1/32 of its block's length, which is less than 4 powers below that; half a unit is then less
# than 2^-32 of the largest entry.
UNIT_BITS = 40
# In larger units than this the smallest entries that float32 has would lose digits: sketches
# are then made of the updates themselves.
LARGEST_UNIT_OF_SKETCHES = -23
# The smallest float64 may be the strongest entry times its weight, and gives the smallest unit;
# no float64 has a larger one.
LARGEST_UNIT = 1200
NO_UNIT = LARGEST_UNIT + 1


def units_of(strongest: NDArray[np.float64]) -> NDArray[np.int32]:
    """Give the exponents of the units for updates with strongest blocks of these lengths."""
    exponents: NDArray[np.int32] = np.frexp(strongest)[1]
    # strongest < 2**top, where top is a multiple of the width
    return -(-exponents // CLASS_WIDTH) * CLASS_WIDTH - UNIT_BITS


def usual_unit(units: NDArray[np.int32]) -> int:
    """Give the unit that most have."""
    several, counts = np.unique(units, return_counts=True)
    return int(several[counts.argmax()])


def plain_units_of(strongest: NDArray[np.float64]) -> NDArray[np.int32]:
    """Give the units of updates that may be added as they lie; NO_UNIT for the others."""
    units = np.where((strongest > WEAKEST) & (strongest < STRONGEST), units_of(strongest), NO_UNIT)
    units[units > LARGEST_UNIT_OF_SKETCHES] = NO_UNIT
    return units


def most_units(
    weights: NDArray[np.float64], strongest: NDArray[np.float64] | float, unit: int
) -> NDArray[np.float64]:
    """Say how many units an entry times its weight has at most.

    No entry is larger than its block is long, as far as float32 can tell.
    """
    most: NDArray[np.float64] = np.ldexp(1.001 * weights * strongest, -unit)
    return most
