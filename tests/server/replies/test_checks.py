"""Replies, batches and losses are checked before they are used."""

from dataclasses import replace

import numpy as np
import pytest

from fakes import DIM
from fedbranch import Update, UpdateBatch
from fedbranch.errors import InvalidUpdate
from fedbranch.server.replies.checks import Expected, check_batch, check_losses, check_update
from server.replies.bad_values import Liar


def test_a_batch_that_does_not_fit_the_model_raises():
    expected = Expected(num_params=DIM, num_buffers=0, compares_signal=False, max_examples=10)

    def batch(**columns):
        return UpdateBatch(**{
            "client_ids": ["a", "b"], "vectors": np.ones((2, DIM), np.float32),
            "num_examples": [1, 1], "bases": ["", ""], "metrics": [{}, {}], **columns,
        })  # fmt: skip

    with pytest.raises(ValueError, match="metrics has 1 rows for 2 clients"):
        batch(metrics=[{}])
    with pytest.raises(ValueError, match="named more than once"):
        batch(client_ids=["a", "a"])
    with pytest.raises(ValueError, match=r"shape \(2, 3\).*send \(2, 20\) in float32"):
        check_batch(batch(vectors=np.ones((2, 3), np.float32)), expected)
    with pytest.raises(ValueError, match="float64"):
        check_batch(batch(vectors=np.ones((2, DIM))), expected)
    with pytest.raises(ValueError, match="no signals"):
        check_batch(batch(), replace(expected, compares_signal=True))


def compared(reply):
    return reply.rows.compared[reply.row].tolist()


def test_a_signal_may_have_a_length_of_its_own():
    expected = Expected(
        num_params=4, num_buffers=0, compares_signal=True, max_examples=10, num_signal=2
    )
    vector, short = np.ones(4, np.float32), np.float32([3, 4])
    good = Update(vector, 1, signal=short, half_difference=short)

    reply = check_update(good, expected)

    assert reply.has_half
    assert reply.rows.compared.tolist() == [[3, 4]]
    with pytest.raises(InvalidUpdate, match=r"the signal has shape \(4,\); send shape \(2,\)"):
        check_update(replace(good, signal=vector), expected)
    with pytest.raises(InvalidUpdate, match=r"the half difference has shape \(4,\); send shape"):
        check_update(replace(good, half_difference=vector), expected)
    with pytest.raises(InvalidUpdate, match=r"the update has shape \(2,\); send shape \(4,\)"):
        check_update(replace(good, vector=short), expected)


def test_a_batch_of_short_signals_is_checked_as_its_replies_one_by_one():
    expected = Expected(
        num_params=4, num_buffers=0, compares_signal=True, max_examples=10, num_signal=2
    )
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(3, 4)).astype(np.float32)
    short = rng.normal(size=(3, 2)).astype(np.float32)
    short[1] = 0
    batch = UpdateBatch(
        client_ids=["a", "b", "c"], vectors=vectors, num_examples=[1, 1, 1], bases=["x"] * 3,
        metrics=[{}] * 3, signals=short, half_differences=short,
    )  # fmt: skip

    usable, refused = check_batch(batch, expected)

    assert list(usable) == ["a", "c"]
    assert refused == {"b": "the signal is zero: the client did not train"}
    for row, client_id in ((0, "a"), (2, "c")):
        alone = check_update(
            Update(vectors[row], 1, signal=short[row], half_difference=short[row]), expected
        )
        together = usable[client_id][1]
        assert compared(together) == compared(alone)
        assert together.has_half == alone.has_half
    with pytest.raises(ValueError, match=r"signal column has shape \(3, 4\).*send \(3, 2\)"):
        check_batch(replace(batch, signals=vectors), expected)


@pytest.mark.parametrize(
    "losses", ["12", [1.0], [1.0, "2"], [1.0, None], [True, 1.0], np.zeros((2, 2)), np.zeros(10**6),
               np.float32(1), {0: 1.0, 1: 2.0}, None, iter([1.0, 2.0]), [1.0, Liar()]]
)  # fmt: skip
def test_losses_that_are_no_numbers_are_refused(losses):
    with pytest.raises(InvalidUpdate, match=r"the losses are .*; send 2 numbers") as caught:
        check_losses(losses, 2)

    assert len(str(caught.value)) < 200
