"""The mathematics: pure functions on arrays of any Array API library.

All public names of the modules of this room can be imported from here. Of
:mod:`fedbranch.core.exact_sum` these are the main ones.
"""

from fedbranch.core.blocked_linkage import hierarchy_of
from fedbranch.core.exact_cut import (
    PairCosines,
    Parts,
    are_edges_right,
    cosines_of_pairs,
    likely_error,
    parts_of,
    refined,
)
from fedbranch.core.exact_sum import (
    Added,
    Differences,
    ExactSum,
    Extent,
    extents,
)
from fedbranch.core.geometry import (
    Scaled,
    checked_namespace,
    cosine_error_bound,
    cosine_similarity,
    cosines_of_scaled,
    norms,
    scaled_for_cosines,
    take_rows,
    to_numpy,
    unit_rows,
    weighted_mean,
)
from fedbranch.core.groups import (
    Halves,
    Structure,
    compared_halves,
    find_structure,
)
from fedbranch.core.linkage import (
    Bipartition,
    Hierarchy,
    bipartition,
    hierarchy,
    separation_gap,
    spanning_tree_of,
    strict_order,
)
from fedbranch.core.parallel import num_cores
from fedbranch.core.products import (
    BLOCK_COLUMNS,
    TILE_ON_HOST,
    column_blocks,
    for_each_strip,
    inner_products,
    is_on_host,
    mirror_scaled,
    upper_products,
)
from fedbranch.core.projection import (
    SMALLEST_SIZE,
    Projection,
    Variances,
    bound_from_variances,
    check_cosine,
)
from fedbranch.core.robust import (
    RobustAggregate,
    aggregate_from_state,
    aggregate_to_state,
    median,
    multi_krum,
    trimmed_mean,
)
from fedbranch.core.row_sampling import some_rows
from fedbranch.core.theory import (
    cross_similarity_bound,
    guaranteed_noise,
    intra_similarity_bound,
    is_split_guaranteed,
    tolerated_noise,
    true_cross_similarity_bound,
    typical_intra_similarity,
)

__all__ = [
    "BLOCK_COLUMNS",
    "SMALLEST_SIZE",
    "TILE_ON_HOST",
    "Added",
    "Bipartition",
    "Differences",
    "ExactSum",
    "Extent",
    "Halves",
    "Hierarchy",
    "PairCosines",
    "Parts",
    "Projection",
    "RobustAggregate",
    "Scaled",
    "Structure",
    "Variances",
    "aggregate_from_state",
    "aggregate_to_state",
    "are_edges_right",
    "bipartition",
    "bound_from_variances",
    "check_cosine",
    "checked_namespace",
    "column_blocks",
    "compared_halves",
    "cosine_error_bound",
    "cosine_similarity",
    "cosines_of_pairs",
    "cosines_of_scaled",
    "cross_similarity_bound",
    "extents",
    "find_structure",
    "for_each_strip",
    "guaranteed_noise",
    "hierarchy",
    "hierarchy_of",
    "inner_products",
    "intra_similarity_bound",
    "is_on_host",
    "is_split_guaranteed",
    "likely_error",
    "median",
    "mirror_scaled",
    "multi_krum",
    "norms",
    "num_cores",
    "parts_of",
    "refined",
    "scaled_for_cosines",
    "separation_gap",
    "some_rows",
    "spanning_tree_of",
    "strict_order",
    "take_rows",
    "to_numpy",
    "tolerated_noise",
    "trimmed_mean",
    "true_cross_similarity_bound",
    "typical_intra_similarity",
    "unit_rows",
    "upper_products",
    "weighted_mean",
]
