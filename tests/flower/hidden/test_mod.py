"""Hidden models over Flower: the same run as a plain one, and nothing plain on the wire."""

import logging
import re

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod

from fedbranch.errors import ClientFailed, NotConfirmed, UnusableRun
from fedbranch.flower import (
    ClusteredStrategy,
    hidden_arrays,
    reveal,
    transform_mod,
)
from fedbranch.flower.testing import FakeGrid, FakeNode
from fedbranch.privacy import Secret
from flower import test_half_updates as halves
from flower.federations import (
    RULE,
    contents_of,
    make_client_app,
    make_clients,
    make_model,
)
from flower.hiding import SECRET, as_record, initial, overhearing, start, theta0, watching
from flower.wire_scan import Overheard, numbers_in
from swapped_digits import task

KINDS = ["permutation", "rotation"]


def initial_with_buffers(seed):
    return ArrayRecord(make_model(seed % 2**32, has_buffers=True).state_dict())


def initial_digits(seed):
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(scale=0.01, size=array.shape).astype(np.float32)
        for name, array in task.initial_model().items()
    }


def zeros_for(model, kind="rotation", **settings):
    return hidden_arrays(model, kind, fingerprint=SECRET.fingerprint, **settings)


def make_grid(mods=(), *, num_clients=6, has_buffers=False, **settings):
    clients, model = make_clients(num_clients), make_model(has_buffers=has_buffers)
    nodes = [FakeNode.simulated(i, num_clients) for i in range(num_clients)]
    return FakeGrid(make_client_app(clients, model, mods), nodes, **settings)


def assert_same_run(plain, hidden, make_initial, kind):
    """Check for the same decisions and clusters, and for members the same models."""
    assert hidden.clusters == plain.clusters
    assert hidden.assignments == plain.assignments
    for ours, theirs in zip(hidden.history, plain.history, strict=True):
        # The clients, not the wording: reasons quote lengths, which a rotation keeps within rounding.
        assert ours.record.refused.keys() == theirs.record.refused.keys()
        assert [(d.node_id, d.verdict, d.groups) for d in ours.record.decisions] == [
            (d.node_id, d.verdict, d.groups) for d in theirs.record.decisions
        ]
        for one, other in zip(ours.record.decisions, theirs.record.decisions, strict=True):
            assert one.measurements == pytest.approx(other.measurements, rel=1e-4, abs=1e-6)
    for node in plain.tree:
        expected = plain.arrays_at(node.id)
        revealed = reveal(hidden.arrays_at(node.id), SECRET, make_initial, kind=kind)
        assert list(revealed) == list(expected)
        for name, array in expected.items():
            found = revealed[name].numpy()
            assert found.dtype == array.numpy().dtype
            if kind == "permutation":
                np.testing.assert_array_equal(found, array.numpy())
            else:
                np.testing.assert_allclose(found, array.numpy(), rtol=0, atol=1e-6)


# The same run as a plain one


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [RULE, None], ids=["thresholds", "auto"])
def test_a_hidden_run_is_the_plain_one(kind, rule):
    arrays = theta0(initial)
    plain = start(make_grid(), arrays, rule=rule)
    mod = transform_mod(SECRET, initial, kind=kind)

    hidden = start(make_grid([mod]), zeros_for(arrays, kind), rule=rule)

    assert len(plain.clusters) == 2
    assert_same_run(plain, hidden, initial, kind)


# The normalisation of this small net makes much of every last bit: after four rounds two plain
# runs that begin 1e-8 apart are 1e-4 apart.
@pytest.mark.parametrize(("kind", "num_rounds"), [("permutation", 12), ("rotation", 4)])
def test_buffers_are_hidden_beside_the_parameters(kind, num_rounds):
    arrays = theta0(initial_with_buffers)
    plain = start(make_grid(has_buffers=True), arrays, num_rounds=num_rounds)
    grid = make_grid([transform_mod(SECRET, initial_with_buffers, kind=kind)], has_buffers=True)

    hidden = start(grid, zeros_for(arrays, kind), num_rounds=num_rounds)

    assert_same_run(plain, hidden, initial_with_buffers, kind)
    assert plain.arrays["1.num_batches_tracked"].numpy() > 0


def test_large_counters_do_not_blur_the_other_buffers():
    # In one rotation with them they would: 1e6 as float32 is known to 0.06 only.
    model = {
        "w": np.ones(30, np.float32),
        "running_var": np.full(30, 0.01, np.float32),
        "num_batches_tracked": np.array(0),
    }

    def train(message, context):
        arrays = {n: a.numpy() for n, a in message.content["arrays"].items()}
        arrays["w"] = arrays["w"] + np.float32(1)
        arrays["num_batches_tracked"] = np.asarray(arrays["num_batches_tracked"] + 1_000_003)
        content = {"arrays": as_record(arrays), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    app = ClientApp(mods=[transform_mod(SECRET, lambda seed: model)])
    app.train()(train)
    grid = FakeGrid(app, [FakeNode.simulated(i, 2) for i in range(2)])

    result = start(grid, zeros_for(model), num_rounds=3, fraction_evaluate=0.0)

    found = reveal(result.arrays, SECRET, lambda seed: model)
    assert found["num_batches_tracked"].numpy() == 3_000_009
    np.testing.assert_allclose(found["running_var"].numpy(), 0.01, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_half_updates_and_trials_are_hidden_too(kind):
    arrays = theta0(initial_digits)
    nodes = [FakeNode.simulated(i, halves.NUM_CLIENTS) for i in range(halves.NUM_CLIENTS)]
    plain = start(
        FakeGrid(halves.make_app(), nodes), arrays, rule=None, half_updates=True, num_rounds=5
    )
    mod = transform_mod(SECRET, initial_digits, kind=kind)
    grid = FakeGrid(with_mods(halves.make_app(), mod), nodes)

    hidden = start(grid, zeros_for(arrays, kind), rule=None, half_updates=True, num_rounds=5)

    assert len(plain.clusters) == halves.NUM_GROUPS
    reasons = [d.reason for entry in hidden.history for d in entry.record.decisions]
    assert any("the other half of the data confirms them" in reason for reason in reasons)
    assert_same_run(plain, hidden, initial_digits, kind)


def with_mods(app, *mods):
    """The same client app behind mods."""
    new = ClientApp(mods=list(mods))
    new.train()(lambda message, context: app(message, context))
    new.evaluate()(lambda message, context: app(message, context))
    return new


@pytest.mark.parametrize("kind", KINDS)
def test_a_newcomer_finds_its_cluster_under_the_transform(kind):
    def start_with_newcomer(mods, arrays):
        grid = make_grid(mods, num_clients=7)
        late = grid.disconnect(FakeNode.simulated(5, 7).node_id)

        class Welcoming(ClusteredStrategy):
            def configure_train(self, server_round, arrays, config, grid):
                if server_round == 5:
                    grid.connect(late)
                return super().configure_train(server_round, arrays, config, grid)

        return start(grid, arrays, strategy_class=Welcoming, rule=None, num_rounds=8)

    arrays = theta0(initial)
    plain = start_with_newcomer([], arrays)

    hidden = start_with_newcomer(
        [transform_mod(SECRET, initial, kind=kind)], zeros_for(arrays, kind)
    )

    moves = [move for entry in hidden.history for move in entry.record.routed]
    assert [move.client_id for move in moves] == ["partition-0006"]
    assert_same_run(plain, hidden, initial, kind)


# Together with Flower's own mods


def clipped_app(mods, of_training):
    """A client app with mods of its own for training, as Flower's are used."""
    app = make_client_app(make_clients(6), make_model())
    new = ClientApp(mods=list(mods))
    new.train(mods=list(of_training))(lambda message, context: app(message, context))
    new.evaluate()(lambda message, context: app(message, context))
    return new


def seeded_noise(message, context, call_next):
    """Flower's noise comes from NumPy's global generator; here it is to be the same twice."""
    state = np.random.get_state()  # noqa: NPY002 -- it is what Flower uses
    np.random.seed([message.content["config"]["server-round"], context.node_id])  # noqa: NPY002
    try:
        return call_next(message, context)
    finally:
        np.random.set_state(state)  # noqa: NPY002


@pytest.mark.parametrize(
    "of_training",
    [
        [fixedclipping_mod],
        [adaptiveclipping_mod],
        [seeded_noise, LocalDpMod(0.1, sensitivity=0.01, epsilon=10.0, delta=0.1)],
    ],
    ids=["fixed", "adaptive", "local"],
)
def test_flowers_mods_see_the_plain_model(of_training):
    norms = []

    def on_reply(message, reply):
        if message.metadata.message_type == "train":
            before, after = (m.content["arrays"].to_numpy_ndarrays() for m in (message, reply))
            steps = [b - a for a, b in zip(before, after, strict=True)]
            norms.append(np.sqrt(sum((step.astype(np.float64) ** 2).sum() for step in steps)))
        return reply

    nodes = [FakeNode.simulated(i, 6) for i in range(6)]
    arrays = theta0(initial)
    settings = {
        "num_rounds": 3,
        "start_with": {"train_config": ConfigRecord({"clipping_norm": 0.1})},
    }
    plain = start(FakeGrid(clipped_app([], of_training), nodes), arrays, **settings)
    mod = transform_mod(SECRET, initial, kind="permutation")
    grid = FakeGrid(clipped_app([mod], of_training), nodes, on_reply=on_reply)

    hidden = start(grid, zeros_for(arrays, "permutation"), **settings)

    assert_same_run(plain, hidden, initial, "permutation")
    assert len(norms) == 18
    if len(of_training) == 1:  # all of them would be longer
        np.testing.assert_allclose(norms, 0.1, rtol=1e-5)


# What the server's side gets to see


def overheard_in(grid, arrays, folder, caplog, **settings):
    """Run a federation and write down everything that passes the server."""
    overheard = Overheard()
    grid.on_reply = overhearing(overheard)
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, logger="flwr"):
        start(grid, arrays, checkpoint_dir=folder, **settings)
    overheard.add(*contents_of(folder).values(), caplog.text.encode())
    return overheard


@pytest.mark.parametrize("kind", KINDS)
def test_neither_the_key_nor_a_plain_model_passes_the_server(kind, tmp_path, caplog):
    seen = []
    grid = make_grid([transform_mod(SECRET, initial, kind=kind), watching(seen)])
    zeros = hidden_arrays(theta0(initial), kind, fingerprint=SECRET.fingerprint)

    overheard = overheard_in(grid, zeros, tmp_path / "run", caplog, rule=None, num_rounds=5)

    assert len(seen) > 400
    assert len(overheard.bytes) > 100_000
    assert not overheard.holds_key(SECRET)
    assert overheard.num_plain_runs(seen) == 0
    plain_values = {value for array in seen for value in array.reshape(-1)}
    assert not numbers_in(caplog.text) & plain_values


def test_the_scan_finds_what_a_plain_run_shows(tmp_path, caplog):
    seen = []
    grid = make_grid([watching(seen)])

    overheard = overheard_in(grid, theta0(initial), tmp_path / "run", caplog, num_rounds=5)

    assert overheard.num_plain_runs(seen) > 1000
    saved = Overheard()
    saved.add(*contents_of(tmp_path / "run").values())
    assert saved.num_plain_runs(seen) > 0
    overheard.add(b"..." + SECRET.key.hex().encode())
    assert overheard.holds_key(SECRET)


# What is refused


def test_the_server_cannot_evaluate_what_it_does_not_know():
    grid = make_grid([transform_mod(SECRET, initial)])

    with pytest.raises(ValueError, match="evaluate_fn is given, but the arrays are hidden"):
        start(
            grid,
            zeros_for(theta0(initial)),
            start_with={"evaluate_fn": lambda number, arrays: None},
        )

    assert not grid.sent


def refusals(mod, arrays, **settings):
    """What the clients answer to a round of training, and what they sent."""
    replies = []
    grid = make_grid([mod], on_reply=lambda message, reply: replies.append(reply), **settings)
    strategy = ClusteredStrategy(rule=RULE, fraction_evaluate=0.0)
    strategy.start(grid, arrays, num_rounds=1, timeout=0.1)
    assert replies
    assert all(reply.has_error() for reply in replies)
    return {reply.error.reason for reply in replies}


OTHER = Secret(bytes(32), run="another")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (lambda model: model, "the server sent the arrays ['0.weight', '0.bias'"),
        (lambda model: zeros_for(model, "permutation"), "expects ['fedbranch-hidden.rotation."),
        (
            lambda model: hidden_arrays(model, fingerprint=OTHER.fingerprint),
            f"fedbranch-hidden.rotation.{OTHER.fingerprint}.parameters",
        ),
        (
            lambda model: zeros_for({"w": np.zeros(3)}),
            "has dtype float64 and shape (3,); send float64 and (50,)",
        ),
        (
            lambda model: zeros_for(model, buffers=["0.bias"]),
            f"unknown ['fedbranch-hidden.rotation.{SECRET.fingerprint}.buffers']",
        ),
    ],
    ids=["plain", "kind", "secret", "length", "buffers"],
)
def test_a_client_refuses_what_is_not_hidden_as_it_hides(arrays, message):
    (reason,) = refusals(transform_mod(SECRET, initial), arrays(theta0(initial)))

    assert "TransformMismatch" in reason
    assert message in reason


def test_a_client_without_a_secret_does_not_train():
    def no_secret(context):
        raise NotConfirmed(f"node {context.node_id} has no secret yet")

    reasons = refusals(transform_mod(no_secret, initial), zeros_for(theta0(initial)))

    assert len(reasons) == 6
    assert all("has no secret yet" in reason for reason in reasons)


def answered(answer, *, secret=SECRET, make_initial=initial):
    """What the server gets when a client app answers in this way to hidden arrays."""
    app = ClientApp(mods=[transform_mod(secret, make_initial)])
    app.query()(answer)
    grid = FakeGrid(app, [FakeNode.simulated(0, 1)])
    content = RecordDict({"arrays": zeros_for(theta0(initial)), "config": ConfigRecord({"lr": 1})})
    (reply,) = grid.send_and_receive([Message(content, next(iter(grid.nodes)), "query")])
    return reply


def echo(message, context):
    return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)


def test_what_a_client_app_gets_it_may_send_back():
    reply = answered(echo)

    assert not reply.has_error()
    assert not any(array.numpy().any() for array in reply.content["arrays"].values())


def numbers_of(message):
    return message.content["arrays"]["0.weight"].numpy()


def quoting_app(message, context):
    raise ValueError(f"strange weights: {numbers_of(message).tolist()}")


def quoting_app_of_fedbranch(message, context):
    raise ClientFailed(f"strange weights: {numbers_of(message).tolist()}")


def quoting_initial(seed):
    raise ValueError(f"strange seed: {seed}")


def quoting_secret(context):
    raise ValueError(f"strange key: {SECRET.key.hex()}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"answer": quoting_app},
            "the client app raised ValueError in test_mod.py, line {} (quoting_app)",
        ),
        (
            {"answer": quoting_app_of_fedbranch},
            "the client app raised ClientFailed in test_mod.py, line {} (quoting_app_of",
        ),
        (
            {"make_initial": quoting_initial},
            "the function that gives the initial model raised ValueError in test_mod.py",
        ),
        (
            {"secret": quoting_secret},
            "the function that gives the secret raised ValueError in test_mod.py",
        ),
    ],
    ids=["app", "app of fedbranch", "initial", "secret"],
)
def test_messages_of_errors_stay_with_the_client(settings, message):
    reason = answered(**{"answer": echo, **settings}).error.reason

    assert "ClientFailed" in reason
    found = re.sub(r"line \d+", "line {}", reason)
    assert message in found
    assert "its message is not sent" in reason
    assert "strange" not in reason


def test_the_reason_of_an_error_that_a_client_app_replies_with_stays_with_it():
    def answer(message, context):
        reason = f"strange weights: {numbers_of(message).tolist()}"
        return Message(Error(code=77, reason=reason), reply_to=message)

    reply = answered(answer)

    assert reply.error.code == 77
    assert "its reason is not sent" in reply.error.reason
    assert "strange" not in reply.error.reason


def test_bytes_that_are_no_array_are_not_quoted():
    def answer(message, context):
        arrays = dict(message.content["arrays"])
        data = b"strange!" + numbers_of(message).tobytes()
        arrays["0.weight"] = Array("float32", (8, 3), "numpy.ndarray", data)
        return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)

    reason = answered(answer).error.reason

    assert "TransformMismatch" in reason
    assert "the array '0.weight' cannot be read as NumPy's format: ValueError" in reason
    assert "strange" not in reason


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"secret": lambda context: None},
            "gives the secret returned NoneType; it must return a Secret",
        ),
        ({"make_initial": lambda seed: None}, "the model is of type NoneType; it must be an Array"),
        ({"answer": lambda message, context: None}, "replied with NoneType; it must be a Message"),
        (
            {"make_initial": lambda seed: {"w": np.full(3, np.nan)}},
            "the initial model cannot be hidden: the array 'w' of the initial model contains NaN",
        ),
    ],
    ids=["secret", "initial", "reply", "nan"],
)
def test_what_functions_of_the_client_give_is_checked(settings, message):
    reply = answered(**{"answer": echo, **settings})

    assert message in reply.error.reason


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("abc", initial), TypeError, "secret is of type str; pass a Secret, or a function"),
        ((SECRET, {}), TypeError, "initial is of type dict; pass a function that maps a seed"),
        ((SECRET, initial, "rot"), ValueError, "kind is 'rot'; it must be one of"),
    ],
    ids=["secret", "initial", "kind"],
)
def test_wrong_arguments_are_refused_at_once(arguments, error, message):
    secret, make_initial, *kind = arguments

    with pytest.raises(error, match=message):
        transform_mod(secret, make_initial, kind=kind[0] if kind else "rotation")


def test_config_records_are_not_sent():
    def answer(message, context):
        weights = ConfigRecord({"weights": numbers_of(message).reshape(-1).tolist()})
        return Message(RecordDict({**message.content, "of-mine": weights}), reply_to=message)

    reason = answered(answer).error.reason

    assert "TransformMismatch" in reason
    assert "the reply has config records under ['config', 'of-mine']. They are not sent" in reason


@pytest.mark.parametrize("num_counts", [10, 64])
def test_counts_are_rotated_and_come_back_whole(num_counts):
    counts = np.arange(num_counts) ** 2 * 7
    model = {"w": np.ones(8, np.float32), "label_counts": np.zeros(num_counts, np.int64)}
    overheard = []

    def train(message, context):
        arrays = {n: a.numpy() for n, a in message.content["arrays"].items()}
        arrays["w"] = arrays["w"] + np.float32(1)
        arrays["label_counts"] = arrays["label_counts"] + counts
        content = {"arrays": as_record(arrays), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    def on_reply(message, reply):
        overheard.extend(reply.content["arrays"].to_numpy_ndarrays())
        return reply

    app = ClientApp(mods=[transform_mod(SECRET, lambda seed: model)])
    app.train()(train)
    grid = FakeGrid(app, [FakeNode.simulated(i, 2) for i in range(2)], on_reply=on_reply)

    result = start(grid, zeros_for(model), num_rounds=3, fraction_evaluate=0.0)

    found = reveal(result.arrays, SECRET, lambda seed: model)
    np.testing.assert_array_equal(found["label_counts"].numpy(), 3 * counts)
    sent = np.abs(np.concatenate(overheard))
    assert len(sent) == 6 * (8 + num_counts)
    assert not np.isin(sent.round(6), counts[counts > 0] * [[1], [2], [3]]).any()


@pytest.mark.parametrize(
    ("received", "key"), [(True, "gradients"), (False, "arrays")], ids=["beside", "unasked"]
)
def test_arrays_that_cannot_be_hidden_are_not_sent(received, key):
    def answer(message, context):
        arrays = theta0(initial)
        records = {key: arrays} | ({"arrays": arrays} if received else {})
        return Message(RecordDict(records), reply_to=message)

    app = ClientApp(mods=[transform_mod(SECRET, initial)])
    app.query()(answer)
    grid = FakeGrid(app, [FakeNode.simulated(0, 1)])
    content = RecordDict({"arrays": zeros_for(theta0(initial))} if received else {})
    node_id = next(iter(grid.nodes))

    (reply,) = grid.send_and_receive([Message(content, node_id, "query")])

    assert reply.has_error()
    assert "TransformMismatch" in reply.error.reason
    assert "cannot be hidden" in reply.error.reason


def test_another_secret_is_another_run(tmp_path):
    model = theta0(initial)
    settings = {"num_rounds": 1, "checkpoint_dir": tmp_path / "run", "resume": True}
    mod = transform_mod(SECRET, initial)
    zeros = hidden_arrays(model, fingerprint=SECRET.fingerprint)
    start(make_grid([mod]), zeros, **settings)

    with pytest.raises(UnusableRun, match="model"):
        start(make_grid([mod]), hidden_arrays(model, fingerprint=OTHER.fingerprint), **settings)
