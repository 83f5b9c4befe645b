"""One bad reply among good ones: refused with its reason, and as if that client were absent."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from fakes import DIM, QuadraticClients, fingerprint
from fedbranch import NeverSplit, Server, Thresholds, Update, UpdateBatch
from fedbranch.errors import InvalidUpdate
from fedbranch.protocol.plain_text import one_line, shortened
from fedbranch.server.replies.checks import Expected, check_batch, check_losses, check_update
from fedbranch.server.replies.reply import stacked

GOOD = np.ones(DIM, dtype=np.float32)


def with_entry(value):
    vector = GOOD.copy()
    vector[3] = value
    return vector


class Trap:
    """Something that calls itself an array and is none."""

    def __array__(self, *args, **kwargs):
        raise KeyError("trap")


class Silent(Exception):
    """An error that cannot even be shown."""

    def __repr__(self):
        raise KeyError("silence")


class Unshowable:
    """Calls itself an array, and fails with an error that cannot be shown."""

    def __array__(self, *args, **kwargs):
        raise Silent


class Liar(Fraction):
    """Calls itself a number and has no value."""

    def __float__(self):
        raise ZeroDivisionError


class Endless(Mapping):
    """Metrics without end."""

    def __getitem__(self, name):
        return 1.0

    def __iter__(self):
        return map(str, itertools.count())

    def __len__(self):
        return 1


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
    """Run a federation in which c04 either stays silent or sends what it is given."""
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


def test_an_id_that_only_looks_like_a_clients_does_that_client_no_harm():
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


# Many replies as one batch


def as_batch(updates, convert):
    """Put single updates on top of each other, in the opposite order."""
    ids = sorted(updates, reverse=True)
    return UpdateBatch(
        client_ids=ids,
        vectors=convert(np.stack([updates[i].vector for i in ids])),
        num_examples=[updates[i].num_examples for i in ids],
        metrics=[updates[i].metrics for i in ids],
        bases=[updates[i].base for i in ids],
    )


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_a_batch_is_worth_the_same_as_its_updates_one_by_one(convert):
    rule = Thresholds(eps_mean=0.5, eps_max=0.5, gamma_max=0.3)
    servers = [Server(DIM, rule=rule) for _ in range(2)]
    clients = QuadraticClients(2, 6)

    for _ in range(12):
        records = []
        for server, form in zip(servers, [dict, lambda u: as_batch(u, convert)], strict=True):
            tasks = server.plan(clients.client_ids)
            updates = {i: clients.update(i, task) for i, task in tasks.items()}
            records.append(server.step(form(updates)))
        ours, theirs = (record.to_json() for record in records)
        for decision, expected in zip(ours["decisions"], theirs["decisions"], strict=True):
            assert decision["verdict"] == expected["verdict"]
            assert decision["measurements"] == pytest.approx(expected["measurements"], abs=1e-6)

    assert servers[0].clusters == servers[1].clusters
    assert len(servers[0].clusters) > 1
    for leaf, other in zip(servers[0].tree.leaves, servers[1].tree.leaves, strict=True):
        np.testing.assert_allclose(leaf.params, other.params, atol=1e-6)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [(np.nan, "NaN or infinity"), (np.inf, "NaN or infinity"), (1e35, "beyond"), (0.0, "zero")],
)
def test_a_bad_row_of_a_batch_is_refused_alone(entry, reason):
    server = Server(DIM, rule=NeverSplit())
    tasks = server.plan(["a", "b", "c"])
    matrix = np.ones((3, DIM), dtype=np.float32)
    matrix[1] = entry if entry == 0 else with_entry(entry)

    record = server.step(
        UpdateBatch(
            client_ids=["a", "b", "c"], vectors=matrix, num_examples=[1, 1, -1], metrics=[{}] * 3,
            bases=[tasks[i].base for i in "abc"],
        )
    )  # fmt: skip

    assert reason in record.refused["b"]
    assert "num_examples is -1" in record.refused["c"]
    assert sorted(record.metrics) == ["a"]
    assert server.tree.root.params.tolist() == [1.0] * DIM


def test_a_batch_from_another_round_or_of_strangers_is_refused():
    server = Server(DIM, rule=NeverSplit())
    old = server.plan(["a"])["a"].base
    server.step({"a": Update(GOOD, 1)})
    server.plan(["a"])

    record = server.step(
        UpdateBatch(
            client_ids=["a", "x"], vectors=np.ones((2, DIM), np.float32), num_examples=[1, 1],
            metrics=[{}] * 2, bases=[old, old],
        )
    )  # fmt: skip

    assert "computed at other parameters" in record.refused["a"]
    assert "unknown client" in record.refused["x"]


def test_a_batch_that_does_not_fit_the_model_is_the_callers_mistake():
    expected = Expected(num_params=DIM, num_buffers=0, compares_signal=False, max_examples=10)

    def batch(**columns):
        return UpdateBatch(**{
            "client_ids": ["a", "b"], "vectors": np.ones((2, DIM), np.float32),
            "num_examples": [1, 1], "bases": ["", ""], "metrics": [{}, {}], **columns,
        })  # fmt: skip

    with pytest.raises(ValueError, match="metrics has 1 rows for 2 clients"):
        batch(metrics=[{}])
    with pytest.raises(ValueError, match="named more than once"):
        batch(client_ids=["a", "a"])
    with pytest.raises(ValueError, match=r"shape \(2, 3\).*send \(2, 20\) in float32"):
        check_batch(batch(vectors=np.ones((2, 3), np.float32)), expected)
    with pytest.raises(ValueError, match="float64"):
        check_batch(batch(vectors=np.ones((2, DIM))), expected)
    with pytest.raises(ValueError, match="no signals"):
        check_batch(batch(), replace(expected, compares_signal=True))


def test_replies_of_several_rounds_go_to_where_the_last_one_is():
    expected = Expected(num_params=2, num_buffers=0, compares_signal=False, max_examples=10)

    def replies(matrix):
        ids = [str(i) for i in range(len(matrix))]
        batch = UpdateBatch(
            client_ids=ids, vectors=matrix, num_examples=[1] * len(ids), bases=ids,
            metrics=[{}] * len(ids),
        )  # fmt: skip
        usable, _ = check_batch(batch, expected)
        return [reply for _, reply in usable.values()]

    first = replies(np.float32([[1, 2], [3, 4]]))
    second = replies(torch.tensor([[5.0, 6.0]]))

    assert isinstance(stacked([*first, *second], "update"), torch.Tensor)
    together = stacked([*second, *first], "update")
    assert isinstance(together, np.ndarray)
    assert together.tolist() == [[5, 6], [1, 2], [3, 4]]
    assert stacked(first, "update") is first[0].rows.update  # not a copy
    assert stacked(first[::-1], "update").tolist() == [[3, 4], [1, 2]]


def test_rows_that_a_driver_refused_are_not_looked_at():
    server = Server(2, rule=NeverSplit())
    tasks = server.plan(["a", "b", "c"])
    batch = UpdateBatch(
        client_ids=["a", "b"],
        vectors=np.float32([[1, 2], [np.nan, 0]]),
        num_examples=[1, 0],
        bases=[tasks["a"].base, ""],
        metrics=[{}, {}],
        refused={"b": "cannot be read", "stranger": "two keys"},
    )

    record = server.step(batch)

    assert record.refused == {"b": "cannot be read", "stranger": "two keys"}
    assert list(record.metrics) == ["a"]
    assert server.tree.root.params.tolist() == [1, 2]


def test_neighbouring_rows_are_not_copied():
    expected = Expected(num_params=1, num_buffers=0, compares_signal=False, max_examples=10)
    matrix = np.float32([[1], [2], [3], [4]])
    batch = UpdateBatch(
        client_ids=list("abcd"),
        vectors=matrix,
        num_examples=[1] * 4,
        bases=[""] * 4,
        metrics=[{}] * 4,
    )
    replies = [reply for _, reply in check_batch(batch, expected)[0].values()]

    assert np.shares_memory(stacked(replies[1:3], "update"), matrix)
    assert stacked(replies[1:3], "update").tolist() == [[2], [3]]
    assert stacked([replies[0], replies[2]], "update").tolist() == [[1], [3]]
    assert stacked([replies[2], replies[1]], "update").tolist() == [[3], [2]]


def compared(reply):
    return reply.rows.compared[reply.row].tolist()


def test_a_signal_may_have_a_length_of_its_own():
    expected = Expected(
        num_params=4, num_buffers=0, compares_signal=True, max_examples=10, num_signal=2
    )
    vector, short = np.ones(4, np.float32), np.float32([3, 4])
    good = Update(vector, 1, signal=short, half_difference=short)

    reply = check_update(good, expected)

    assert reply.has_half
    assert reply.rows.compared.tolist() == [[3, 4]]
    with pytest.raises(InvalidUpdate, match=r"the signal has shape \(4,\); send shape \(2,\)"):
        check_update(replace(good, signal=vector), expected)
    with pytest.raises(InvalidUpdate, match=r"the half difference has shape \(4,\); send shape"):
        check_update(replace(good, half_difference=vector), expected)
    with pytest.raises(InvalidUpdate, match=r"the update has shape \(2,\); send shape \(4,\)"):
        check_update(replace(good, vector=short), expected)


def test_a_batch_of_short_signals_says_the_same_as_one_by_one():
    expected = Expected(
        num_params=4, num_buffers=0, compares_signal=True, max_examples=10, num_signal=2
    )
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(3, 4)).astype(np.float32)
    short = rng.normal(size=(3, 2)).astype(np.float32)
    short[1] = 0
    batch = UpdateBatch(
        client_ids=["a", "b", "c"], vectors=vectors, num_examples=[1, 1, 1], bases=["x"] * 3,
        metrics=[{}] * 3, signals=short, half_differences=short,
    )  # fmt: skip

    usable, refused = check_batch(batch, expected)

    assert list(usable) == ["a", "c"]
    assert refused == {"b": "the signal is zero: the client did not train"}
    for row, client_id in ((0, "a"), (2, "c")):
        alone = check_update(
            Update(vectors[row], 1, signal=short[row], half_difference=short[row]), expected
        )
        together = usable[client_id][1]
        assert compared(together) == compared(alone)
        assert together.has_half == alone.has_half
    with pytest.raises(ValueError, match=r"signal column has shape \(3, 4\).*send \(3, 2\)"):
        check_batch(replace(batch, signals=vectors), expected)


def test_a_row_whose_numbers_fail_is_refused_alone():
    server = Server(1, rule=NeverSplit())
    tasks = server.plan(["a", "b"])

    class Failing(dict):
        def items(self):
            raise KeyError("trap")

    record = server.step(
        UpdateBatch(
            client_ids=["a", "b"], vectors=np.float32([[2], [9]]), num_examples=[1, 1],
            metrics=[{}, Failing()], bases=[tasks[i].base for i in "ab"],
        )
    )  # fmt: skip

    assert record.refused == {"b": "the reply cannot be read: KeyError('trap')"}
    assert server.tree.root.params.tolist() == [2]


def test_a_mask_hides_nothing_in_a_batch():
    server = Server(1, rule=NeverSplit())
    tasks = server.plan(["a", "b"])

    record = server.step(
        UpdateBatch(
            client_ids=["a", "b"], vectors=np.ma.masked_invalid(np.float32([[2], [np.nan]])),
            num_examples=[1, 1], metrics=[{}, {}], bases=[tasks[i].base for i in "ab"],
        )
    )  # fmt: skip

    assert "NaN or infinity" in record.refused["b"]


@pytest.mark.parametrize(
    "losses", ["12", [1.0], [1.0, "2"], [1.0, None], [True, 1.0], np.zeros((2, 2)), np.zeros(10**6),
               np.float32(1), {0: 1.0, 1: 2.0}, None, iter([1.0, 2.0]), [1.0, Liar()]]
)  # fmt: skip
def test_losses_that_are_none_are_refused(losses):
    with pytest.raises(InvalidUpdate, match=r"the losses are .*; send 2 numbers") as caught:
        check_losses(losses, 2)

    assert len(str(caught.value)) < 200


def test_what_is_shown_of_a_stranger_is_short_and_the_same_every_time():
    assert shortened([0.5] * 10**6) == "[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, ...]"
    assert shortened(object()) == shortened(object()) == "<object object>"
    assert len(one_line("x" * 10**6)) == 300


@pytest.mark.parametrize(
    ("client_id", "problem"),
    [
        ("a ", "begins or ends with a blank"),
        ("\ta", "cannot be seen"),
        ("a\u200b", "cannot be seen"),
        ("a\x1b[2J", "cannot be seen"),
        ("x" * 1001, "has 1001 characters; use at most 1000"),
    ],
)
def test_an_id_that_looks_like_another_is_named(client_id, problem):
    with pytest.raises(ValueError, match=problem):
        Server(1, rule=NeverSplit()).plan(["a", client_id])
