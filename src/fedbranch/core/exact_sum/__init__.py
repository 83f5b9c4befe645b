"""Sums that do not depend on the order of their terms, and the lengths of the terms."""

from fedbranch.core.exact_sum.block_norms import (
    LONGEST_SAFE,
    NUMBERS_PER_BLOCK,
    SHORTEST_SAFE,
    Extent,
    extents,
    is_plain,
    lengths_of,
    strongest_of,
)
from fedbranch.core.exact_sum.raw_updates import Differences
from fedbranch.core.exact_sum.total import (
    Added,
    ExactSum,
    can_be_added_whole,
)
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

__all__ = [
    "CLASS_WIDTH",
    "LARGEST_UNIT",
    "LARGEST_UNIT_OF_SKETCHES",
    "LONGEST_SAFE",
    "NO_UNIT",
    "NUMBERS_PER_BLOCK",
    "SHORTEST_SAFE",
    "UNIT_BITS",
    "Added",
    "Differences",
    "ExactSum",
    "Extent",
    "can_be_added_whole",
    "extents",
    "is_plain",
    "lengths_of",
    "most_units",
    "plain_units_of",
    "strongest_of",
    "units_of",
    "usual_unit",
]
