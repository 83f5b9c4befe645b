"""Federations with a server that keeps no updates: replies go into sums as they come."""

import copy
import threading
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Message

import fedbranch as fb
from fedbranch.flower import streaming
from fedbranch.flower.read_updates import UpdateReader
from flower.federations import (
    Killed,
    contents_of,
    kill_after,
    make_clients,
    make_grid,
    make_model,
    start,
)

SUMMED = {"sketch": 64, "keep_updates": False}
NUM_CLIENTS = 6


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(streaming, "MOST_REPLIES_AT_ONCE", 2)


def run(num_rounds=30, on_reply=None, **settings):
    model = make_model(has_buffers=True)
    grid = make_grid(make_clients(NUM_CLIENTS), copy.deepcopy(model), on_reply=on_reply)
    return start(grid, model=model, num_rounds=num_rounds, **settings)


def threads_that_add():
    return [
        thread for thread in threading.enumerate() if thread.name.startswith(streaming.THREAD_NAME)
    ]


def test_clusters_are_those_of_a_server_that_keeps_updates():
    kept = run(sketch=64)

    summed = run(**SUMMED)

    assert summed.clusters == kept.clusters
    assert len(summed.clusters) == 2
    for leaf in summed.tree.leaves:
        np.testing.assert_allclose(leaf.params, kept.tree[leaf.id].params, atol=2e-3)


def test_the_first_round_differs_by_rounding_only():
    kept, summed = run(num_rounds=1, sketch=64), run(num_rounds=1, **SUMMED)

    assert kept.history[0].record.metrics == summed.history[0].record.metrics
    assert kept.train_metrics_clientapp == summed.train_metrics_clientapp
    for name in ("params", "buffers"):
        ours, theirs = (getattr(result.tree.root, name) for result in (summed, kept))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_the_number_of_threads_changes_no_bit(monkeypatch):
    results = []
    for number in (1, 4):
        monkeypatch.setattr(streaming, "MOST_THREADS", number)
        monkeypatch.setattr(streaming, "num_cores", lambda: 8)
        results.append(run(**SUMMED))

    assert results[0].history == results[1].history
    for leaf in results[0].tree.leaves:
        assert leaf.params.tobytes() == results[1].tree[leaf.id].params.tobytes()


def test_a_killed_server_app_goes_on_to_the_same_bytes(tmp_path):
    whole = run(checkpoint_dir=tmp_path / "whole", **SUMMED)
    with pytest.raises(Killed):
        run(checkpoint_dir=tmp_path / "cut", start_with=kill_after(20), **SUMMED)

    resumed = run(checkpoint_dir=tmp_path / "cut", resume=True, **SUMMED)

    assert contents_of(tmp_path / "whole") == contents_of(tmp_path / "cut")
    assert resumed.history == whole.history


def test_a_run_is_not_resumed_with_other_sketches(tmp_path):
    run(num_rounds=1, checkpoint_dir=tmp_path, **SUMMED)

    with pytest.raises(fb.UnusableRun, match="sketch"):
        run(num_rounds=2, checkpoint_dir=tmp_path, resume=True, sketch=32, keep_updates=False)


def test_sketches_of_half_updates_reach_the_rule():
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

    run(2, on_reply, rule=Asking(), half_updates=True, **SUMMED)

    assert seen == [(False, ()), (True, tuple(range(NUM_CLIENTS)))]


def test_an_interruption_leaves_no_threads_behind():
    grid = make_grid()

    def interrupted(message_ids):
        raise KeyboardInterrupt

    grid.pull_messages = interrupted

    with pytest.raises(KeyboardInterrupt):
        start(grid, num_rounds=1, **SUMMED)

    assert not threads_that_add()


def test_a_mistake_of_ours_is_not_taken_for_a_bad_reply(monkeypatch):
    def broken(self, replies):
        raise ZeroDivisionError

    monkeypatch.setattr(UpdateReader, "read", broken)

    with pytest.raises(ZeroDivisionError):
        run(1, **SUMMED)

    assert not threads_that_add()
