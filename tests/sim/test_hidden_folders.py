"""Folders and logs of hidden runs: resumed to the same bytes, no secrets or plain numbers."""

import base64
import json
import logging
import re
from dataclasses import replace

import numpy as np
import pytest
from torch import nn

import fedbranch as fb
from fakes import fingerprint
from fedbranch.privacy import Privacy, Secret
from fedbranch.training.model_state import ModelState
from sim.hidden_runs import (
    MODELS,
    NOISE,
    PERMUTATION,
    ROTATION,
    ROUNDS,
    SECRET,
    THRESHOLDS,
    clients,
    files_of,
    simulate,
    smooth,
)
from sim.two_groups import Interrupted, interrupt_after


@pytest.mark.parametrize(
    "privacy",
    [PERMUTATION, ROTATION, Privacy(SECRET, sketch=64), Privacy(SECRET, noise=NOISE)],
    ids=["permutation", "rotation", "sketch", "noise"],
)
def test_a_resumed_run_ends_in_the_same_bytes(tmp_path, privacy):
    settings = {"rule": "auto", "checkpoint_every": 3}
    at_once = simulate(privacy, folder=tmp_path / "at once", **settings)
    with pytest.raises(Interrupted):
        simulate(privacy, folder=tmp_path / "stopped", on_round=interrupt_after(11), **settings)

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


NUM_CONSECUTIVE = 8


class Scan:
    """Searches bytes and text for a secret, and for consecutive plain numbers."""

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
            # Zeros are skipped: the pixels at the corners are always blank.
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
    """Run and log everything; return the run, a scan for its numbers, and all files and the log."""
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


def test_the_scan_finds_secrets_and_plain_numbers_where_they_are(tmp_path, caplog):
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


def test_the_run_folder_records_the_privacy_settings(tmp_path):
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
    assert of_runs[0] == of_runs[1]  # the same secret
    assert (
        len({model, a, *of_runs[0], *of_runs[2]}) == 8
    )  # two clients with the same data differ, too
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
