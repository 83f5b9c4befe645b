"""Messages out and replies in: silence, nodes that were started again, and a broken grid."""

from dataclasses import replace

import pytest
from flwr.app import ArrayRecord

from fedbranch.flower import ClusteredStrategy, exchange
from fedbranch.flower.testing import FakeNode
from flower.federations import (
    RULE,
    SEED,
    make_grid,
    make_model,
    start,
)

BAD = FakeNode.simulated(1, 6).node_id


def test_a_node_that_was_started_again_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(exchange, "SECONDS_BETWEEN_ROLL_CALLS", 0.01)
    restarted = FakeNode.simulated(0, 6)

    def on_reply(message, reply):
        if message.metadata.dst_node_id != restarted.node_id or message.metadata.group_id != "2":
            return reply
        grid.connect(replace(restarted, last_activated_at=message.metadata.message_type))
        return None

    grid = make_grid(on_reply=on_reply)
    result = start(grid, num_rounds=3, timeout=3600)  # the test would time out

    took_part = ["partition-0000" in entry.record.metrics for entry in result.history]
    assert took_part == [True, False, True]
    assert "it was stopped" in result.history[1].record.refused["partition-0000"]


def test_unanswered_messages_are_forgotten_after_two_rounds(monkeypatch):
    monkeypatch.setattr(exchange, "SECONDS_BETWEEN_ROLL_CALLS", 0.01)
    restarted = FakeNode.simulated(0, 6)

    def on_reply(message, reply):
        if message.metadata.dst_node_id != restarted.node_id:
            return reply
        grid.connect(replace(restarted, last_activated_at=message.metadata.group_id))
        return None

    grid = make_grid(on_reply=on_reply)
    strategy = ClusteredStrategy(rule=RULE, seed=SEED, fraction_evaluate=0.0)
    # Messages live for hours; models are not to.
    strategy.start(grid, ArrayRecord(make_model().state_dict()), num_rounds=12, timeout=3600)

    assert [one.round for one in strategy._running.late] == [11, 12]


def test_a_reply_that_breaks_the_grid_costs_its_client_only():
    grid = make_grid()
    pull = grid.pull_messages

    def pull_messages(message_ids):
        bad = {m.metadata.message_id for m in grid.sent if m.metadata.dst_node_id == BAD}
        if bad & set(message_ids):
            raise ValueError("cannot inflate")
        return pull(message_ids)

    grid.pull_messages = pull_messages
    result = start(grid, num_rounds=2, timeout=0.05, fraction_evaluate=0.0)

    for entry in result.history:
        assert list(entry.record.refused) == ["partition-0001"]
        assert len(entry.record.metrics) == 5


def test_a_grid_that_cannot_be_reached_is_an_error():
    grid = make_grid()

    def pull_messages(message_ids):
        raise ConnectionError("no route")

    grid.pull_messages = pull_messages
    with pytest.raises(ConnectionError, match="no route"):
        start(grid, num_rounds=2)
