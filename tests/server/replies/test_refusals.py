"""One bad reply among good ones is refused with its reason, as if its client were absent."""

import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from fakes import DIM, QuadraticClients, fingerprint
from fedbranch import NeverSplit, Server, Thresholds, Update
from server.replies.bad_values import Endless, Liar, Nameless, Trap, Unshowable

GOOD = np.ones(DIM, dtype=np.float32)


def with_entry(value):
    vector = GOOD.copy()
    vector[3] = value
    return vector


BAD = {
    "NaN": (Update(with_entry(np.nan), 10), "NaN or infinity"),
    "infinity": (Update(with_entry(-np.inf), 10), "NaN or infinity"),
    "absurd entry": (Update(with_entry(1e35), 10), "beyond 1e\\+30"),
    "float64 beyond float32": (Update(GOOD.astype(float) * 1e300, 10), "NaN or infinity"),
    "float64 below float32": (Update(GOOD.astype(float) * 1e-300, 10), "did not train"),
    "masked NaN": (Update(np.ma.masked_invalid(with_entry(np.nan)), 10), "NaN or infinity"),
    "fails when read": (Update(Trap(), 10), "not an array: KeyError"),
    "too short": (Update(GOOD[:-1], 10), r"shape \(19,\); send shape \(20,\)"),
    "too many axes": (Update(GOOD[None, :], 10), r"shape \(1, 20\)"),
    "empty": (Update(GOOD[:0], 10), r"shape \(0,\)"),
    "zero": (Update(GOOD * 0, 10), "did not train"),
    "whole numbers": (Update(np.ones(DIM, dtype=np.int64), 10), "dtype int64"),
    "complex": (Update(GOOD.astype(complex), 10), "dtype complex128"),
    "objects": (Update(np.array([None] * DIM), 10), "dtype object"),
    "text": (Update("hello", 10), "dtype <U5"),
    "ragged": (Update([[1.0], [1.0, 2.0]], 10), "not an array"),
    "nothing": (Update(None, 10), "dtype object"),
    "subnormal": (Update(GOOD * np.float32(1e-40), 10), "no entry beyond 1.2e-38"),
    "no axes": (Update(np.float32(1), 10), r"shape \(\); send shape"),
    "fields": (Update(np.zeros(DIM, [("x", "f4")]), 10), r"dtype \[\('x', '<f4'\)\]"),
    "many fields": (
        Update(np.zeros(1, [(f"x{i}", "f4") for i in range(999)]), 10),
        r"\.\.\.; send",
    ),
    "time": (Update(np.zeros(DIM, "M8[s]"), 10), r"dtype datetime64\[s\]"),
    "NaN-boxed": (Update(np.full(DIM, 0x7FC01234, np.uint32).view("f4"), 10), "NaN or infinity"),
    "fails when shown": (Update(Unshowable(), 10), "not an array: <Silent instance>"),
    "weight -0": (Update(GOOD, -0.0), "num_examples is -0.0"),
    "weight decimal": (Update(GOOD, Decimal(3)), r"num_examples is Decimal\('3'\)"),
    "weight that is no number": (Update(GOOD, Liar()), "num_examples is"),
    "metrics without end": (Update(GOOD, 10, metrics=Endless()), "more than 1000 metrics"),
    "metric's name without end": (Update(GOOD, 10, metrics={"x" * 10**6: 1.0}), "at most 100 char"),
    "metric's name surrogate": (Update(GOOD, 10, metrics={"\ud83d": 1.0}), "all of them printable"),
    "metric is a list": (Update(GOOD, 10, metrics={"x": [1.0] * 10**5}), r"'x' is \[1.0.*\.\.\."),
    "weight 0": (Update(GOOD, 0), "num_examples is 0"),
    "weight -1": (Update(GOOD, -1), "num_examples is -1"),
    "weight NaN": (Update(GOOD, float("nan")), "num_examples is nan"),
    "weight infinite": (Update(GOOD, float("inf")), "num_examples is inf"),
    "weight huge": (Update(GOOD, 1e30), "num_examples is 1e\\+30"),
    "weight with 5000 digits": (Update(GOOD, 10**5000), "cannot be shown"),
    "weight that rounds to 0": (Update(GOOD, Fraction(1, 10**400)), "num_examples is"),
    "weight text": (Update(GOOD, "10"), "num_examples is '10'"),
    "weight missing": (Update(GOOD, None), "num_examples is None"),
    "weight boolean": (Update(GOOD, True), "num_examples is True"),
    "metrics text": (Update(GOOD, 10, metrics={"loss": "low"}), "the metric 'loss' is 'low'"),
    "metrics without name": (Update(GOOD, 10, metrics={3: 1.0}), "the metric 3 is 1.0"),
    "base of another kind": (Update(GOOD, 10, base=np.array(["0.0", "x"])), "other parameters"),
    "metrics missing": (Update(GOOD, 10, metrics=None), "metrics are None"),
    "unasked buffers": (Update(GOOD, 10, buffers=np.ones(3, dtype=np.float32)), "buffers"),
    "other base": (Update(GOOD, 10, base="0.999"), "other parameters"),
    "another node's base": (Update(GOOD, 10, base="7.0"), "other parameters"),
    "not an update": ({"vector": GOOD}, "the reply is a dict"),
    "no reply at all": (None, "the reply is a NoneType"),
}


def play(extra_replies, rounds=25):
    """Run a federation in which c04 is silent, but for the extra replies."""
    clients = QuadraticClients(num_groups=2, clients_per_group=4)
    # c04 never gives a usable reply, so the others must be enough for a decision.
    rule = Thresholds(eps_mean=0.5, eps_max=1.0, gamma_max=0.5, coverage=0.8)
    server = Server(DIM, rule=rule)
    records = []
    for _ in range(rounds):
        tasks = server.plan(clients.client_ids)
        replies = [(i, clients.update(i, task)) for i, task in tasks.items() if i != "c04"]
        records.append(server.step([*replies, *extra_replies]))
    return server, records


@pytest.fixture(scope="module")
def undisturbed():
    server, records = play([])
    assert len(server.clusters) == 2
    assert not any(record.refused for record in records)
    return fingerprint(server)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reply_is_refused_and_the_rest_is_as_if_its_client_were_absent(name, undisturbed):
    reply, reason = BAD[name]

    server, records = play([("c04", reply)])

    for record in records:
        assert set(record.refused) == {"c04"}
    assert re.search(reason, records[0].refused["c04"])
    assert fingerprint(server) == undisturbed


def test_a_client_that_answers_twice_is_not_used_at_all(undisturbed):
    replies = [("c04", Update(GOOD, 10)), ("c04", Update(2 * GOOD, 10))]

    server, records = play(replies)

    assert "answered 2 times" in records[0].refused["c04"]
    assert fingerprint(server) == undisturbed


@pytest.mark.parametrize("client_id", ["stranger", 17, None])
def test_an_unknown_client_is_refused(client_id, undisturbed):
    server, records = play([(client_id, Update(GOOD, 10))])

    assert "unknown client" in records[0].refused[str(client_id)]
    assert fingerprint(server) == undisturbed


def test_an_id_that_only_looks_like_that_of_a_client_does_it_no_harm():
    server = Server(1, rule=NeverSplit())
    server.plan(["1"])

    record = server.step([("1", Update(np.float32([2]), 1)), (1, Update(np.float32([9]), 1))])

    assert "its id is a int" in record.refused["1"]
    assert server.tree.root.params.tolist() == [2]


def test_a_metric_beyond_floats_is_unknown():
    server = Server(1, rule=NeverSplit())
    server.plan(["a"])

    record = server.step({"a": Update(np.float32([2]), 1, metrics={"n": 10**400})})

    assert record.metrics == {"a": {"n": None}}


def test_a_zero_signal_is_refused():
    server = Server(1, rule=NeverSplit(), compare="signal")
    server.plan(["a"])

    record = server.step({"a": Update(np.float32([2]), 1, signal=np.float32([0]))})

    assert "the signal is zero" in record.refused["a"]


def test_a_client_that_was_not_asked_is_refused():
    server = Server(DIM, rule=Thresholds(eps_mean=1, eps_max=1, gamma_max=0.5))
    server.plan(["a"])
    server.step({"a": Update(GOOD, 10)})

    record = server.step({"a": Update(GOOD, 10)})

    assert "no task was planned" in record.refused["a"]


def test_an_old_reply_is_refused():
    server = Server(DIM, rule=Thresholds(eps_mean=1, eps_max=1, gamma_max=0.5))
    old = server.plan(["a", "b"])["b"].base
    server.step({"a": Update(GOOD, 10)})
    server.plan(["a", "b"])

    record = server.step({"b": Update(GOOD, 10, base=old)})

    assert re.fullmatch(
        r"computed at other parameters \('0\.0-\w+'\) than the client's position has now "
        r"\('0\.1-\w+'\)",
        record.refused["b"],
    )


@pytest.mark.parametrize("empty", [{}, []])
def test_an_empty_round_changes_nothing_but_the_count(empty):
    server = Server(DIM, rule=Thresholds(eps_mean=1, eps_max=1, gamma_max=0.5))
    server.plan([])

    record = server.step(empty)

    assert (record.round, server.round) == (1, 1)
    assert record.decisions == ()
    assert not server.tree.root.params.any()


def test_a_round_of_bad_replies_only_changes_nothing():
    server = Server(DIM, rule=Thresholds(eps_mean=1, eps_max=1, gamma_max=0.5))
    server.plan(["a", "b"])

    record = server.step({"a": Update(with_entry(np.nan), 1), "b": Update(GOOD, 0)})

    assert set(record.refused) == {"a", "b"}
    assert record.decisions == ()


@pytest.mark.parametrize(
    "vector",
    [
        torch.ones(DIM),
        torch.ones(DIM, requires_grad=True),
        torch.ones(DIM, dtype=torch.float64),
        np.ones(DIM, dtype=np.float16),
    ],
)
def test_floating_vectors_of_any_library_and_precision_are_welcome(vector):
    server = Server(DIM, rule=Thresholds(eps_mean=1, eps_max=1, gamma_max=0.5))
    server.plan(["a"])

    record = server.step({"a": Update(vector, np.int32(3), metrics={"loss": np.float32(0.5)})})

    assert not record.refused
    assert server.tree.root.params.dtype == np.float32
    assert server.tree.root.params.tolist() == [1] * DIM


def test_a_missing_signal_or_buffer_is_named():
    server = Server(DIM, num_buffers=2, rule=Thresholds(eps_mean=1, eps_max=1, gamma_max=0.5))
    server.plan(["a"])
    assert server.step({"a": Update(GOOD, 1)}).refused == {"a": "the reply lacks the 2 buffers"}

    server = Server(DIM, compare="signal", rule=Thresholds(eps_mean=1, eps_max=1, gamma_max=0.5))
    server.plan(["a"])
    assert "no signal" in server.step({"a": Update(GOOD, 1)}).refused["a"]


def test_metrics_that_are_not_finite_are_kept_as_unknown():
    server = Server(DIM, rule=Thresholds(eps_mean=1, eps_max=1, gamma_max=0.5))
    server.plan(["a"])

    record = server.step({"a": Update(GOOD, 1, metrics={"auc": float("nan"), "loss": 1})})

    assert record.metrics == {"a": {"auc": None, "loss": 1.0}}


def test_an_id_that_cannot_be_shown_is_refused_like_any_other():
    server = Server(1)
    server.plan(["a"])

    record = server.step(
        [(Nameless(), Update(np.float32([1]), 1)), ("a", Update(np.float32([1]), 1))]
    )

    assert list(record.refused) == ["<Nameless instance>"]


def test_a_base_of_a_megabyte_is_refused_in_a_few_words():
    server = Server(1)
    server.plan(["a"])

    record = server.step({"a": Update(np.float32([1]), 1, base="x" * 1_000_000)})

    assert len(record.refused["a"]) < 300
