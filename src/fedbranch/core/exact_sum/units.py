"""The units that updates are rounded to before they are added up exactly.

A unit is a power of two, named by its exponent. It depends on the update alone: on the length of
its strongest block. Updates of similar size share a unit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.exact_sum.block_norms import LONGEST_SAFE, SHORTEST_SAFE

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

# Updates are put into classes by the exponent of their strongest block; a class has this many
# exponents.
CLASS_WIDTH = 4
# A unit is this many powers of two below the top of its class. The strongest block is less than 4
# powers below the top, and the largest entry is at least 1/32 of its block's length. So half a unit
# is less than 2^-32 of the largest entry.
UNIT_BITS = 40
# In larger units than this, the smallest entries of float32 would lose digits. Sketches are then
# made of the updates themselves.
LARGEST_UNIT_OF_SKETCHES = -23
# Bounds the exponents of units, for entries times weights from the smallest float64 to the largest.
LARGEST_UNIT = 1200
NO_UNIT = LARGEST_UNIT + 1  # of updates that cannot be added plain


def units_of(strongest: NDArray[np.float64]) -> NDArray[np.int32]:
    """Compute the exponents of the units of updates, from the lengths of their strongest blocks."""
    exponents: NDArray[np.int32] = np.frexp(strongest)[1]
    # strongest < 2**top, where top is a multiple of the width
    return -(-exponents // CLASS_WIDTH) * CLASS_WIDTH - UNIT_BITS


def usual_unit(units: NDArray[np.int32]) -> int:
    """Return the most frequent unit."""
    several, counts = np.unique(units, return_counts=True)
    return int(several[counts.argmax()])


def plain_units_of(strongest: NDArray[np.float64]) -> NDArray[np.int32]:
    """Compute the units of updates that may be added plain; ``NO_UNIT`` for the others."""
    units = np.where(
        (strongest > SHORTEST_SAFE) & (strongest < LONGEST_SAFE), units_of(strongest), NO_UNIT
    )
    units[units > LARGEST_UNIT_OF_SKETCHES] = NO_UNIT
    return units


def most_units(
    weights: NDArray[np.float64], strongest: NDArray[np.float64] | float, unit: int
) -> NDArray[np.float64]:
    """Bound the number of units of any entry times its weight.

    No entry is larger than its block's length, up to the rounding of float32.
    """
    most: NDArray[np.float64] = np.ldexp(1.001 * weights * strongest, -unit)
    return most
