"""The rule without thresholds, over client apps that know nothing of it but can evaluate."""

import math
from collections import Counter

import pytest
from flwr.app import Error, Message, MetricRecord, RecordDict

from fedbranch.flower import ClusteredStrategy
from fedbranch.flower.federation import Federation
from fedbranch.flower.testing import FakeNode
from flower.federations import (
    Killed,
    contents_of,
    kill_after,
    make_clients,
    make_grid,
    start,
)

ODD_AND_EVEN = [
    [f"partition-{i:04d}" for i in (0, 2, 4)],
    [f"partition-{i:04d}" for i in (1, 3, 5)],
]
SICK = FakeNode.simulated(1, 6).node_id
# The first examination: round 2 proposes groups, the third asks whether a split pays.
TRIALS_IN = "3"


def start_auto(grid, *, num_rounds=6, **settings):
    return start(grid, num_rounds=num_rounds, **{"rule": None, **settings})


def verdicts(result):
    return [d.verdict for entry in result.history for d in entry.record.decisions]


def in_trials(change):
    """Change what one node answers to trials: the first two evaluations of the third round."""
    num_seen = 0

    def on_reply(message, reply):
        nonlocal num_seen
        metadata = message.metadata
        is_meant = (metadata.dst_node_id, metadata.message_type, metadata.group_id) == (
            *(SICK, "evaluate"),
            TRIALS_IN,
        )
        num_seen += is_meant
        return change(message, reply, num_seen) if is_meant and num_seen <= 2 else reply

    return on_reply


def with_metrics(message, reply, **metrics):
    kept = {n: v for n, v in reply.content["metrics"].items() if metrics.get(n, v) is not None}
    changed = {n: v for n, v in metrics.items() if v is not None}
    return Message(RecordDict({"metrics": MetricRecord({**kept, **changed})}), reply_to=message)


def test_it_finds_the_groups_without_any_threshold():
    grid = make_grid()

    result = start_auto(grid, num_rounds=8)

    assert sorted(result.clusters.values()) == ODD_AND_EVEN
    assert verdicts(result)[:3] == ["train", "hold", "split"]
    assert not grid.errors
    reviews = [d for d in result.history[7].record.decisions if d.verdict == "keep"]
    assert [d.measurements["num_answered"] for d in reviews] == [6]


def test_clients_that_agree_stay_together():
    clients = make_clients(num_clients=12, num_kinds=1)

    result = start_auto(make_grid(clients), num_rounds=10)

    assert list(result.clusters) == [0]


def test_two_more_messages_to_each_client_and_three_models_among_them():
    grid = make_grid()

    start_auto(grid, num_rounds=4)

    def sent_in(number):
        return [m for m in grid.sent if m.metadata.group_id == str(number)]

    for number, expected in [(2, (6, 6)), (3, (0, 18)), (4, (6, 6))]:
        count = Counter(m.metadata.message_type for m in sent_in(number))
        assert (count["train"], count["evaluate"]) == expected
    trials = sent_in(3)[:12]
    assert Counter(m.metadata.dst_node_id for m in trials) == dict.fromkeys(grid.nodes, 2)
    assert len({id(m.content) for m in trials}) == 3  # all together, and each of two groups
    assert {m.content["config"]["server-round"] for m in trials} == {3}


def test_trials_have_the_evaluations_configuration():
    grid = make_grid()

    start_auto(grid, num_rounds=3, start_with={"evaluate_config": {"batch-size": 7}})

    third = [m for m in grid.sent if m.metadata.group_id == TRIALS_IN]
    assert {m.content["config"]["batch-size"] for m in third} == {7}


def test_clients_without_a_loss_are_judged_by_less(caplog):
    def on_reply(message, reply):
        if message.metadata.message_type == "train":
            return reply
        return with_metrics(message, reply, loss=None)

    result = start_auto(make_grid(on_reply=on_reply))

    assert sorted(result.clusters.values()) == ODD_AND_EVEN
    (split,) = (d for e in result.history for d in e.record.decisions if d.verdict == "split")
    assert "no client could measure whether it pays" in split.reason
    assert caplog.text.count("no clear loss: its metrics are ['accuracy']") == 1


def test_without_evaluation_no_client_is_asked_for_losses():
    grid = make_grid()

    result = start_auto(grid, fraction_evaluate=0.0)

    assert {m.metadata.message_type for m in grid.sent} == {"train"}
    assert sorted(result.clusters.values()) == ODD_AND_EVEN


def test_a_loss_under_another_name_is_found_by_its_key():
    def on_reply(message, reply):
        if message.metadata.message_type == "train":
            return reply
        loss = reply.content["metrics"]["loss"]
        return with_metrics(message, reply, loss=None, badness=loss)

    result = start_auto(make_grid(on_reply=on_reply), loss_key="badness", num_rounds=3)

    assert verdicts(result) == ["train", "hold", "split"]
    assert result.history[2].record.decisions[0].measurements["mean_gain"] > 0


# What can go wrong with a trial


@pytest.mark.parametrize(
    "change",
    [
        lambda message, reply, number: Message(Error(code=2, reason="died"), reply_to=message),
        lambda message, reply, number: None,
        lambda message, reply, number: None if number == 2 else reply,
        lambda message, reply, number: with_metrics(message, reply, loss=None),
        lambda message, reply, number: with_metrics(message, reply, **{"num-examples": -1}),
        lambda message, reply, number: Message(RecordDict(), reply_to=message),
    ],
    ids=["error", "silence", "silence after one", "no loss", "no weight", "nothing"],
)
def test_a_client_that_fails_in_a_trial_is_left_out_alone(change, caplog):
    grid = make_grid(on_reply=in_trials(change))

    result = start_auto(grid, num_rounds=4, timeout=0.3)

    assert "trials: 5 of 6 nodes sent their losses" in caplog.text
    assert sorted(result.clusters.values()) == ODD_AND_EVEN
    refused = [entry.record.refused for entry in result.history]
    assert refused[:2] + refused[3:] == [{}, {}, {}]
    assert all("no loss: " in reason for reason in refused[2].values())
    assert refused[2].keys() <= {"partition-0001"}


def test_a_reply_that_comes_twice_counts_once():
    grid = make_grid(on_reply=in_trials(lambda message, reply, number: [reply, reply]))

    result = start_auto(grid, num_rounds=4)

    assert result.history == start_auto(make_grid(), num_rounds=4).history


def test_a_model_may_be_as_bad_as_nan(caplog):
    grid = make_grid(
        on_reply=in_trials(
            lambda message, reply, number: with_metrics(message, reply, loss=math.nan)
        )
    )

    start_auto(grid, num_rounds=3)

    assert "trials: 6 of 6 nodes sent their losses" in caplog.text


def test_no_client_is_waited_for_while_others_are_on_trial(monkeypatch):
    grid = make_grid()

    def lose_one(number, arrays):
        if number == 2:  # when groups have been proposed
            grid.disconnect(SICK)

    def wait_for_any(*_):
        raise AssertionError("waits though there is something to do")

    monkeypatch.setattr(Federation, "wait_for_any", wait_for_any)
    result = start_auto(grid, num_rounds=3, start_with={"evaluate_fn": lose_one})

    assert verdicts(result) == ["train", "hold", "split"]
    assert sorted(result.clusters.values()) == ODD_AND_EVEN


def test_losses_of_a_sampled_fraction_come_in_over_rounds():
    result = start_auto(make_grid(), fraction_train=0.5, num_rounds=12)

    assert sorted(result.clusters.values()) == ODD_AND_EVEN


def test_a_node_that_a_subclass_spares_is_not_on_trial_either():
    class Sparing(ClusteredStrategy):
        def configure_train(self, server_round, arrays, config, grid):
            messages = super().configure_train(server_round, arrays, config, grid)
            return [m for m in messages if server_round != 8 or m.metadata.dst_node_id != SICK]

    grid = make_grid()
    start_auto(grid, num_rounds=8, strategy_class=Sparing)

    # Five rounds after the split all clients compare models; and all evaluate in the end.
    last = [m for m in grid.sent if m.metadata.group_id == "8"]
    count = Counter(m.metadata.dst_node_id for m in last if m.metadata.message_type == "evaluate")
    assert count.pop(SICK) == 1
    assert len(count) == 5
    assert min(count.values()) >= 3


def test_subclasses_see_answers_to_what_they_configured_only():
    seen = []

    class Watching(ClusteredStrategy):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            seen.append({reply.metadata.message_type for reply in replies})
            return super().aggregate_train(server_round, replies)

    result = start_auto(make_grid(), num_rounds=3, strategy_class=Watching)

    assert seen == [{"train"}, {"train"}, set()]
    assert verdicts(result) == ["train", "hold", "split"]


# Stopping and going on


@pytest.mark.parametrize("killed_in", [3, 8])
def test_killed_in_an_examination_it_goes_on_to_the_same_bytes(tmp_path, killed_in):
    whole = start_auto(make_grid(), num_rounds=9, checkpoint_dir=tmp_path / "whole")
    with pytest.raises(Killed):
        start_auto(
            make_grid(),
            num_rounds=9,
            checkpoint_dir=tmp_path / "cut",
            start_with=kill_after(killed_in),
        )

    resumed = start_auto(make_grid(), num_rounds=9, checkpoint_dir=tmp_path / "cut", resume=True)

    assert verdicts(whole)[:3] == ["train", "hold", "split"]
    assert contents_of(tmp_path / "whole") == contents_of(tmp_path / "cut")
    assert resumed.history == whole.history
