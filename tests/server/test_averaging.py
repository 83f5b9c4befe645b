"""An aggregate of the user's own is checked, and cannot change what it is given."""

import numpy as np
import pytest

from fakes import fingerprint
from fedbranch import NeverSplit, Server, Update


def test_the_aggregate_is_a_function_of_updates_and_weights():
    def median(updates, weights):
        assert weights.shape == (3,)
        return np.median(updates, axis=0).astype(np.float32)

    server = Server(1, rule=NeverSplit(), aggregate=median)
    server.plan(["a", "b", "c"])

    server.step({i: Update(np.float32([v]), 1) for i, v in zip("abc", [1, 2, 100], strict=True)})

    assert server.tree.root.params.tolist() == [2]


def average_in_float64(updates, weights):
    return np.average(updates.astype(np.float64), axis=0, weights=weights)


def test_an_aggregate_may_work_in_float64():
    server = Server(1, rule=NeverSplit(), aggregate=average_in_float64)
    server.plan(["a"])
    server.step({"a": Update(np.float32([1]), 1)})

    assert server.tree.root.params.dtype == np.float32


@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        (lambda updates, weights: updates[:1], r"shape \(1, 2\)"),
        (lambda updates, weights: np.float32([1]), r"shape \(1,\)"),
        (lambda updates, weights: 3.0, r"shape \(\)"),
        (lambda updates, weights: [1, 2], "dtype int64"),
        (lambda updates, weights: updates[0] * np.nan, "NaN or infinity"),
        (lambda updates, weights: updates.sort(axis=0), "read-only"),
    ],
)
def test_an_aggregate_that_returns_the_impossible_is_named_and_changes_nothing(aggregate, message):
    server = Server(2, rule=NeverSplit(), aggregate=aggregate)
    server.plan(["a", "b"])
    before = fingerprint(server)

    with pytest.raises(ValueError, match=message):
        server.step({i: Update(np.float32([1, 2]), 1) for i in "ab"})

    assert fingerprint(server) == before
