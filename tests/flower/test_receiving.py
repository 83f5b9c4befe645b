"""Which replies count: the same in both modes of the server, in whatever order they come."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict

import fedbranch as fb
from fedbranch.flower.arrays import Layout
from fedbranch.flower.asking import ask_to_evaluate, ask_to_train
from fedbranch.flower.federation import Federation, Keys
from fedbranch.flower.receiving import receive_metrics, receive_updates
from fedbranch.flower.testing import FakeGrid, FakeNode
from flower.federations import RULE, make_grid, start

NUM_CLIENTS, NUM_PARAMS = 4, 24
MODES = {"kept": {}, "summed": {"sketch": 16, "keep_updates": False}}
BAD, NUM_ROUNDS = FakeNode.simulated(1, 6).node_id, 3  # of the whole runs
LATE, *OTHERS = [f"partition-{i:04d}" for i in range(NUM_CLIENTS)]
TRAINING_ON = fb.NeverSplit()
# Stands still until all have answered, so that a late reply is computed at the same parameters.
HOLDING = replace(RULE, eps_mean=99.0, eps_max=1e-6, min_cluster_size=2, coverage=1.0)


def trained(message, _):
    """Reply with another update in every round, and the round's number as a metric."""
    number = message.content["config"]["server-round"]
    rng = np.random.default_rng([message.metadata.dst_node_id, number])
    model = message.content["arrays"]["w"].numpy()
    arrays = {"w": Array(model + rng.normal(size=model.shape).astype(np.float32))}
    metrics = {"num-examples": 10, "answers-round": number}
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=message)


class Rounds:
    """A federation, round by round, with the replies in hand."""

    def __init__(self, rule, mode, trained=trained):
        layout = Layout.of(ArrayRecord({"w": Array(np.zeros(NUM_PARAMS, np.float32))}))
        self.server = fb.Server(NUM_PARAMS, rule=rule, **MODES[mode])
        self.grid = FakeGrid(
            trained, [FakeNode.simulated(i, NUM_CLIENTS) for i in range(NUM_CLIENTS)]
        )
        keys = Keys(weight="num-examples", arrays="arrays", config="config")
        self.federation = Federation(self.server, layout, keys, timeout_s=60.0)

    def ask(self):
        """Ask all clients in the coming round; return messages, and replies by client."""
        tasks = self.server.plan(self.federation.gather(self.grid, NUM_CLIENTS))
        asked = ask_to_train(self.federation, tasks, self.server.round + 1)
        self.grid.push_messages([one.message for one in asked])
        replies = self.grid.pull_messages([one.id for one in asked])
        by_message = {reply.metadata.reply_to_message_id: reply for reply in replies}
        return asked, {one.client_id: by_message[one.id] for one in asked}

    def step(self, asked, replies):
        received = receive_updates(self.federation, asked, replies)
        return received, self.server.step(received.intake)


def two_replies_of_one_client(rule, mode, order):
    """Let a client answer the first round's message in the second round, beside the second's."""
    rounds = Rounds(rule, mode)
    asked, replies = rounds.ask()
    late = replies.pop(LATE)
    received, _ = rounds.step(asked, replies.values())
    assert [one.client_id for one in received.unanswered] == [LATE]
    asked, replies = rounds.ask()
    new = replies.pop(LATE)
    both = [late, new] if order == "late first" else [new, late]
    received, record = rounds.step([*received.unanswered, *asked], [*both, *replies.values()])
    return received, record, rounds.server


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["late first", "new first"])
def test_of_a_stale_and_a_good_reply_the_good_one_is_used(mode, order):
    received, record, _ = two_replies_of_one_client(TRAINING_ON, mode, order)

    assert record.metrics[LATE]["answers-round"] == 2
    assert received.answers[LATE].asked.round == 2
    assert sorted(record.metrics) == [LATE, *OTHERS]
    assert list(record.refused) == [LATE]
    assert record.refused[LATE].startswith("computed at other parameters ('0.0-")
    assert received.unanswered == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("order", "used"), [("late first", 1), ("new first", 2)])
def test_of_two_replies_that_can_be_used_the_first_counts(mode, order, used):
    received, record, _ = two_replies_of_one_client(HOLDING, mode, order)

    assert record.decisions[0].measurements["num_answered"] == NUM_CLIENTS
    assert record.metrics == {LATE: {"answers-round": used}}
    assert received.answers[LATE].asked.round == used
    assert record.refused == {LATE: "has already answered in this round"}


@pytest.mark.parametrize("order", ["late first", "new first"])
@pytest.mark.parametrize("rule", [TRAINING_ON, HOLDING], ids=["stale", "usable"])
def test_both_modes_leave_the_same_record(rule, order):
    (_, kept, server), (_, summed, other) = (
        two_replies_of_one_client(rule, mode, order) for mode in MODES
    )

    assert kept.metrics == summed.metrics
    assert kept.refused == summed.refused
    assert kept.cluster_sizes == summed.cluster_sizes
    assert [d.verdict for d in kept.decisions] == [d.verdict for d in summed.decisions]
    for node in server.tree:
        np.testing.assert_allclose(node.params, other.tree[node.id].params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_a_stale_and_a_good_reply_changes_no_bit(mode):
    (_, first, server), (_, second, other) = (
        two_replies_of_one_client(TRAINING_ON, mode, order) for order in ("late first", "new first")
    )

    assert first == second
    assert server.tree.root.params.tobytes() == other.tree.root.params.tobytes()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad_comes_first", [True, False])
def test_an_unreadable_reply_does_not_stand_in_the_way_of_a_good_one(mode, bad_comes_first):
    rounds = Rounds(HOLDING, mode)
    asked, replies = rounds.ask()
    late = replies.pop(LATE)
    received, _ = rounds.step(asked, replies.values())
    asked, _ = rounds.ask()
    bad = Message(Error(code=2, reason="out of memory"), reply_to=asked[0].message)

    both = [bad, late] if bad_comes_first else [late, bad]
    _, record = rounds.step([*received.unanswered, *asked], both)

    assert record.metrics == {LATE: {"answers-round": 1}}
    assert record.refused == {LATE: "the client failed (error 2): out of memory"}


@pytest.mark.parametrize("mode", MODES)
def test_the_third_reply_counts_if_the_first_two_cannot_be_used(mode):
    rounds = Rounds(TRAINING_ON, mode)
    replies_of_client = []
    asked_earlier = []
    for _ in range(2):
        asked, replies = rounds.ask()
        replies_of_client.append(replies.pop(LATE))
        received, _ = rounds.step([*asked_earlier, *asked], replies.values())
        asked_earlier = received.unanswered
    asked, replies = rounds.ask()
    stale, also_stale, good = *replies_of_client, replies.pop(LATE)
    bad = Message(Error(code=2, reason="out of memory"), reply_to=asked_earlier[1].message)

    received, record = rounds.step(
        [*asked_earlier, *asked], [stale, bad, good, also_stale, *replies.values()]
    )

    assert record.metrics[LATE]["answers-round"] == 3
    assert record.refused.keys() == {LATE}
    assert len(received.answers) == NUM_CLIENTS


@pytest.mark.parametrize("mode", MODES)
def test_a_message_is_answered_once(mode, caplog):
    rounds = Rounds(TRAINING_ON, mode)
    asked, replies = rounds.ask()

    _, record = rounds.step(asked, [*replies.values(), replies[LATE]])

    assert sorted(record.metrics) == [LATE, *OTHERS]
    assert record.refused == {}
    assert "ignored a reply to a message that was answered" in caplog.text


@pytest.mark.parametrize("mode", MODES)
def test_every_client_without_a_reply_has_a_reason(mode):
    rounds = Rounds(TRAINING_ON, mode)
    asked, replies = rounds.ask()
    silent, forged, *_ = asked
    replies[forged.client_id].metadata.__dict__["_src_node_id"] = 12345
    del replies[silent.client_id]

    received, record = rounds.step(asked, replies.values())

    assert record.refused == {
        silent.client_id: "no answer: it was stopped, or took longer than 60 s",
        forged.client_id: "answered by another node (12345)",
    }
    assert received.unanswered == [silent, forged]  # the node that was asked may still reply


@pytest.mark.parametrize("mode", MODES)
def test_without_any_reply_the_round_is_made_all_the_same(mode):
    rounds = Rounds(TRAINING_ON, mode)
    asked, _ = rounds.ask()

    received, record = rounds.step(asked, [])

    assert received.answers == {}
    assert sorted(record.refused) == [LATE, *OTHERS]
    assert rounds.server.round == 1


def test_evaluations_of_other_nodes_and_unreadable_ones_are_refused():
    rounds = Rounds(TRAINING_ON, "kept")
    ids = rounds.federation.gather(rounds.grid, NUM_CLIENTS)
    rounds.server.join(ids)
    asked = ask_to_evaluate(rounds.federation, ids, this_round=1)
    rounds.grid.push_messages([one.message for one in asked])
    forged, bad, good, _ = (rounds.grid.pull_messages([one.id])[0] for one in asked)
    forged.metadata.__dict__["_src_node_id"] = 12345
    bad.content["metrics"]["num-examples"] = -1

    evaluated = receive_metrics(rounds.federation, asked, [good, bad, forged])

    assert list(evaluated.answers) == [ids[2]]
    assert evaluated.refused[ids[0]] == "answered by another node (12345)"
    assert "'num-examples' is -1" in evaluated.refused[ids[1]]
    assert ids[3] not in evaluated.refused


# Over whole runs


@pytest.mark.parametrize("mode", MODES)
def test_a_readable_late_reply_counts_if_the_newer_one_is_bad(mode):
    slow = FakeNode.simulated(0, 6).node_id
    withheld = []

    def on_reply(message, reply):
        if message.metadata.message_type != "train" or message.metadata.dst_node_id != slow:
            return reply
        withheld.append(reply)
        if len(withheld) == 1:
            return None
        return [withheld[-2], Message(Error(code=2, reason="out of memory"), reply_to=message)]

    result = start(
        make_grid(on_reply=on_reply), num_rounds=2, timeout=1, rule=HOLDING, **MODES[mode]
    )

    assert [d.verdict for e in result.history for d in e.record.decisions] == ["hold", "split"]
    reason = "the client failed (error 2): out of memory"
    assert result.history[1].record.refused == {"partition-0000": reason}


@pytest.mark.parametrize("mode", MODES)
def test_a_late_reply_is_used_if_its_cluster_stood_still(mode):
    slow = FakeNode.simulated(0, 6).node_id
    withheld = []

    def on_reply(message, reply):
        if message.metadata.message_type != "train":
            return reply
        if message.metadata.dst_node_id == slow:
            withheld.append(reply)
            return withheld.pop(0) if len(withheld) > 1 else None
        return reply

    result = start(
        make_grid(on_reply=on_reply), num_rounds=2, timeout=1, rule=HOLDING, **MODES[mode]
    )

    assert [d.verdict for e in result.history for d in e.record.decisions] == ["hold", "split"]
    assert "partition-0000" not in result.history[0].record.metrics
    assert "partition-0000" in result.history[1].record.metrics
    assert not result.history[1].record.refused


@pytest.mark.parametrize("mode", MODES)
def test_a_late_reply_to_an_older_model_is_refused_as_such(mode):
    withheld = []

    def on_reply(message, reply):
        is_bad = message.metadata.dst_node_id == BAD and message.metadata.message_type == "train"
        if not is_bad:
            return [reply, *withheld] if message.metadata.group_id == "2" else reply
        if message.metadata.group_id == "1":
            withheld.append(reply)
        return None

    result = start(make_grid(on_reply=on_reply), num_rounds=2, timeout=1, **MODES[mode])

    assert "took longer than 1 s" in result.history[0].record.refused["partition-0001"]
    assert "computed at other parameters" in result.history[1].record.refused["partition-0001"]


@pytest.mark.parametrize("mode", MODES)
def test_a_reply_of_another_node_is_refused(mode):
    def on_reply(message, reply):
        if message.metadata.dst_node_id == BAD:
            reply.metadata.__dict__["_src_node_id"] = 12345
        return reply

    result = start(make_grid(on_reply=on_reply), num_rounds=1, timeout=0.1, **MODES[mode])

    assert result.history[0].record.refused == {
        "partition-0001": "answered by another node (12345)"
    }


@pytest.mark.parametrize("mode", MODES)
def test_a_forged_reply_that_comes_first_does_not_silence_the_node_that_was_asked(mode):
    genuine = []

    def on_reply(message, reply):
        if message.metadata.dst_node_id != BAD:
            return reply
        forged = Message(Error(code=2, reason="silenced"), reply_to=message)
        forged.metadata.__dict__["_src_node_id"] = 12345
        genuine.append(reply)
        return forged

    grid = make_grid(on_reply=on_reply)
    pull = grid.pull_messages

    def pull_messages(message_ids):
        arrived = pull(message_ids)
        grid._replies += genuine  # with the next look
        genuine.clear()
        return arrived

    grid.pull_messages = pull_messages

    result = start(grid, num_rounds=NUM_ROUNDS, **MODES[mode])

    assert result.history == start(make_grid(), num_rounds=NUM_ROUNDS, **MODES[mode]).history
    assert not result.history[0].record.refused


@pytest.mark.parametrize("mode", MODES)
def test_replies_in_any_order_give_the_same_bytes(mode):
    plain = make_grid()
    shuffled = make_grid()
    pull = shuffled.pull_messages
    shuffled.pull_messages = lambda message_ids: pull(message_ids)[::-1]

    results = [start(grid, num_rounds=8, **MODES[mode]) for grid in (plain, shuffled)]

    first, second = (result.history for result in results)
    assert first == second
    np.testing.assert_array_equal(*(result.tree.root.params for result in results))
