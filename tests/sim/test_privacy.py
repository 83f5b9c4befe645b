"""Simulations in which the server knows hidden numbers only."""

import base64
import json
import logging
import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedbranch as fb
from fakes import fingerprint
from fedbranch.data import digits, label_swaps
from fedbranch.privacy import Noise, Privacy, Secret, Transform
from fedbranch.sim.clients import Population
from fedbranch.sim.hidden import Hiding
from fedbranch.sim.release_counts import Releases
from fedbranch.storage.checkpoint import read_checkpoint
from fedbranch.storage.sealed_json import seal
from fedbranch.training.model_state import ModelState

SECRET = Secret(bytes(range(7, 39)), "tests", epoch=3)
PERMUTATION = Privacy(SECRET, transform="permutation")
ROTATION = Privacy(SECRET)
THRESHOLDS = fb.Thresholds(eps_mean=0.3, eps_max=0.5, gamma_max=0.5)
RULES = {"thresholds": THRESHOLDS, "auto": fb.AutoRule()}
CASES = [("smooth", "thresholds"), ("smooth", "auto"), ("BatchNorm", "auto")]
ROUNDS, JOINS = 22, 18  # all splits are before the newcomer comes
NEWCOMER = "newcomer"


@cache
def clients():
    """Two groups of real digits, and one client that comes when they are apart."""
    found = fb.federate(*digits(), num_clients=9, groups=label_swaps(2, seed=0), seed=0)
    last = found.pop(max(found))
    newcomer = fb.ClientData(tuple(last.train), tuple(last.test), group=last.group, joins=JOINS)
    return found | {NEWCOMER: newcomer}


def with_batch_norm():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10)
        )


def smooth():
    """Without a kink: rounding stays rounding, however long it is trained."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


MODELS = {"smooth": smooth, "BatchNorm": with_batch_norm}


def simulate(privacy=None, *, model="smooth", rule="thresholds", method=fb.simulate, **settings):
    settings = {
        "rounds": ROUNDS,
        "training": fb.LocalTraining(optimizer=fb.sgd(0.2), epochs=2, batch_size=36),
        "engine": "vectorised",
        "evaluate_every": ROUNDS,
        "seed": 5,
        **({"rule": RULES[rule]} if method is fb.simulate else {}),
        **settings,
    }
    return method(MODELS[model](), clients(), privacy=privacy, **settings)


@cache
def plain_run(model, rule, engine):
    return simulate(model=model, rule=rule, engine=engine)


def decisions(run):
    """What the server decided, without the numbers that it measured."""
    return [
        (entry.record.round, d.node_id, d.verdict, d.asks, d.groups)
        for entry in run.history
        for d in entry.record.decisions
    ]


def moves(run):
    return [
        (entry.record.round, move.client_id, move.from_node, move.to_node)
        for entry in run.history
        for move in entry.record.routed
    ]


def largest_difference(run, other):
    """Between the models at all nodes of two runs."""
    assert len(run.tree) == len(other.tree)
    return max(
        float((ours.double() - theirs.double()).abs().max())
        for node in run.tree
        for ours, theirs in zip(
            run.model_at(node.id).state_dict().values(),
            other.model_at(node.id).state_dict().values(),
            strict=True,
        )
    )


# The same run


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
@pytest.mark.parametrize(("model", "rule"), CASES)
def test_a_permutation_changes_no_bit_of_any_model(model, rule, engine):
    plain = plain_run(model, rule, engine)

    hidden = simulate(PERMUTATION, model=model, rule=rule, engine=engine)

    assert hidden.engine.name == engine
    assert len(plain.clusters) == 2
    assert (JOINS, NEWCOMER, 0) in [move[:3] for move in moves(plain)]
    assert decisions(hidden) == decisions(plain)
    assert moves(hidden) == moves(plain)
    assert hidden.clusters == plain.clusters
    assert hidden.evaluation == plain.evaluation
    for node in plain.tree:
        ours = hidden.model_at(node.id).state_dict()
        for name, value in plain.model_at(node.id).state_dict().items():
            assert ours[name].numpy().tobytes() == value.numpy().tobytes()
        assert not np.array_equal(hidden.tree[node.id].params, node.params)


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
@pytest.mark.parametrize(("model", "rule"), CASES)
def test_a_rotation_leads_to_the_same_decisions_and_models(model, rule, engine):
    plain = plain_run(model, rule, engine)

    hidden = simulate(ROTATION, model=model, rule=rule, engine=engine)

    assert decisions(hidden) == decisions(plain)
    assert moves(hidden) == moves(plain)
    assert hidden.clusters == plain.clusters
    # A model is off by its last digits when it is sent. With relu, training may make that more:
    # where an activation is near zero, its gradient is on in one run and off in the other.
    assert largest_difference(hidden, plain) < (1e-6 if model == "smooth" else 1e-3)


@pytest.mark.parametrize("rule", RULES)
def test_a_server_makes_the_same_models_of_rotated_updates(rule):
    """All rounds of a run again, with the same updates: nothing is trained on."""
    sent = {}

    def noted(client_id, this_round, update):
        sent.setdefault(this_round, {})[client_id] = update
        return update

    plain = simulate(rule=rule, before_send=noted)
    num_params = plain.tree.num_params
    transform = Transform.of(SECRET, "rotation", num_params=num_params).params
    server = fb.Server(transform.num_hidden, rule=RULES[rule])
    again = fb.Server(num_params, rule=RULES[rule])  # without losses, which are not noted
    for _, updates in sorted(sent.items()):
        for one in (server, again):
            one.plan(updates)
        again.step({i: replace(u, base=None) for i, u in updates.items()})
        server.step(
            {
                i: replace(
                    u,
                    base=None,
                    vector=transform.hide(u.vector),
                    half_difference=None
                    if u.half_difference is None
                    else transform.hide(u.half_difference),
                )
                for i, u in updates.items()
            }
        )

    assert server.clusters == again.clusters
    for node in again.tree:
        revealed = transform.reveal(server.tree[node.id].params)
        np.testing.assert_allclose(revealed, node.params, rtol=0, atol=1e-6)


def test_workers_and_what_is_measured_after_them():
    plain, hidden = (
        simulate(p, rule="auto", engine="workers", num_workers=2, rounds=12, evaluate_every=12)
        for p in (None, PERMUTATION)
    )

    assert hidden.engine.name == "workers"
    assert decisions(hidden) == decisions(plain)
    assert largest_difference(hidden, plain) == 0
    assert hidden.evaluation_on_path() == plain.evaluation_on_path()
    assert hidden.ensemble_evaluation() == plain.ensemble_evaluation()


@pytest.mark.parametrize("method", [fb.fedavg, fb.local, fb.oracle, fb.ifca])
@pytest.mark.parametrize("privacy", [PERMUTATION, ROTATION], ids=["permutation", "rotation"])
def test_the_baselines_hide_too(method, privacy):
    settings = {"method": method, "rounds": 3, "evaluate_every": 3, "engine": "reference"}
    if method is fb.ifca:
        settings["num_clusters"] = 2

    in_place = replace(privacy, transform=None)  # whose other models start as the hidden ones do
    plain = simulate(in_place if method is fb.ifca else None, **settings)

    hidden = simulate(privacy, **settings)

    assert hidden.clusters == plain.clusters
    assert largest_difference(hidden, plain) <= (0 if privacy is PERMUTATION else 1e-6)
    if method is fb.ifca:  # also where the second model starts from
        starts = [node for node in plain.tree.leaves if node.params.any()]
        assert starts
        assert not any(np.array_equal(n.params, hidden.tree[n.id].params) for n in starts)


def test_no_model_that_follows_from_the_public_seed_is_sent_hidden(monkeypatch):
    given = []
    partition = fb.Server.partition

    def noted(server, clusters, starts=None):
        given.append(starts)
        return partition(server, clusters, starts)

    monkeypatch.setattr(fb.Server, "partition", noted)
    other = Privacy(Secret(bytes(32), "tests"), transform="permutation")
    for privacy in (None, PERMUTATION, PERMUTATION, other):
        simulate(privacy, method=fb.ifca, num_clusters=3, rounds=1, engine="reference")

    # A permutation keeps the numbers: in ascending order they would be the same.
    public, hidden, again, of_other = (
        {np.sort(start).tobytes() for start in starts.values()} for starts in given
    )
    assert [len(starts) for starts in (public, hidden)] == [2, 2]
    assert hidden == again
    assert not hidden & public
    assert not hidden & of_other


def test_gradients_are_hidden_like_updates():
    training = fb.LocalTraining(optimizer=fb.sgd(0.2), epochs=2, batch_size=36, send_gradient=True)
    plain, hidden = (
        simulate(p, rule="auto", training=training, rounds=12) for p in (None, PERMUTATION)
    )

    assert decisions(hidden) == decisions(plain)
    assert largest_difference(hidden, plain) == 0


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_before_send_sees_plain_updates(engine):
    def of_run(privacy):
        seen = []

        def noted(client_id, this_round, update):
            seen.append((client_id, this_round, update.vector.tobytes()))
            return update

        simulate(privacy, before_send=noted, rounds=2, engine=engine)
        return seen

    assert of_run(PERMUTATION) == of_run(None)


def test_a_reply_that_cannot_be_hidden_is_never_sent():
    def without_end(client_id, this_round, update):
        return replace(update, vector=update.vector[:-1])

    with pytest.raises(
        fb.ClientFailed, match=r"could not hide its reply: plain vectors have shape"
    ):
        simulate(ROTATION, before_send=without_end, rounds=1)


@pytest.mark.parametrize("column", ["vector", "buffers"])
@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        (lambda values: values.tolist(), "a vector is a list; only arrays can be hidden"),
        (lambda values: "0.5", "a vector is a str; only arrays can be hidden"),
        (lambda values: values.astype(int), "only floats can be mixed"),
    ],
)
def test_a_reply_of_the_wrong_kind_is_never_sent(column, spoiled, message):
    def bad(client_id, this_round, update):
        if client_id != "client-3":
            return update
        return replace(update, **{column: spoiled(getattr(update, column))})

    with pytest.raises(fb.ClientFailed, match=f"client 'client-3' could not hide.*{message}"):
        simulate(ROTATION, model="BatchNorm", before_send=bad, rounds=1)


def test_what_is_no_update_or_not_finite_is_refused_like_any_bad_reply():
    def broken(client_id, this_round, update):
        if client_id == "client-0":
            return None
        return replace(update, vector=update.vector / 0) if client_id == "client-1" else update

    with np.errstate(all="ignore"):
        run = simulate(ROTATION, before_send=broken, rounds=1)

    refused = run.history[0].record.refused
    assert list(refused.values()) == [
        "the reply is a NoneType; send an Update",
        "the update contains NaN or infinity; lower the learning rate",
    ]


@pytest.mark.parametrize("kind", ["rotation", "permutation"])
def test_a_counter_that_grows_does_not_blur_the_statistics_beside_it(kind):
    model = with_batch_norm()
    hiding = Hiding(Privacy(SECRET, transform=kind), model)
    names = [name for name, buffer in model.named_buffers() for _ in range(buffer.numel())]
    is_counter = np.array([name.endswith("num_batches_tracked") for name in names])
    params = np.ones(hiding.num_params, np.float32)
    hidden = np.zeros(hiding.num_buffers, np.float32)
    for _ in range(1000):
        _, plain = hiding.revealed(params, hidden)
        # A unit that is always off: its variance goes from 1 to 0.
        step = np.where(is_counter, 10, 0.1 * (-1 - plain)).astype(np.float32)
        update = fb.Update(
            np.ones(ModelState.of(model).params.numel(), np.float32), 1, buffers=step
        )
        hidden = hidden + hiding.hidden(update).buffers

    _, plain = hiding.revealed(params, hidden)

    assert plain[is_counter].tolist() == [10_000]
    assert np.abs(plain[~is_counter] + 1).max() < 2e-6  # far below BatchNorm's eps, 1e-5


class Counting(nn.Module):
    """Counts, beside what it learns, in how many rows each input was above zero."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("num_above", torch.zeros(64, dtype=torch.long))

    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
            self.num_above += (x > 0).sum(0)
        return self.layer(x)


@pytest.mark.parametrize("privacy", [PERMUTATION, ROTATION], ids=["permutation", "rotation"])
def test_what_a_model_counts_reaches_no_server_in_plain(privacy, monkeypatch):
    sent, plain = [], []
    step = fb.Server.step

    def noted(server, replies, **losses):
        sent.extend(np.asarray(reply.buffers) for reply in replies.values())
        return step(server, replies, **losses)

    def noted_before(client_id, this_round, update):
        plain.append(update.buffers)
        return update

    monkeypatch.setattr(fb.Server, "step", noted)
    settings = {"rounds": 8, "rule": fb.NeverSplit(), "engine": "reference", "weighting": "equal"}
    data = {f"client-{i}": clients()["client-0"] for i in range(4)}  # so that means are whole
    hidden = fb.simulate(Counting(), data, privacy=privacy, before_send=noted_before, **settings)
    shown = fb.simulate(Counting(), data, **settings)

    assert len(plain) == 32
    for ours, theirs in zip(sent, plain, strict=False):
        num_above = theirs[64:]
        assert num_above.max() > 100
        hidden_counts = ours[-64:]
        if privacy is ROTATION:  # a permutation keeps the numbers, but not their places
            num_same = np.isin(ours, num_above[num_above > 0]).sum()
            assert num_same <= 3
        assert (hidden_counts == num_above).mean() < 0.5
    counts = [ours.model_at(0).num_above for ours in (hidden, shown)]
    assert counts[0].max() > 1000
    assert torch.equal(*counts)


@pytest.mark.parametrize(
    "privacy",
    [PERMUTATION, ROTATION, replace(ROTATION, sketch=64)],
    ids=["permutation", "rotation", "sketch"],
)
def test_a_batch_of_any_library_is_hidden_as_one_by_one(privacy):
    model = with_batch_norm()
    hiding = Hiding(privacy, model)
    state = ModelState.of(model)
    rng = np.random.default_rng(0)
    vectors, signals, halves = rng.normal(size=(3, 3, state.params.numel())).astype(np.float32)
    buffers = rng.normal(size=(3, state.buffers.numel())).astype(np.float32)
    halves[1] = 0  # no halves
    batch = fb.UpdateBatch(
        client_ids=["a", "b", "c"], vectors=torch.tensor(vectors), num_examples=[1, 2, 3],
        bases=["x"] * 3, metrics=[{}] * 3, buffers=torch.tensor(buffers),
        signals=torch.tensor(signals), half_differences=torch.tensor(halves),
    )  # fmt: skip

    hidden = hiding.hidden_batch(batch)

    for column in (hidden.vectors, hidden.buffers, hidden.signals, hidden.half_differences):
        assert isinstance(column, torch.Tensor)
        assert column.dtype == torch.float32
    assert not hidden.half_differences[1].any()
    for row in range(3):
        alone = hiding.hidden(
            fb.Update(
                vectors[row], 1, buffers=buffers[row], signal=signals[row],
                half_difference=halves[row],
            )
        )  # fmt: skip
        assert np.array_equal(hidden.vectors[row], alone.vector)
        assert np.array_equal(hidden.buffers[row], alone.buffers)
        assert np.array_equal(hidden.signals[row], alone.signal)
        assert np.array_equal(hidden.half_differences[row], alone.half_difference)
        assert alone.signal.shape == (hiding.num_signal or hiding.num_params,)


# Files


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Stopped(Exception):
    pass


def stop_after(number):
    def on_round(entry):
        if entry.record.round == number:
            raise Stopped

    return on_round


NOISE = Noise(clip=1.0, multiplier=0.05)


@pytest.mark.parametrize(
    "privacy",
    [PERMUTATION, ROTATION, Privacy(SECRET, sketch=64), Privacy(SECRET, noise=NOISE)],
    ids=["permutation", "rotation", "sketch", "noise"],
)
def test_a_resumed_run_ends_in_the_same_bytes(tmp_path, privacy):
    settings = {"rule": "auto", "checkpoint_every": 3}
    at_once = simulate(privacy, folder=tmp_path / "at once", **settings)
    with pytest.raises(Stopped):
        simulate(privacy, folder=tmp_path / "stopped", on_round=stop_after(11), **settings)

    resumed = simulate(privacy, folder=tmp_path / "stopped", resume=True, **settings)

    assert files_of(tmp_path / "stopped") == files_of(tmp_path / "at once")
    assert fingerprint(resumed.server) == fingerprint(at_once.server)
    if privacy.noise is not None:
        assert resumed.epsilons(1e-5) == at_once.epsilons(1e-5)


@pytest.mark.parametrize(
    "other",
    [
        None,
        Privacy(Secret(bytes(32), "tests", epoch=3)),
        Privacy(Secret(SECRET.key, "tests", epoch=4)),
        Privacy(Secret(SECRET.key, "another run", epoch=3)),
        PERMUTATION,
        replace(ROTATION, sketch=64),
        replace(ROTATION, noise=NOISE),
    ],
    ids=["none", "key", "epoch", "run", "kind", "sketch", "noise"],
)
def test_a_run_is_not_resumed_with_another_privacy(tmp_path, other):
    simulate(ROTATION, folder=tmp_path, rounds=2)
    before = files_of(tmp_path)

    with pytest.raises(fb.UnusableRun, match="its privacy is not the one given now"):
        simulate(other, folder=tmp_path, rounds=2, resume=True)

    assert files_of(tmp_path) == before


def test_a_plain_run_is_not_resumed_with_privacy(tmp_path):
    simulate(None, folder=tmp_path, rounds=2)

    with pytest.raises(fb.UnusableRun, match="its privacy is not the one given now"):
        simulate(ROTATION, folder=tmp_path, rounds=2, resume=True)


# What can be found in them

NUM_CONSECUTIVE = 8


class Scan:
    """Looks for a secret, and for runs of plain numbers, in bytes and in text."""

    def __init__(self, vectors, secret=SECRET):
        purposes = [
            f"{kind} of {what}{part}"
            for kind in ("rotation", "permutation")
            for what in ("parameters", "buffers", "counters")
            for part in ("", ": order", ": signs")
        ]
        keys = [secret.key] + [
            secret.derived(purpose)
            for purpose in [*purposes, "fingerprint", "initial model", "digest"]
        ]
        self.of_keys = {
            form
            for key in keys
            for form in (
                key,
                key.hex().encode(),
                key.hex().upper().encode(),
                base64.b64encode(key).rstrip(b"="),
                base64.urlsafe_b64encode(key).rstrip(b"="),
                repr(key).encode(),
            )
        }
        width = 4 * NUM_CONSECUTIVE
        self.windows = set()
        for vector in vectors:
            numbers = np.ascontiguousarray(vector, dtype=np.float32)
            has_all = np.lib.stride_tricks.sliding_window_view(numbers != 0, NUM_CONSECUTIVE)
            content = numbers.tobytes()
            # Zeros say nothing: the pixels at the corners are always blank.
            for start in np.flatnonzero(has_all.all(axis=1)):
                self.windows.add(content[4 * start : 4 * start + width])

    def finds_secret(self, content):
        return any(form in content for form in self.of_keys)

    def finds_numbers(self, content):
        written = re.findall(rb"-?\d+\.\d+(?:[eE][-+]?\d+)?", content)
        with np.errstate(over="ignore"):
            of_text = np.array([float(number) for number in written], dtype=np.float32).tobytes()
        width = 4 * NUM_CONSECUTIVE
        return any(
            part[start : start + width] in self.windows
            for part in (content, of_text)
            for start in range(len(part) - width + 1)
        )


def scanned_run(privacy, folder, caplog, **settings):
    """Run with everything logged; give the scan for it, and all files and the log."""
    sent = []

    def noted(client_id, this_round, update):
        sent.extend(v for v in (update.vector, update.half_difference) if v is not None)
        return update

    def keep(entry):  # the checkpoint of every round
        for name, content in files_of(folder).items():
            found[f"{name} after round {entry.record.round}"] = content

    found = {}
    with caplog.at_level(logging.DEBUG):
        run = simulate(
            privacy, folder=folder, before_send=noted, rule="auto", checkpoint_every=1,
            model="BatchNorm", on_round=keep, **settings,
        )  # fmt: skip
        logging.getLogger("fedbranch").debug("%r %s", run, run.engine)
    initial = ModelState.of(MODELS["BatchNorm"]()).params.numpy()
    models = [ModelState.of(run.model_at(node.id)).params.numpy() for node in run.tree]
    scan = Scan([initial, *models, *(model - initial for model in models), *sent])
    log = "\n".join(f"{r.getMessage()} {r.__dict__}" for r in caplog.records).encode()
    return run, scan, found | files_of(folder) | {"log": log}


@pytest.mark.parametrize(
    "privacy",
    [PERMUTATION, ROTATION, replace(ROTATION, sketch=64)],
    ids=["permutation", "rotation", "sketch"],
)
def test_neither_secret_nor_plain_numbers_are_in_files_or_log(tmp_path, caplog, privacy):
    run, scan, found = scanned_run(privacy, tmp_path, caplog)

    names = " ".join(found)
    assert all(f in names for f in ("run.json", "history.jsonl", "held-", "edge-", "leaves"))
    assert b"engine: vectorised" in found["log"]
    assert len(run.clusters) == 2
    assert [name for name, content in found.items() if scan.finds_secret(content)] == []
    assert [name for name, content in found.items() if scan.finds_numbers(content)] == []


def test_the_scan_finds_them_where_they_are(tmp_path, caplog):
    _, scan, found = scanned_run(None, tmp_path, caplog)

    in_files = {
        name.split("/")[-1] for name, content in found.items() if scan.finds_numbers(content)
    }
    assert any(name.startswith("leaves") for name in in_files)
    assert any(name.startswith("node-0") for name in in_files)
    assert any(name.startswith("edge-") for name in in_files)
    assert any(name.startswith("held-") for name in in_files)
    for form in (SECRET.key, SECRET.key.hex().encode(), base64.b64encode(SECRET.key)):
        assert scan.finds_secret(b"key: " + form + b".")
    window = np.frombuffer(next(iter(scan.windows)), np.float32)
    assert scan.finds_numbers(json.dumps([1.5, *window.tolist(), 2.5]).encode())
    assert scan.finds_numbers(b"x" + window.tobytes())
    assert not scan.finds_numbers(window[:-1].tobytes())


def test_the_run_folder_says_what_was_done(tmp_path):
    simulate(replace(ROTATION, sketch=64, noise=NOISE), folder=tmp_path, rounds=1)

    assert json.loads((tmp_path / "run.json").read_text())["privacy"] == {
        "run": "tests",
        "epoch": 3,
        "secret": SECRET.fingerprint,
        "transform": "rotation",
        "sketch": 64,
        "noise": {"clip": 1.0, "multiplier": 0.05},
    }


def test_guesses_of_models_and_data_cannot_be_tested_on_the_run_folder(tmp_path):
    twin = clients()["client-0"]
    data = {"a": twin, "b": twin}

    def digests(privacy, folder, **settings):
        fb.simulate(
            smooth(), data, privacy=privacy, folder=tmp_path / folder, rounds=1,
            engine="reference", **settings,
        )  # fmt: skip
        about = json.loads((tmp_path / folder / "run.json").read_text())
        return [about["initial_model"], *(client["data"] for client in about["clients"])]

    model, a, b = digests(None, "plain")
    other = Privacy(Secret(bytes(32), "tests", epoch=3))
    of_runs = [digests(p, f"hidden {i}") for i, p in enumerate([ROTATION, PERMUTATION, other])]

    assert model == ModelState.of(smooth()).digest()
    assert a == b
    assert of_runs[0] == of_runs[1]  # by the same secret
    assert len({model, a, *of_runs[0], *of_runs[2]}) == 8  # also of twins
    assert digests(ROTATION, "hidden 0", resume=True) == of_runs[0]


def test_a_hidden_run_is_not_resumed_with_another_model(tmp_path):
    simulate(ROTATION, folder=tmp_path, rounds=1)

    with pytest.raises(fb.UnusableRun, match="its initial_model is not the one given"):
        fb.simulate(
            nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10)),
            clients(), privacy=ROTATION, folder=tmp_path, rounds=1, rule=THRESHOLDS, seed=5,
            training=fb.LocalTraining(optimizer=fb.sgd(0.2), epochs=2, batch_size=36),
            engine="vectorised", evaluate_every=ROUNDS, resume=True,
        )  # fmt: skip


# Sketches


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
@pytest.mark.parametrize("rule", RULES)
def test_the_clusters_are_found_from_sketches(rule, engine):
    plain = plain_run("smooth", rule, engine)

    sketched = simulate(Privacy(SECRET, sketch=128), rule=rule, engine=engine)

    assert sorted(sketched.clusters.values()) == sorted(plain.clusters.values())
    assert NEWCOMER in {move[1] for move in moves(sketched)}
    assert sketched.server.compare == "signal"
    assert sketched.server.num_signal == 128


def test_norms_of_sketches_are_those_of_updates_but_for_chance():
    plain = plain_run("smooth", "thresholds", "reference")
    sketched = simulate(Privacy(SECRET, sketch=256), engine="reference", rounds=8)

    for ours, theirs in zip(sketched.history, plain.history, strict=False):
        for name, value in theirs.record.decisions[0].measurements.items():
            if "norm" in name:
                assert ours.record.decisions[0].measurements[name] == pytest.approx(value, rel=0.25)


@pytest.mark.parametrize("rule", RULES)
def test_whole_updates_are_kept_only_while_a_cluster_waits(tmp_path, rule):
    lengths = {}  # of what is kept for each client: by the file's kind and the round

    def keep(entry):
        _, files = read_checkpoint(tmp_path / "state", "server")
        for name, tensors in files.items():
            kept = {tensor.shape[1] for tensor in tensors.values() if tensor.ndim == 2}
            if kept:
                lengths.setdefault(name.split("-")[0], {})[entry.record.round] = kept

    run = simulate(
        Privacy(SECRET, sketch=64), rule=rule, folder=tmp_path, checkpoint_every=1, on_round=keep
    )

    held = {number for number, _, verdict, *_ in decisions(run) if verdict == "hold"}
    assert len(run.clusters) == 2
    assert run.tree.num_params > 64
    assert set().union(*lengths["edge"].values()) == {64}
    assert set(lengths.get("held", {})) == held
    assert bool(held) == (rule == "auto")


# Noise


def test_noise_is_seeded_and_the_metrics_stay_at_home():
    privacy = Privacy(SECRET, noise=NOISE)

    runs = [simulate(privacy, rounds=3, engine=e, seed=s) for e, s in
            [("reference", 5), ("reference", 5), ("reference", 6)]]  # fmt: skip

    first, again, other = (fingerprint(run.server) for run in runs)
    assert first == again != other
    for entry in runs[0].history:
        assert all(metrics == {} for metrics in entry.record.metrics.values())


def test_every_client_draws_noise_of_its_own_in_every_round():
    sent = []

    def noted(client_id, this_round, update):
        sent.append(update.vector)
        return update

    # So much of it that there is hardly anything else.
    simulate(Privacy(SECRET, noise=Noise(clip=1e-3, multiplier=1e3)), before_send=noted, rounds=2)

    similarity = fb.cosine_similarity(np.stack(sent))
    assert len(sent) == 16
    assert np.abs(similarity - np.eye(16)).max() < 0.25  # of independent ones, about 0.03


def test_noise_comes_before_before_send():
    seen = []

    def noted(client_id, this_round, update):
        seen.append(update)
        return update

    simulate(Privacy(SECRET, noise=Noise(clip=0.5, multiplier=0)), before_send=noted, rounds=2)

    assert len(seen) == 16
    for update in seen:
        assert np.linalg.norm(update.vector) < 0.5 * (1 + 1e-5)
        assert update.metrics == {}


def test_noise_without_a_transform_leaves_the_coordinates_in_place():
    settings = {"rounds": 2, "engine": "reference"}
    no_noise = Noise(clip=1e6, multiplier=0)

    plain = simulate(None, **settings)
    clipped = simulate(Privacy(SECRET, transform=None, noise=no_noise), **settings)

    np.testing.assert_allclose(clipped.tree.root.params, plain.tree.root.params, atol=1e-6)


def test_with_noise_nobody_answers_trials():
    privacy = Privacy(SECRET, noise=NOISE)
    population = Population(
        MODELS["smooth"](), clients(), fb.LocalTraining(epochs=1), seed=0, device="cpu",
        engine="reference", privacy=privacy,
    )  # fmt: skip
    server = population.server_for(fb.NeverSplit(), weighting="equal", aggregate=fb.weighted_mean)
    node = server.tree.root
    trial = fb.Trial(params=node.params, buffers=node.buffers)

    assert population.losses({"client-0": (trial,)}) == {}


def test_every_update_costs_privacy_and_halves_cost_twice():
    privacy = Privacy(SECRET, noise=NOISE)
    num_halves = {}

    def noted(client_id, this_round, update):
        num_halves.setdefault(client_id, []).append(1 + (update.half_difference is not None))
        return update

    run = simulate(privacy, rule="auto", before_send=noted)

    counts = {client_id: sum(sent) for client_id, sent in num_halves.items()}
    assert set(counts) == set(clients())
    assert max(max(sent) for sent in num_halves.values()) == 2
    assert counts[NEWCOMER] < min(n for i, n in counts.items() if i != NEWCOMER)
    assert run.epsilons(1e-5) == {i: NOISE.epsilon(n, 1e-5) for i, n in counts.items()}


def test_whether_there_are_halves_does_not_depend_on_the_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 24, 6)).astype(np.float32)
    y = rng.integers(2, size=(6, 24))
    x[0] = 0  # without a bias nothing is learned from it: its halves differ by nothing
    data = {f"client-{i}": fb.ClientData((x[i], y[i]), None) for i in range(5)}
    data["few"] = fb.ClientData((x[5, :3], y[5, :3]), None)  # cannot be divided

    model = nn.Linear(6, 2, bias=False)
    nn.init.zeros_(model.weight)

    def of_run(engine):
        has_halves = {}

        def noted(client_id, this_round, update):
            has_halves[this_round, client_id] = update.half_difference is not None
            return update

        run = fb.simulate(
            model, data, rounds=3, engine=engine, before_send=noted,
            privacy=Privacy(SECRET, transform=None, noise=Noise(clip=1.0, multiplier=8.0)),
        )  # fmt: skip
        assert run.engine.name == engine
        return has_halves, run.epsilons(1e-5)

    has_halves, epsilons = of_run("vectorised")

    assert (has_halves, epsilons) == of_run("reference")
    assert has_halves[2, "client-0"]
    assert has_halves[2, "client-1"]
    assert not has_halves[2, "few"]
    assert epsilons["client-0"] == epsilons["client-1"] > epsilons["few"]


def test_without_noise_there_is_no_epsilon():
    with pytest.raises(ValueError, match=r"had no noise.*Noise\(clip=..., multiplier=...\)"):
        simulate(ROTATION, rounds=1).epsilons(1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "BatchNorm"}, "the model has 25 buffers.*GroupNorm"),
        ({"training": fb.LocalTraining(epochs=1, send_gradient=True)}, "send_gradient"),
        ({"method": fb.ifca, "num_clusters": 2}, "which model a client chooses"),
    ],
)
def test_what_noise_does_not_cover_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        simulate(Privacy(SECRET, noise=NOISE), rounds=1, **settings)


def test_lost_counts_are_not_taken_for_zero(tmp_path):
    privacy = Privacy(SECRET, noise=NOISE)
    with pytest.raises(Stopped):
        simulate(privacy, folder=tmp_path, checkpoint_every=1, on_round=stop_after(2))
    (tmp_path / "releases.jsonl").unlink()

    with pytest.raises(fb.DamagedFile, match=r"releases.jsonl.*it has 0 of 2 rounds"):
        simulate(privacy, folder=tmp_path, checkpoint_every=1, resume=True)


@pytest.mark.parametrize("count", [-5, 0, 1.5, True, "2", None])
def test_counts_that_cannot_be_are_damage(tmp_path, count):
    privacy = Privacy(SECRET, noise=NOISE)
    with pytest.raises(Stopped):
        simulate(privacy, folder=tmp_path, checkpoint_every=1, on_round=stop_after(1))
    line = seal({"round": 1, "releases": {"client-0": count}})
    (tmp_path / "releases.jsonl").write_bytes(line)

    with pytest.raises(fb.DamagedFile) as caught:
        simulate(privacy, folder=tmp_path, checkpoint_every=1, resume=True)

    assert "releases.jsonl line 1 cannot be read" in str(caught.value)
    assert f"client 'client-0' has {count!r} releases" in str(caught.value)


@pytest.fixture
def counts_path(tmp_path):
    """Counts of three rounds, in the second of which nobody sent anything."""
    releases = Releases(tmp_path / "releases.jsonl")
    for counts in ({"a": 1, "b": 2}, {}, {"a": 1}):
        releases.add(counts)
    return tmp_path / "releases.jsonl"


@pytest.mark.parametrize(
    ("num_rounds", "sums"), [(0, {}), (2, {"a": 1, "b": 2}), (3, {"a": 2, "b": 2})]
)
def test_counts_go_on_where_they_were(counts_path, num_rounds, sums):
    releases = Releases(counts_path)

    releases.go_on_after(num_rounds)
    assert releases.by_client == sums
    releases.add({"c": 1})

    again = Releases(counts_path)
    again.go_on_after(num_rounds + 1)
    assert again.by_client == {**sums, "c": 1}


def test_a_flipped_bit_of_the_counts_is_noticed_and_its_line_named(counts_path):
    whole = counts_path.read_bytes()
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1
        counts_path.write_bytes(changed)

        with pytest.raises(fb.DamagedFile) as caught:
            Releases(counts_path).go_on_after(3)

        lost_line_end = whole[position : position + 1] == b"\n"
        number = whole[:position].count(b"\n") + 1
        where = "is too short" if lost_line_end and number == 3 else f"line {number} cannot be read"
        assert str(caught.value).startswith(f"{counts_path} {where}")


def test_lines_of_counts_that_changed_places_are_damage(counts_path):
    lines = counts_path.read_bytes().splitlines(keepends=True)
    counts_path.write_bytes(lines[0] + lines[2] + lines[1])

    with pytest.raises(fb.DamagedFile, match=r"line 2 cannot be read.*it is round 3"):
        Releases(counts_path).go_on_after(3)


def test_the_counts_are_on_the_disk_before_the_state_that_needs_them(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(file):
        calls.append((os.fstat(file).st_ino, os.fstat(file).st_size))
        fsync(file)

    def noted_replace(source, target, **more):
        calls.append(Path(target).name)
        replace(source, target, **more)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)

    simulate(Privacy(SECRET, noise=NOISE), folder=tmp_path, rounds=1, checkpoint_every=1)

    counts = (tmp_path / "releases.jsonl").stat()
    assert counts.st_size > 0
    assert (counts.st_ino, counts.st_size) in calls[: calls.index("state.json")]


# What cannot be meant


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"secret": b"x" * 32}, TypeError, "secret is a bytes; pass a Secret"),
        ({"transform": "rotations"}, ValueError, "transform is 'rotations'; it must be one of"),
        ({"sketch": 0}, ValueError, "sketch is 0; it must be at least 16"),
        ({"sketch": 15}, ValueError, "sketch is 15; it must be at least 16"),
        ({"sketch": True}, TypeError, "sketch is True; it must be a whole number"),
        ({"sketch": 64.0}, TypeError, "sketch is 64.0; it must be a whole number"),
        ({"sketch": "64"}, TypeError, "sketch is '64'; it must be a whole number"),
        ({"sketch": 64, "transform": "permutation"}, ValueError, "after a rotation only"),
        ({"sketch": 64, "transform": None}, ValueError, "after a rotation only"),
        ({"noise": 1.0}, TypeError, r"noise is 1.0; pass Noise\(clip"),
    ],
)
def test_impossible_settings_are_named(settings, error, message):
    with pytest.raises(error, match=message):
        Privacy(**{"secret": SECRET, **settings})


def test_a_sketch_longer_than_the_model_is_refused():
    with pytest.raises(
        ValueError, match=r"sketch is 10000, but .* has only 960 numbers; take fewer of them"
    ):
        simulate(Privacy(SECRET, sketch=10_000), rounds=1)


def test_a_size_may_come_from_numpy(tmp_path):
    simulate(Privacy(SECRET, sketch=np.int64(64)), rounds=1, folder=tmp_path)

    assert json.loads((tmp_path / "run.json").read_text())["privacy"]["sketch"] == 64


@pytest.mark.parametrize("method", [fb.simulate, fb.fedavg, fb.local, fb.oracle, fb.ifca])
@pytest.mark.parametrize("privacy", [SECRET, "rotation", True, False, {}], ids=repr)
def test_what_is_no_privacy_is_named(method, privacy):
    settings = {"num_clusters": 2} if method is fb.ifca else {}

    with pytest.raises(TypeError, match=r"privacy is a \w+; pass Privacy\(Secret"):
        simulate(privacy, method=method, rounds=1, **settings)


TINY = {"x": fb.ClientData((np.float32([[1, 2], [3, 4]]), np.array([0, 1])), None)}


def test_a_model_of_a_few_numbers_is_hardly_hidden():
    with pytest.warns(RuntimeWarning, match="a model of 6 numbers is hardly hidden by a rotation"):
        fb.simulate(nn.Linear(2, 2), TINY, rounds=1, privacy=ROTATION)


def test_of_a_model_that_is_not_to_be_hidden_nothing_is_said():
    fb.simulate(nn.Linear(2, 2), TINY, rounds=1, privacy=replace(ROTATION, transform=None))


def test_a_sketch_of_a_model_of_a_few_numbers_is_refused():
    with (
        pytest.warns(RuntimeWarning, match="hardly hidden"),
        pytest.raises(ValueError, match=r"sketch is 16, .* only 6 numbers; take sketch=None"),
    ):
        fb.simulate(nn.Linear(2, 2), TINY, rounds=1, privacy=Privacy(SECRET, sketch=16))
