"""Federations whose server keeps no updates: replies go into sums as they come."""

import copy
import threading
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Message

import fedbranch as fb
from fedbranch.flower import streaming as folding
from fedbranch.flower.testing import FakeNode
from flower.federations import (
    RULE,
    Killed,
    contents_of,
    kill_after,
    make_clients,
    make_grid,
    make_model,
    start,
)

FOLDED = {"sketch": 64, "keep_updates": False}
NUM_CLIENTS = 6


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(folding, "MOST_REPLIES_AT_ONCE", 2)


def run(num_rounds=30, on_reply=None, **settings):
    model = make_model(has_buffers=True)
    grid = make_grid(make_clients(NUM_CLIENTS), copy.deepcopy(model), on_reply=on_reply)
    return start(grid, model=model, num_rounds=num_rounds, **settings)


def threads_that_fold():
    return [thread for thread in threading.enumerate() if thread.name.startswith("fedbranch-fold")]


def test_clusters_are_those_of_a_server_that_keeps_updates():
    kept = run(sketch=64)

    folded = run(**FOLDED)

    assert folded.clusters == kept.clusters
    assert len(folded.clusters) == 2
    for leaf in folded.tree.leaves:
        np.testing.assert_allclose(leaf.params, kept.tree[leaf.id].params, atol=2e-3)


def test_the_first_round_differs_by_rounding_only():
    kept, folded = run(num_rounds=1, sketch=64), run(num_rounds=1, **FOLDED)

    assert kept.history[0].record.metrics == folded.history[0].record.metrics
    assert kept.train_metrics_clientapp == folded.train_metrics_clientapp
    for name in ("params", "buffers"):
        ours, theirs = (getattr(result.tree.root, name) for result in (folded, kept))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_the_number_of_threads_changes_no_bit(monkeypatch):
    results = []
    for number in (1, 4):
        monkeypatch.setattr(folding, "MOST_THREADS", number)
        monkeypatch.setattr(folding, "num_cores", lambda: 8)
        results.append(run(**FOLDED))

    assert results[0].history == results[1].history
    for leaf in results[0].tree.leaves:
        assert leaf.params.tobytes() == results[1].tree[leaf.id].params.tobytes()


def test_a_killed_server_app_goes_on_to_the_same_bytes(tmp_path):
    whole = run(checkpoint_dir=tmp_path / "whole", **FOLDED)
    with pytest.raises(Killed):
        run(checkpoint_dir=tmp_path / "cut", start_with=kill_after(20), **FOLDED)

    resumed = run(checkpoint_dir=tmp_path / "cut", resume=True, **FOLDED)

    assert contents_of(tmp_path / "whole") == contents_of(tmp_path / "cut")
    assert resumed.history == whole.history


def test_a_run_is_not_resumed_with_other_sketches(tmp_path):
    run(num_rounds=1, checkpoint_dir=tmp_path, **FOLDED)

    with pytest.raises(fb.UnusableRun, match="sketch"):
        run(num_rounds=2, checkpoint_dir=tmp_path, resume=True, sketch=32, keep_updates=False)


def test_a_late_reply_is_used_if_its_cluster_stood_still():
    slow = FakeNode.simulated(0, NUM_CLIENTS).node_id
    withheld = []

    def on_reply(message, reply):
        if message.metadata.message_type != "train" or message.metadata.dst_node_id != slow:
            return reply
        withheld.append(reply)
        return withheld.pop(0) if len(withheld) > 1 else None

    rule = replace(RULE, eps_mean=9.0, eps_max=1e-6, min_cluster_size=2, coverage=1.0)
    result = run(2, on_reply, timeout=1, rule=rule, **FOLDED)

    assert [d.verdict for e in result.history for d in e.record.decisions] == ["hold", "split"]
    assert "partition-0000" not in result.history[0].record.metrics
    assert "partition-0000" in result.history[1].record.metrics
    assert not result.history[1].record.refused


def test_of_two_replies_of_a_client_one_counts():
    slow = FakeNode.simulated(0, NUM_CLIENTS).node_id
    withheld = []

    def on_reply(message, reply):
        if message.metadata.message_type != "train" or message.metadata.dst_node_id != slow:
            return reply
        withheld.append(reply)
        return None if len(withheld) == 1 else list(withheld)

    rule = replace(RULE, eps_mean=9.0, eps_max=1e-6, min_cluster_size=2, coverage=1.0)
    result = run(2, on_reply, timeout=1, rule=rule, **FOLDED)

    assert [d.verdict for e in result.history for d in e.record.decisions] == ["hold", "split"]
    assert not result.history[1].record.refused


def test_half_updates_are_folded_as_well():
    # What the rule makes of them is in test_halves; here that their sketches arrive.
    seen = []

    class Asking:
        def examine(self, evidence):
            seen.append((evidence.asked_for_halves, evidence.halved_rows))
            decision = fb.NeverSplit().examine(evidence)
            return replace(decision, asks="halves")

    def on_reply(message, reply):
        if (
            message.metadata.message_type == "train"
            and "fedbranch-halves" in message.content["config"]
        ):
            content = copy.copy(reply.content)
            content["arrays-half-difference"] = reply.content["arrays"]
            return Message(content, reply_to=message)
        return reply

    run(2, on_reply, rule=Asking(), half_updates=True, **FOLDED)

    assert seen == [(False, ()), (True, tuple(range(NUM_CLIENTS)))]


def test_whoever_interrupts_leaves_no_threads_behind(monkeypatch):
    def interrupted(self, one, reply):
        raise KeyboardInterrupt

    monkeypatch.setattr(folding.Folding, "put", interrupted)

    with pytest.raises(KeyboardInterrupt):
        run(1, **FOLDED)

    assert not threads_that_fold()


def test_a_mistake_of_ours_is_not_taken_for_a_bad_reply(monkeypatch):
    def broken(self, read, steps):
        raise ZeroDivisionError

    monkeypatch.setattr(folding.Folding, "_take_in", broken)

    with pytest.raises(ZeroDivisionError):
        run(1, **FOLDED)

    assert not threads_that_fold()
