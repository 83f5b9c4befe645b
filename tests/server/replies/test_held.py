"""Replies that a leaf holds survive a checkpoint, each column once."""

import numpy as np
import pytest

from fedbranch import Update
from fedbranch.server.replies.checks import Expected, check_update
from fedbranch.server.replies.held import HeldReplies

GOOD = np.float32([1, 2, 3, 4])


def saved_and_read(replies):
    held = HeldReplies(replies).at_the_end_of(3)
    state, files = held.to_state("held-0")
    return HeldReplies.from_state(state, files, "held-0"), dict(files["held-0-3"])


def compared(reply):
    return reply.rows.compared[reply.row].tolist()


def test_replies_with_short_signals_survive_being_saved():
    expected = Expected(
        num_params=4, num_buffers=0, compares_signal=True, max_examples=10, num_signal=2
    )
    short = np.float32([3, 4])
    replies = {
        "a": check_update(Update(GOOD, 1, signal=short, half_difference=2 * short), expected),
        "b": check_update(Update(GOOD, 1, signal=-short), expected),
    }

    rebuilt, _ = saved_and_read(replies)

    for client_id, reply in replies.items():
        again = rebuilt[client_id]
        assert compared(again) == compared(reply)
        assert again.has_half == reply.has_half
        assert again.rows.update[again.row].tolist() == GOOD.tolist()
    assert rebuilt["a"].rows.half[rebuilt["a"].row].tolist() == [6, 8]


@pytest.mark.parametrize("compares_signal", [False, True])
def test_no_column_is_saved_twice(compares_signal):
    expected = Expected(
        num_params=4, num_buffers=0, compares_signal=compares_signal, max_examples=10
    )
    update = Update(GOOD, 1, signal=GOOD.copy(), half_difference=2 * GOOD)
    replies = {"a": check_update(update, expected), "b": check_update(update, expected)}

    rebuilt, tensors = saved_and_read(replies)

    # A signal that happens to be the update is still a signal, and no step goes along it.
    assert ("compared" in tensors) == compares_signal
    for reply in rebuilt.values():
        assert (reply.rows.signal is None) == (not compares_signal)
        assert compared(reply) == GOOD.tolist()
        assert reply.rows.half[reply.row].tolist() == (2 * GOOD).tolist()


def test_missing_sketches_are_noticed():
    state = {"3": {"a": {"weight": 1.0, "metrics": {}, "has_halves": False}}}
    tensors = {name: np.zeros((1, 3), dtype=np.float32) for name in ("vector", "buffers")}

    with pytest.raises(KeyError, match="compared"):
        HeldReplies.from_state(
            state, {"held-0-3": {**tensors, "lengths": np.ones((1, 3))}}, "held-0"
        )


def test_adding_and_dropping_replies_makes_new_ones():
    expected = Expected(num_params=4, num_buffers=0, compares_signal=False, max_examples=10)
    reply = check_update(Update(GOOD, 1), expected)
    held = HeldReplies({"a": reply})

    assert list(held.plus({"b": reply})) == ["a", "b"]
    assert list(held.plus({"b": reply}).without(["a", "z"])) == ["b"]
    assert list(held) == ["a"]
    assert held.without(["z"]) is held
