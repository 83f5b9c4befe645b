"""Fuzzed replies and settings are refused with our own errors and do no harm."""

import json
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fedbranch as fb
from fakes import fingerprint
from fedbranch.errors import FedbranchError, InvalidUpdate
from fedbranch.flower import ClusteredStrategy
from fedbranch.flower.arrays import Layout
from fedbranch.flower.asking import ask_to_train
from fedbranch.flower.federation import Federation, Keys
from fedbranch.flower.receiving import receive_metrics, receive_updates
from fedbranch.flower.testing import FakeGrid
from fedbranch.server.replies.checks import check_losses
from reliability.quadratic_app import initial_arrays, make_app, make_nodes

DIM = 4
GOOD = np.float32([1, -2, 3, -4])
OWN = (FedbranchError, ValueError, TypeError)
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=20)

numbers = st.one_of(
    st.integers(),
    st.floats(width=64),
    st.just(10**400),
    st.just(5e-324),
    st.just(-0.0),
    st.booleans(),
    st.decimals(),
    st.fractions(),
    st.complex_numbers(),
    st.sampled_from([np.float16(2), np.int8(-3), np.float64("nan"), Decimal(3), Fraction(1, 3)]),
)
dtypes = st.one_of(
    hnp.scalar_dtypes(),
    hnp.byte_string_dtypes(max_len=9),
    hnp.unicode_string_dtypes(max_len=9),
    st.just(np.dtype("O")),
    st.just(np.dtype([("x", "<f4")])),
)
shapes = st.one_of(
    st.just((DIM,)), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
)
arrays = st.one_of(
    hnp.arrays(np.float32, DIM, elements=st.floats(width=32)),
    st.builds(np.zeros, shapes, dtypes),
    hnp.arrays(st.sampled_from([">f4", "f8", "f2", "i4", "c8", "?"]), shapes),
    st.builds(lambda a: np.ma.masked_invalid(a), hnp.arrays(np.float32, DIM)),
    st.builds(lambda n: np.broadcast_to(np.float32(1), (n,)), st.integers(0, 10**12)),
)
anything = st.recursive(
    st.one_of(st.none(), numbers, ANY_TEXT, st.binary(max_size=20), arrays, st.just(object())),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(ANY_TEXT, inner, max_size=4),
    ),
    max_leaves=6,
)
metrics = st.one_of(
    st.dictionaries(st.one_of(ANY_TEXT, st.integers()), st.one_of(numbers, anything), max_size=4),
    anything,
)
vectors = st.one_of(arrays, anything)
optional_vectors = st.one_of(st.none(), vectors)


def begun_server(**more):
    """Return a server after a round, and the tasks of the next."""
    server = fb.Server(DIM, rule=fb.Thresholds(eps_mean=2, eps_max=1, gamma_max=0.5), **more)
    server.plan(["a", "b", "bad"])
    server.step({"a": fb.Update(GOOD, 1), "b": fb.Update(GOOD, 2)})
    return server, server.plan(["a", "b", "bad"])


def assert_usable(server):
    """Check that the state is sound and that a round of good replies goes through."""
    fingerprint(server)
    ids = ["a", "b"]
    tasks = server.plan(ids)
    record = server.step({i: fb.Update(GOOD, 1, base=task.base) for i, task in tasks.items()})
    assert not record.refused
    assert all(np.isfinite(node.params).all() for node in server.tree)


def assert_sayable(record):
    """Check that a file can hold the record and that its reasons are printable."""
    json.dumps(record.to_json(), allow_nan=False).encode("utf-8")
    for reason in record.refused.values():
        assert reason.isprintable()


def check_fuzzed_update(vector, num_examples, reported, buffers, signal, half, base):
    server, tasks = begun_server()
    update = fb.Update(
        vector, num_examples, metrics=reported, buffers=buffers, signal=signal,
        half_difference=half, base=base,
    )  # fmt: skip
    good = {i: fb.Update(GOOD, 1, base=tasks[i].base) for i in ("a", "b")}

    record = server.step({**good, "bad": update})

    assert set(record.refused) <= {"bad"}
    assert ("bad" in record.metrics) != ("bad" in record.refused)
    assert_sayable(record)
    assert_usable(server)


update_parts = (
    st.one_of(st.just(GOOD), vectors),
    st.one_of(st.just(3), numbers, anything),
    st.one_of(st.just({}), metrics),
    st.one_of(st.none(), optional_vectors),
    optional_vectors,
    st.one_of(st.none(), optional_vectors),
    st.one_of(st.none(), st.text(st.characters(categories=["L", "N"]), max_size=9)),
)


def columns_of(rows):
    return st.one_of(
        hnp.arrays(np.float32, (rows, DIM), elements=st.floats(width=32)),
        st.just(np.ones((rows, DIM), np.float32)),
        anything,
    )


def lists_of(rows, entries):
    return st.one_of(st.lists(entries, min_size=rows, max_size=rows), anything)


def check_fuzzed_batch(data):
    server, tasks = begun_server()
    columns = {
        "client_ids": data.draw(
            st.one_of(st.just(["a", "b", "bad"]), st.lists(st.one_of(ANY_TEXT, anything)))
        ),
        "vectors": data.draw(columns_of(3)),
        "num_examples": data.draw(lists_of(3, numbers)),
        "bases": data.draw(st.one_of(st.just([tasks["a"].base] * 3), lists_of(3, anything))),
        "metrics": data.draw(st.one_of(st.just([{}] * 3), lists_of(3, metrics))),
        "half_differences": data.draw(st.one_of(st.none(), columns_of(3))),
    }
    before = fingerprint(server)
    try:
        record = server.step(fb.UpdateBatch(**columns))
    except (ValueError, TypeError):
        assert fingerprint(server) == before
    else:
        json.dumps(record.to_json(), allow_nan=False)
    assert_usable(server)


def check_fuzzed_losses(losses, num_trials):
    with suppress(InvalidUpdate):
        checked = check_losses(losses, num_trials)
        assert len(checked) == num_trials
        assert all(type(loss) is float for loss in checked)
    server, _ = begun_server()
    record = server.step({}, losses={"a": losses, "bad": losses})
    assert set(record.refused) == {"a", "bad"}


def check_fuzzed_ids(client_ids):
    server, _ = begun_server()
    before = fingerprint(server)
    try:
        server.plan(client_ids)
    except (ValueError, TypeError):
        assert fingerprint(server) == before
    assert_usable(server)


# Flower's messages

flower_arrays = st.one_of(
    st.builds(Array, hnp.arrays(np.float32, 20, elements=st.floats(width=32))),
    st.builds(lambda a: Array(a), hnp.arrays(st.sampled_from(["f4", ">f4", "f8", "i8", "c8"]), shapes)),
    st.builds(
        Array,
        dtype=st.text(max_size=9),
        shape=st.lists(st.integers(-9, 10**12), max_size=3).map(tuple),
        stype=st.sampled_from(["numpy.ndarray", "pickle", ""]),
        data=st.one_of(st.binary(max_size=200), st.binary(max_size=99).map(lambda b: b"\x93NUMPY\x01\x00" + b)),
    ),
)  # fmt: skip
array_names = st.one_of(st.just("theta"), ANY_TEXT)
flower_numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats())
records = st.one_of(
    st.dictionaries(array_names, flower_arrays, max_size=2).map(ArrayRecord),
    st.dictionaries(
        st.one_of(st.just("num-examples"), ANY_TEXT),
        st.one_of(flower_numbers, st.lists(st.floats(), max_size=3), st.lists(st.integers(), max_size=3)),
        max_size=4,
    ).map(MetricRecord),
    st.dictionaries(
        ANY_TEXT,
        st.one_of(flower_numbers, ANY_TEXT, st.binary(max_size=9), st.booleans(), st.lists(ANY_TEXT, max_size=3)),
        max_size=4,
    ).map(ConfigRecord),
)  # fmt: skip
contents = st.one_of(
    st.dictionaries(
        st.one_of(st.sampled_from(["arrays", "metrics", "arrays-half-difference"]), ANY_TEXT),
        records,
        max_size=4,
    ).map(RecordDict),
    st.builds(
        lambda array, weight, more: RecordDict(
            {
                "arrays": ArrayRecord({"theta": array}),
                "metrics": MetricRecord({"num-examples": weight, **more}),
            }
        ),
        flower_arrays,
        st.one_of(st.just(3), flower_numbers),
        st.dictionaries(ANY_TEXT, flower_numbers, max_size=2),
    ),
)
errors = st.builds(Error, code=st.integers(0, 100), reason=ANY_TEXT)


@cache
def grid_of_three():
    return FakeGrid(make_app(2), make_nodes(3))


def check_fuzzed_message(content, sender):
    grid = grid_of_three()
    layout = Layout.of(initial_arrays())
    server = fb.Server(layout.num_params, rule=fb.NeverSplit())
    keys = Keys(weight="num-examples", arrays="arrays", config="config")
    federation = Federation(server, layout, keys, 5.0)
    ids = federation.gather(grid, 3)
    asked = ask_to_train(federation, server.plan(ids), this_round=1)
    for number, one in enumerate(asked):
        one.message.metadata.__dict__["_message_id"] = f"message-{number}"
    replies = [grid._answer(one.message) for one in asked[:2]]
    odd = Message(content, reply_to=asked[2].message)
    if sender is not None:
        odd.metadata.__dict__["_src_node_id"] = sender

    received = receive_updates(federation, asked, [odd, *replies])
    record = server.step(received.intake)

    assert set(record.refused) <= {ids[2]}
    assert {ids[0], ids[1]} <= record.metrics.keys() <= set(ids)
    assert (ids[2] in record.metrics) != (ids[2] in record.refused)
    assert np.isfinite(server.tree.root.params).all()
    assert_sayable(record)
    evaluated = receive_metrics(federation, asked, [odd, *replies])
    assert {ids[0], ids[1]} <= evaluated.answers.keys()


# Settings

small = st.one_of(st.integers(-3, 50), st.floats(), ANY_TEXT, st.none(), st.booleans(), anything)


def maybe(**choices):
    return st.fixed_dictionaries({}, optional=choices)


constructors = {
    "server": (
        fb.Server,
        maybe(
            num_params=small, num_buffers=small, weighting=small, compare=small, num_signal=small,
            max_examples=small, rule=small,
        ),
    ),
    "thresholds": (
        fb.Thresholds,
        maybe(
            eps_mean=small, eps_max=small, gamma_max=small, min_cluster_size=small,
            min_rounds=small, coverage=small, max_hold_rounds=small,
        ),
    ),
    "auto": (
        fb.AutoRule,
        maybe(
            only_conflicts=small, error_level=small, coverage=small, max_hold_rounds=small,
            review_after=small,
        ),
    ),
    "training": (
        fb.LocalTraining,
        maybe(epochs=small, steps=small, batch_size=small, precision=small, send_gradient=small),
    ),
    "strategy": (
        ClusteredStrategy,
        maybe(
            fraction_train=small, fraction_evaluate=small, min_train_nodes=small,
            min_evaluate_nodes=small, min_available_nodes=small, seed=small, rule=small,
        ),
    ),
}  # fmt: skip


# The required arguments of each, so that the fuzzed ones are examined
SOUND = {
    "server": {"num_params": DIM},
    "thresholds": {"eps_mean": 1, "eps_max": 1, "gamma_max": 0.5},
    "auto": {},
    "training": {"epochs": 1},
    "strategy": {},
}


def check_fuzzed_settings(name_and_settings):
    name, given_settings = name_and_settings
    make, _ = constructors[name]
    # Numbers that no float can hold are refused by Python itself.
    with suppress(*OWN, ArithmeticError):
        make(**{**SOUND[name], **given_settings})


# What is fuzzed -> examples in the long suite, strategies, check
CHECKS = {
    "updates": (1500, update_parts, check_fuzzed_update),
    "batches": (1000, (st.data(),), check_fuzzed_batch),
    "losses": (
        500,
        (
            st.one_of(anything, st.lists(numbers, max_size=3), hnp.arrays(float, shapes)),
            st.integers(0, 3),
        ),
        check_fuzzed_losses,
    ),
    "ids": (
        500,
        (st.one_of(anything, st.lists(st.one_of(ANY_TEXT, anything), max_size=4)),),
        check_fuzzed_ids,
    ),
    "messages": (
        1500,
        (st.one_of(contents, errors), st.sampled_from([None, None, None, 12345])),
        check_fuzzed_message,
    ),
    "settings": (
        1000,
        (
            st.sampled_from(sorted(constructors)).flatmap(
                lambda name: st.tuples(st.just(name), constructors[name][1])
            ),
        ),
        check_fuzzed_settings,
    ),
}


def run(name, number):
    """Check up to ``number`` examples; return how many were checked."""
    _, strategies, check = CHECKS[name]
    num_checked = 0

    @settings(max_examples=number, suppress_health_check=list(HealthCheck))
    @given(st.tuples(*strategies))
    def fuzz(values):
        nonlocal num_checked
        num_checked += 1
        check(*values)

    fuzz()
    return num_checked


@pytest.mark.parametrize("name", CHECKS)
def test_odd_replies_and_settings_raise_nothing_but_our_own_errors(name):
    assert run(name, 40)


@pytest.mark.reliability
def test_thousands_of_odd_replies_and_settings_do_no_harm(measured):
    counts = {name: run(name, number) for name, (number, _, _) in CHECKS.items()}

    assert sum(counts.values()) >= 6000
    measured(
        "fuzz-replies",
        f"{sum(counts.values()):,} fuzzed ({', '.join(f'{n:,} {name}' for name, n in counts.items())}): "
        "only our own errors (of settings also Python's, for numbers that no float can hold), and "
        "the state is unchanged where one is raised",
    )
