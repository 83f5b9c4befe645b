"""Batches of replies check their columns, and evaluate differences row by row."""

import numpy as np
import pytest
import torch

from fedbranch import UpdateBatch
from fedbranch.core.exact_sum.raw_updates import Differences

COLUMNS = {
    "vectors": np.float32([[1, 2], [3, 4]]),
    "num_examples": [1, 2],
    "bases": ["x", "y"],
    "metrics": [{"loss": 1.0}, {}],
    "buffers": np.float32([[5], [6]]),
    "signals": np.float32([[7], [8]]),
    "half_differences": np.float32([[9], [10]]),
}


def test_a_batch_is_as_long_as_its_clients():
    assert len(UpdateBatch(client_ids=["a", "b"], **COLUMNS)) == 2


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_with_another_number_of_rows_is_named(name):
    with pytest.raises(ValueError, match=f"{name} has 1 rows for 2 clients; give one row for each"):
        UpdateBatch(client_ids=["a", "b"], **COLUMNS | {name: COLUMNS[name][:1]})


def test_a_client_with_two_rows_is_named():
    with pytest.raises(ValueError, match=r"\['a'\] are named more than once"):
        UpdateBatch(client_ids=["a", "a"], **COLUMNS)


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("rows", [[0], [1], [1, 0], [0, 1]])
def test_evaluated_rows_of_differences_have_all_their_columns(convert, rows):
    sent = np.float32([1, 1])
    differences = Differences([vector.tobytes() for vector in COLUMNS["vectors"]], [0], [2], sent)
    names = ("buffers", "signals", "half_differences")
    converted = {name: convert(COLUMNS[name]) for name in names}
    batch = UpdateBatch(
        client_ids=["a", "b"],
        **COLUMNS | converted | {"vectors": differences},
        refused={"c": "no reply"},
    )

    some = batch.written(rows)

    assert some.client_ids == [batch.client_ids[row] for row in rows]
    assert np.asarray(some.vectors).tolist() == (COLUMNS["vectors"] - sent)[rows].tolist()
    for name in names:
        assert np.asarray(getattr(some, name)).tolist() == COLUMNS[name][rows].tolist()
        assert type(getattr(some, name)) is type(converted[name])
    assert (some.num_examples, some.bases) == ([1 + r for r in rows], ["xy"[r] for r in rows])
    assert some.metrics == [COLUMNS["metrics"][row] for row in rows]
    assert some.refused == {"c": "no reply"}
