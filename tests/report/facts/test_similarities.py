"""The order of clients in a similarity matrix."""

import itertools

import numpy as np
import pytest

from fedbranch.core.geometry import cosine_similarity
from fedbranch.core.linkage import hierarchy
from fedbranch.report.facts.similarities import dendrogram_order


@pytest.mark.parametrize("seed", range(10))
def test_in_the_order_of_the_dendrogram_every_group_is_together(seed):
    similarity = cosine_similarity(np.random.default_rng(seed).normal(size=(9, 4)))

    order = dendrogram_order(similarity)

    assert sorted(order) == list(range(9))
    for num_groups in range(1, 10):
        groups = hierarchy(similarity).groups(num_groups)[order]
        assert len(list(itertools.groupby(groups))) == num_groups
