"""Metrics: the loss among them, and means over all clients and over each cluster."""

import math

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict

from fedbranch.flower.metrics import loss_in
from fedbranch.flower.testing import FakeNode
from flower.federations import (
    make_grid,
    start,
)

BAD = FakeNode.simulated(1, 6).node_id


@pytest.mark.parametrize(
    ("metrics", "key", "loss"),
    [
        ({"accuracy": 1.0, "loss": 2.0}, None, 2.0),
        ({"val_loss": 1.0, "loss": 2.0, "train_loss": 3.0}, None, 2.0),
        ({"train_loss": 3.0, "test_loss": 1.0}, None, 1.0),
        ({"cross_entropy_Loss": 3.0, "accuracy": 1.0}, None, 3.0),
        ({"a_loss": 3.0, "b_loss": 1.0}, None, None),
        ({"a_loss": 3.0, "b_loss": 1.0}, "b_loss", 1.0),
        ({"loss": 3.0}, "b_loss", None),
        ({"accuracy": 3.0}, None, None),
    ],
)
def test_which_metric_is_the_loss(metrics, key, loss):
    assert loss_in(metrics, key) == loss


def test_metrics_are_given_for_every_cluster_and_overall():
    result = start(make_grid())

    last = result.evaluate_metrics_clientapp[30]
    leaves = sorted(result.clusters)
    assert set(last) == {
        *("loss", "accuracy"),
        *(f"leaf-{leaf}/{name}" for leaf in leaves for name in ("loss", "accuracy")),
    }
    evaluation = result.history[-1].evaluation
    for leaf, client_ids in result.clusters.items():  # all have 20 test examples
        mean = np.mean([evaluation[client_id]["accuracy"] for client_id in client_ids])
        assert last[f"leaf-{leaf}/accuracy"] == pytest.approx(mean)
    mean = np.mean([metrics["accuracy"] for metrics in evaluation.values()])
    assert last["accuracy"] == pytest.approx(mean)
    assert f"leaf-{leaves[0]}/loss" in result.train_metrics_clientapp[30]


def test_the_servers_evaluation_sees_every_leaf():
    seen = []

    def evaluate(number, arrays):
        seen.append(number)
        return MetricRecord({"size": float(np.abs(arrays["0.weight"].numpy()).sum())})

    result = start(make_grid(), start_with={"evaluate_fn": evaluate})

    assert seen.count(0) == seen.count(1) == 1
    assert seen.count(30) == len(result.clusters) == 2
    sizes = {
        leaf: float(np.abs(result.arrays_at(leaf)["0.weight"].numpy()).sum())
        for leaf in result.clusters
    }
    last = result.evaluate_metrics_serverapp[30]
    assert {f"leaf-{leaf}/size": size for leaf, size in sizes.items()}.items() <= last.items()
    weights = [len(ids) for ids in result.clusters.values()]
    assert last["size"] == pytest.approx(np.average(list(sizes.values()), weights=weights))


def test_a_users_aggregation_gets_the_replies_without_arrays():
    calls = []

    def largest(contents, weighted_by_key):
        calls.append([list(content) for content in contents])
        return MetricRecord({"largest": max(c["metrics"]["loss"] for c in contents)})

    result = start(make_grid(), num_rounds=1, train_metrics_aggr_fn=largest)

    assert calls == [[["metrics"]] * 6] * 2
    assert set(result.train_metrics_clientapp[1]) == {"largest", "leaf-0/largest"}


def test_a_bad_evaluation_is_left_out_of_the_means():
    def on_reply(message, reply):
        is_bad = message.metadata.dst_node_id == BAD and message.metadata.message_type == "evaluate"
        if not is_bad:
            return reply
        metrics = MetricRecord({"num-examples": math.inf, "accuracy": 1e9})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    result = start(make_grid(on_reply=on_reply), num_rounds=1)

    assert sorted(result.history[0].evaluation) == [f"partition-000{i}" for i in (0, 2, 3, 4, 5)]
    assert result.evaluate_metrics_clientapp[1]["accuracy"] <= 1


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_metrics_at_the_edge_of_floats_do_no_harm(stage):
    def on_reply(message, reply):
        if message.metadata.message_type != stage:
            return reply
        sign = 1 if message.metadata.dst_node_id == BAD else -1
        content = RecordDict(dict(reply.content.items()))
        content["more"] = MetricRecord({"loss": sign * 1.7e308, "curve": [1.0] * (2 + sign)})
        return Message(content, reply_to=message)

    result = start(make_grid(on_reply=on_reply), num_rounds=2)

    assert len(result.history) == 2
    assert not result.history[1].record.refused
