"""Columns of replies are stacked, without copies where they are neighbours."""

import numpy as np
import torch

from fedbranch import UpdateBatch
from fedbranch.server.replies.checks import Expected, check_batch
from fedbranch.server.replies.reply import stacked


def test_replies_of_several_rounds_go_to_where_the_last_one_is():
    expected = Expected(num_params=2, num_buffers=0, compares_signal=False, max_examples=10)

    def replies(matrix):
        ids = [str(i) for i in range(len(matrix))]
        batch = UpdateBatch(
            client_ids=ids, vectors=matrix, num_examples=[1] * len(ids), bases=ids,
            metrics=[{}] * len(ids),
        )  # fmt: skip
        usable, _ = check_batch(batch, expected)
        return [reply for _, reply in usable.values()]

    first = replies(np.float32([[1, 2], [3, 4]]))
    second = replies(torch.tensor([[5.0, 6.0]]))

    assert isinstance(stacked([*first, *second], "update"), torch.Tensor)
    together = stacked([*second, *first], "update")
    assert isinstance(together, np.ndarray)
    assert together.tolist() == [[5, 6], [1, 2], [3, 4]]
    assert stacked(first, "update") is first[0].rows.update  # not a copy
    assert stacked(first[::-1], "update").tolist() == [[3, 4], [1, 2]]


def test_neighbouring_rows_are_not_copied():
    expected = Expected(num_params=1, num_buffers=0, compares_signal=False, max_examples=10)
    matrix = np.float32([[1], [2], [3], [4]])
    batch = UpdateBatch(
        client_ids=list("abcd"),
        vectors=matrix,
        num_examples=[1] * 4,
        bases=[""] * 4,
        metrics=[{}] * 4,
    )
    replies = [reply for _, reply in check_batch(batch, expected)[0].values()]

    assert np.shares_memory(stacked(replies[1:3], "update"), matrix)
    assert stacked(replies[1:3], "update").tolist() == [[2], [3]]
    assert stacked([replies[0], replies[2]], "update").tolist() == [[1], [3]]
    assert stacked([replies[2], replies[1]], "update").tolist() == [[3], [2]]
