"""One bad client among ten: each of its replies is refused, and the others are not affected."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from rich.console import Console

import fedbranch as fb
from fakes import QuadraticClients
from fedbranch.flower.testing import FakeGrid
from fedbranch.report.facts.run import read_run
from fedbranch.report.text.terminal import print_run
from fedbranch.runs import RunFolder
from reliability.quadratic_app import RULE, client_id, make_app, make_nodes, start

NUM_CLIENTS, NUM_ROUNDS = 10, 20
BAD = "c09"


def others_of(tree, bad):
    """Return all that the server knows of the other clients: parameters, positions and updates."""
    return (
        {node.id: (node.parent_id, node.params.tobytes(), node.buffers.tobytes()) for node in tree},
        {i: tree.position(i) for i in tree.client_ids if i != bad},
        {
            (node.id, i): update.tobytes()
            for node in tree
            for i, update in node.cached_updates.items()
        },
    )


# To the server itself: a kind of bad reply -> how to spoil a good one, and the reason

KINDS = {
    "NaN": (lambda u: replace(u, vector=u.vector * np.nan), "NaN or infinity"),
    "absurd entries": (lambda u: replace(u, vector=u.vector + 1e35), "beyond 1e+30"),
    "zero": (lambda u: replace(u, vector=u.vector * 0), "is zero: the client did not train"),
    "another shape": (lambda u: replace(u, vector=u.vector[:-1]), "send shape (20,)"),
    "another dtype": (lambda u: replace(u, vector=u.vector.astype("i8")), "has dtype int64"),
    "objects": (lambda u: replace(u, vector=np.array([None] * 20)), "has dtype object"),
    "negative weight": (lambda u: replace(u, num_examples=-1), "num_examples is -1"),
    "absurd weight": (lambda u: replace(u, num_examples=1e300), "num_examples is 1e+300"),
    "a word for a metric": (lambda u: replace(u, metrics={"loss": "low"}), "'loss' is 'low'"),
    "a flood of metrics": (
        lambda u: replace(u, metrics={str(i): 1.0 for i in range(5000)}),
        "more than 1000 metrics",
    ),
    "older parameters": (lambda u: replace(u, base="0.0-of-old"), "computed at other parameters"),
    "no update": (lambda u: None, "the reply is a NoneType"),
}


def play(spoil=None, *, with_bad=True):
    """Run a federation in which one client's replies are spoiled."""
    clients = QuadraticClients(num_groups=2, clients_per_group=5)
    server = fb.Server(20, rule=RULE)
    records = []
    for _ in range(NUM_ROUNDS):
        tasks = server.plan([i for i in clients.client_ids if with_bad or i != BAD])
        replies = {i: clients.update(i, task) for i, task in tasks.items()}
        if with_bad and BAD in replies:
            replies[BAD] = spoil(replies[BAD])
        records.append(server.step(replies))
    return server, records


@pytest.fixture(scope="module")
def without_the_bad_one():
    server, records = play(with_bad=False)
    assert [len(ids) for ids in server.clusters.values()] == [5, 4]
    assert not any(record.refused for record in records)
    return others_of(server.tree, BAD)


@pytest.mark.parametrize("kind", KINDS)
def test_the_others_end_as_without_the_bad_client(kind, without_the_bad_one):
    spoil, reason = KINDS[kind]

    server, records = play(spoil)

    assert all(set(record.refused) == {BAD} for record in records)
    assert all(reason in record.refused[BAD] for record in records)
    assert others_of(server.tree, BAD) == without_the_bad_one


# Over Flower

BAD_PARTITION = NUM_CLIENTS - 1


def with_theta(reply, array):
    arrays = ArrayRecord({"theta": Array(array)})
    return RecordDict({"arrays": arrays, "metrics": reply.content["metrics"]})


def theta_of(reply):
    return reply.content["arrays"]["theta"].numpy()


def with_metrics(reply, metrics):
    return RecordDict({"arrays": reply.content["arrays"], "metrics": MetricRecord(metrics)})


FLOWER_KINDS = {
    "NaN": (lambda r: with_theta(r, theta_of(r) * np.nan), "NaN or infinity"),
    "infinity": (lambda r: with_theta(r, theta_of(r) + np.inf), "NaN or infinity"),
    "absurd entries": (lambda r: with_theta(r, theta_of(r) + 1e35), "beyond 1e+30"),
    "an error": (lambda r: Error(code=2, reason="out of memory"), "the client failed (error 2)"),
    "another shape": (lambda r: with_theta(r, theta_of(r)[:-1]), "send float32 and (20,)"),
    "another dtype": (lambda r: with_theta(r, theta_of(r).astype(">f4")), "has dtype >f4"),
    "another name": (
        lambda r: RecordDict({**r.content, "arrays": ArrayRecord({"x": Array(theta_of(r))})}),
        "missing ['theta'], unknown ['x']",
    ),
    "no model": (lambda r: RecordDict({"m": r.content["metrics"]}), "0 array records"),
    "negative weight": (lambda r: with_metrics(r, {"num-examples": -1}), "is -1; it must be"),
    "NaN for a weight": (lambda r: with_metrics(r, {"num-examples": math.nan}), "is nan; it must"),
    "a flood of metrics": (
        lambda r: with_metrics(r, {"num-examples": 3, **{f"m{i}": 1.0 for i in range(5000)}}),
        "5,001 metrics; the limit is 1,000",
    ),
    "a flood of arrays": (
        lambda r: RecordDict({**r.content, "more": ArrayRecord({"x": Array(np.zeros(2**20))})}),
        "bytes; the limit is",
    ),
}


def play_over_flower(spoil=None, *, num_clients=NUM_CLIENTS, **settings):
    bad_node = make_nodes(NUM_CLIENTS)[BAD_PARTITION].node_id

    def on_reply(message, reply):
        is_bad = message.metadata.dst_node_id == bad_node
        if not is_bad or message.metadata.message_type != "train":
            return reply
        return Message(spoil(reply), reply_to=message)

    grid = FakeGrid(make_app(2), make_nodes(NUM_CLIENTS)[:num_clients], on_reply=on_reply)
    return start(grid, num_rounds=NUM_ROUNDS, **settings)


def assert_alone(result, reason, expected):
    bad = client_id(BAD_PARTITION)
    for entry in result.history:
        assert set(entry.record.refused) == {bad}
        assert reason in entry.record.refused[bad]
    assert others_of(result.tree, bad) == others_of(expected.tree, bad)


@pytest.mark.reliability
def test_twelve_kinds_of_bad_reply_are_refused_and_leave_no_trace(without_the_bad_one, measured):
    for spoil, reason in KINDS.values():
        server, records = play(spoil)
        assert all(reason in record.refused[BAD] for record in records)
        assert others_of(server.tree, BAD) == without_the_bad_one
    expected = play_over_flower(num_clients=NUM_CLIENTS - 1)
    assert sorted(map(len, expected.clusters.values())) == [4, 5]
    for spoil, reason in FLOWER_KINDS.values():
        assert_alone(play_over_flower(spoil), reason, expected)
    measured(
        "bad-replies",
        f"{len(KINDS)} of {len(KINDS)} kinds refused with their reason by the server and "
        f"{len(FLOWER_KINDS)} of {len(FLOWER_KINDS)} over Flower, in each of {NUM_ROUNDS} rounds "
        "with a split; parameters, cached updates and assignments of the others have the bytes "
        "of a run without that client",
    )


def test_over_flower_a_bad_reply_leaves_no_trace():
    spoil, reason = FLOWER_KINDS["a flood of arrays"]

    result = play_over_flower(spoil)

    assert_alone(result, reason, play_over_flower(num_clients=NUM_CLIENTS - 1))


# Counted and shown


def test_what_was_refused_is_counted_and_shown_with_its_reasons(tmp_path):
    play_over_flower(FLOWER_KINDS["negative weight"][0], checkpoint_dir=tmp_path)
    console = Console(file=io.StringIO(), width=200)

    print_run(read_run(RunFolder(tmp_path)), console)

    shown = console.file.getvalue()
    assert f"Refused {NUM_ROUNDS} replies of 1 client: partition-0009 ({NUM_ROUNDS})" in shown
    assert f"{NUM_ROUNDS} x 'num-examples' is -1; it must be a number from 1e-09" in shown


def test_reasons_that_differ_in_a_number_only_are_shown_as_one(tmp_path):
    seen = iter(range(1, 1000))

    def spoil(reply):
        return with_metrics(reply, {"num-examples": -next(seen)})

    play_over_flower(spoil, checkpoint_dir=tmp_path)
    console = Console(file=io.StringIO(), width=200)

    print_run(read_run(RunFolder(tmp_path)), console)

    assert f"{NUM_ROUNDS} x 'num-examples' is -1;" in console.file.getvalue()
