"""Replies with every kind of bad content, one by one."""

import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedbranch.flower.testing import FakeNode
from flower.federations import (
    make_clients,
    make_grid,
    start,
)

BAD = FakeNode.simulated(1, 6).node_id


NUM_ROUNDS = 3


def changed_arrays(reply, change):
    arrays = {name: array.numpy() for name, array in reply.content["arrays"].items()}
    changed = ArrayRecord({name: Array(array) for name, array in change(arrays).items()})
    return RecordDict({"arrays": changed, "metrics": reply.content["metrics"]})


def with_first(value):
    """Replace the first array by a function of it."""

    def change(arrays):
        name = next(iter(arrays))
        return {**arrays, name: value(arrays[name])}

    return change


def with_metrics(reply, metrics):
    return RecordDict({"arrays": reply.content["arrays"], "metrics": MetricRecord(metrics)})


def poisoned(array):
    array = array.copy()
    array.flat[0] = math.nan
    return array


def corrupt(reply):
    content = RecordDict(dict(reply.content.items()))
    arrays = dict(content["arrays"].items())
    name, array = next(iter(arrays.items()))
    noise = bytes(len(array.data))
    arrays[name] = Array(array.dtype, array.shape, array.stype, noise)
    content["arrays"] = ArrayRecord(arrays)
    return content


def of_another_kind(reply):
    content = corrupt(reply)
    arrays = dict(content["arrays"].items())
    name, array = next(iter(arrays.items()))
    arrays[name] = Array(array.dtype, array.shape, "pickle", array.data)
    content["arrays"] = ArrayRecord(arrays)
    return content


def with_header(reply, shape, dtype="<f4"):
    """Let the first array's bytes describe it otherwise."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    padded = header.ljust(117) + "\n"
    data = b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode() + bytes(96)
    content = RecordDict(dict(reply.content.items()))
    arrays = dict(content["arrays"].items())
    name, array = next(iter(arrays.items()))
    arrays[name] = Array(array.dtype, array.shape, array.stype, data)
    content["arrays"] = ArrayRecord(arrays)
    return content


BAD_CONTENTS = {
    "NaN": (lambda r: changed_arrays(r, with_first(poisoned)), "NaN or infinity"),
    "infinity": (lambda r: changed_arrays(r, with_first(lambda a: a + np.inf)), "NaN or infinity"),
    "huge": (lambda r: changed_arrays(r, with_first(lambda a: a + 1e37)), "beyond 1e"),
    "unchanged": (None, "is zero: the client did not train"),
    "a key missing": (
        lambda r: changed_arrays(r, lambda arrays: dict(list(arrays.items())[1:])),
        "missing ['0.weight']",
    ),
    "a key too many": (
        lambda r: changed_arrays(r, lambda arrays: {**arrays, "odd": np.zeros(2, np.float32)}),
        "unknown ['odd']",
    ),
    "another shape": (
        lambda r: changed_arrays(r, with_first(lambda a: a.T.copy())),
        "send float32 and (8, 3)",
    ),
    "a shape that would broadcast": (
        lambda r: changed_arrays(r, with_first(lambda a: a[:1].copy())),
        "shape (1, 3); send float32 and (8, 3)",
    ),
    "another dtype": (
        lambda r: changed_arrays(r, with_first(lambda a: a.astype(np.float64))),
        "has dtype float64",
    ),
    "another dtype of the same size": (
        lambda r: changed_arrays(r, with_first(lambda a: a.view(np.int32))),
        "has dtype int32",
    ),
    "not an array": (corrupt, "cannot be read"),
    "another serialisation": (of_another_kind, "is serialised as 'pickle'"),
    "no arrays": (
        lambda r: RecordDict({"metrics": r.content["metrics"]}),
        "0 array records",
    ),
    "two models under other keys": (
        lambda r: RecordDict(
            {"a": r.content["arrays"], "b": r.content["arrays"], "m": r.content["metrics"]}
        ),
        "2 array records, none under 'arrays'",
    ),
    "no weight": (lambda r: with_metrics(r, {"loss": 0.1}), "0 metric records with 'num-examples'"),
    "no metrics": (
        lambda r: RecordDict({"arrays": r.content["arrays"], "c": ConfigRecord({"num-examples": 3})}),
        "0 metric records with 'num-examples'",
    ),
    "a list for a weight": (lambda r: with_metrics(r, {"num-examples": [1, 2]}), "is [1, 2]"),
    "no examples": (lambda r: with_metrics(r, {"num-examples": 0}), "is 0; it must be"),
    "negative examples": (lambda r: with_metrics(r, {"num-examples": -5}), "is -5; it must be"),
    "absurdly many examples": (lambda r: with_metrics(r, {"num-examples": 1e12}), "is 1000000000000"),
    "NaN examples": (lambda r: with_metrics(r, {"num-examples": math.nan}), "is nan; it must be"),
    "infinite examples": (lambda r: with_metrics(r, {"num-examples": math.inf}), "is inf; it must"),
    "empty": (lambda r: RecordDict(), "0 metric records"),
    "a metric beyond floats": (
        lambda r: with_metrics(r, {"num-examples": 3, "x": 10**400}),
        "too large for a float",
    ),
    "a metric with an endless name": (
        lambda r: with_metrics(r, {"num-examples": 3, "x" * 10**6: 1.0}),
        "a metric is called 'xxx",
    ),
    "a metric that poses as a cluster's": (
        lambda r: with_metrics(r, {"num-examples": 3, "leaf-1/accuracy": 1.0}),
        "a metric is called 'leaf-1/accuracy'",
    ),
    "a metric with a name that is not printed": (
        lambda r: with_metrics(r, {"num-examples": 3, "loss\x1b[2J": 1.0}),
        "all of them printable",
    ),
    "a thousand metrics and one": (
        lambda r: with_metrics(r, {"num-examples": 3, **{f"m{i}": 1.0 for i in range(1000)}}),
        "the reply has 1,001 metrics; the limit is 1,000",
    ),
    "a million numbers in a metric": (
        lambda r: with_metrics(r, {"num-examples": 3, "curve": [1.0] * 10**6}),
        "take 8,000,",
    ),
    "a flood of configuration": (
        lambda r: RecordDict({**r.content, "more": ConfigRecord({"x": b"x" * 2**21})}),
        "names, metrics and configurations take 2,097,",
    ),
    "a flood of arrays beside the model": (
        lambda r: RecordDict({**r.content, "more": ArrayRecord({"x": Array(np.zeros(2**20))})}),
        "arrays take 8,38",
    ),
    "the other byte order": (
        lambda r: changed_arrays(r, with_first(lambda a: a.astype(">f4"))),
        "has dtype >f4",
    ),
    "complex numbers": (
        lambda r: changed_arrays(r, with_first(lambda a: a.astype(np.complex64))),
        "has dtype complex64",
    ),
    "fields": (
        lambda r: changed_arrays(r, with_first(lambda a: a.astype([("x", "<f4")]))),
        "has dtype [('x', '<f4')]",
    ),
    "no axes": (
        lambda r: changed_arrays(r, with_first(lambda a: np.array(a[0, 0]))),
        "shape ()",
    ),
    "a header that promises more than there is": (
        lambda r: with_header(r, "(1000000000000, 3)"),
        "shape (1000000000000, 3); send",
    ),
    "a header of objects": (lambda r: with_header(r, "(8, 3)", "|O"), "has dtype object"),
    "whole numbers boxed in NaN": (
        lambda r: changed_arrays(
            r, with_first(lambda a: np.full(a.shape, 0x7FC01234, np.uint32).view(np.float32))
        ),
        "NaN or infinity",
    ),
    "an array with an endless name": (
        lambda r: changed_arrays(r, lambda a: {**a, "x" * 10**6: np.zeros(2, np.float32)}),
        "unknown ['xxx",
    ),
}  # fmt: skip


def replace_replies(make_content):
    """Let one node's trainings end in other contents."""

    def on_reply(message, reply):
        is_bad = message.metadata.dst_node_id == BAD and message.metadata.message_type == "train"
        if not is_bad:
            return reply
        if make_content is None:  # the model as it was sent
            content = RecordDict(
                {"arrays": message.content["arrays"], "metrics": reply.content["metrics"]}
            )
        else:
            content = make_content(reply)
        return Message(content, reply_to=message)

    return on_reply


KEPT, FOLDED = {}, {"sketch": 16, "keep_updates": False}


@pytest.fixture(scope="module", params=[KEPT, FOLDED], ids=["kept", "folded"])
def settings(request):
    return request.param


@pytest.fixture(scope="module")
def without_the_client(settings):
    """The federation in which the client takes part in the evaluation only."""
    return start(
        make_grid(
            on_reply=lambda message, reply: (
                None
                if message.metadata.dst_node_id == BAD and message.metadata.message_type == "train"
                else reply
            )
        ),
        num_rounds=NUM_ROUNDS,
        timeout=0.05,
        **settings,
    )


@pytest.mark.parametrize("name", BAD_CONTENTS)
def test_a_bad_reply_is_refused_alone_with_its_reason(name, without_the_client, settings):
    make_content, reason = BAD_CONTENTS[name]
    grid = make_grid(on_reply=replace_replies(make_content))

    result = start(grid, num_rounds=NUM_ROUNDS, **settings)

    for entry in result.history:
        assert list(entry.record.refused) == ["partition-0001"]
        assert reason in entry.record.refused["partition-0001"]
        assert len(entry.record.refused["partition-0001"]) <= 300
        assert len(entry.record.metrics) == 5
    # The others went on as if it had not answered.
    for leaf in result.tree.leaves:
        np.testing.assert_array_equal(leaf.params, without_the_client.tree[leaf.id].params)


def test_an_error_is_refused_with_what_the_client_said(settings):
    def on_reply(message, reply):
        if message.metadata.dst_node_id != BAD:
            return reply
        return Message(Error(code=2, reason="CUDA out of memory\n" + "x" * 9999), reply_to=message)

    result = start(make_grid(on_reply=on_reply), num_rounds=NUM_ROUNDS, **settings)

    reason = result.history[-1].record.refused["partition-0001"]
    assert reason.startswith("the client failed (error 2): CUDA out of memory xxx")
    assert len(reason) == 300
    assert "partition-0001" not in result.history[-1].evaluation


def test_a_client_app_that_raises_is_refused():
    clients = make_clients()
    grid = make_grid(clients)
    del clients["partition-0001"]  # the app looks it up when it trains

    result = start(grid, num_rounds=NUM_ROUNDS)

    assert "KeyError" in result.history[0].record.refused["partition-0001"]
    assert "partition-0001" in result.assignments


def test_a_bad_evaluation_and_its_reason_stand_in_the_history():
    def on_reply(message, reply):
        is_bad = message.metadata.dst_node_id == BAD and message.metadata.message_type == "evaluate"
        return (
            Message(Error(code=2, reason="no\n\x1b[2Jmemory"), reply_to=message)
            if is_bad
            else reply
        )

    result = start(make_grid(on_reply=on_reply), num_rounds=1)

    assert result.history[0].record.refused == {
        "partition-0001": "evaluation: the client failed (error 2): no ?[2Jmemory"
    }
    assert "partition-0001" in result.history[0].record.metrics  # its training was used
