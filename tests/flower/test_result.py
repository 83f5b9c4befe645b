"""The result of a federation."""

import numpy as np
import pytest

from flower.federations import (
    make_grid,
    start,
)


def test_the_error_for_an_unknown_client_names_the_known_ones():
    result = start(make_grid(), num_rounds=1)

    with pytest.raises(
        ValueError, match=r"no client 'hospital'; the clients are \['partition-0000"
    ):
        result.arrays_of("hospital")


def test_the_root_keeps_the_model_of_plain_federated_learning():
    result = start(make_grid())

    root = result.tree.root
    assert not root.is_leaf
    np.testing.assert_array_equal(
        result.arrays["0.weight"].numpy(), result.arrays_at(root.id)["0.weight"].numpy()
    )
    of_client = result.arrays_of("partition-0001")["0.weight"].numpy()
    assert not np.array_equal(result.arrays["0.weight"].numpy(), of_client)
