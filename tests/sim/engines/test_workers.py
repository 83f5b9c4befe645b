import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import fedbranch as fb
from fedbranch.errors import ClientFailed
from fedbranch.sim.engines import workers
from fedbranch.sim.engines.workers import Workers
from fedbranch.training.model_state import ModelState
from sim.engines.small_problems import cnn, make_clients, mlp, seeded

TRAINING = fb.LocalTraining(epochs=1, batch_size=10)
SIZES = [12, 40, 9, 25, 31]


def run(model, shape=(6,), training=TRAINING, **settings):
    return fb.fedavg(
        model, make_clients(SIZES, shape), rounds=3, training=training, **settings
    )  # fmt: skip


@pytest.mark.parametrize(("model", "shape"), [(mlp(nn.Dropout(0.2)), (6,)), (cnn(), (1, 8, 8))])
def test_the_number_of_workers_changes_no_bit(model, shape):
    runs = [run(model, shape, engine="workers", num_workers=n) for n in (1, 2, 3)]

    first = [entry.to_json() for entry in runs[0].history]
    for other in runs[1:]:
        assert other.engine.name == "workers"
        assert np.array_equal(other.tree.root.params, runs[0].tree.root.params)
        assert [entry.to_json() for entry in other.history] == first


@pytest.mark.parametrize(
    ("model", "shape"),
    [(mlp(nn.Dropout(0.2)), (6,)), (mlp(nn.BatchNorm1d(8)), (6,)), (cnn(), (1, 8, 8))],
)
def test_workers_agree_with_the_reference(model, shape):
    ours = run(model, shape, engine="workers")
    reference = run(model, shape, engine="reference")

    for name in ("params", "buffers"):
        expected = getattr(reference.tree.root, name)
        np.testing.assert_allclose(getattr(ours.tree.root, name), expected, atol=1e-5)
    for client_id, metrics in reference.evaluation.items():
        assert ours.evaluation[client_id] == pytest.approx(metrics, rel=1e-4)


def test_a_client_that_fails_is_named_and_no_process_is_left():
    clients = make_clients(SIZES)
    clients["c3"].train.y[0] = 17
    before = children()

    with pytest.raises(ClientFailed, match=r"client 'c3' could not be trained.*\(25, 6\)"):
        fb.fedavg(mlp(), clients, rounds=1, training=TRAINING, engine="workers")

    assert children() == before


def test_after_an_error_the_next_call_gets_its_own_results():
    clients = make_clients(SIZES)
    clients["c0"].train.y[0] = 17
    model = mlp()
    engine = Workers(model, ModelState.of(model), clients, TRAINING, num_workers=2)
    server = fb.Server(ModelState.of(model).params.numel(), rule=fb.NeverSplit())
    tasks = server.plan(clients)
    good = {client_id: tasks[client_id] for client_id in ["c1", "c2"]}
    expected = engine.updates(good, {"c1": 1, "c2": 2})

    for _ in range(10):
        with pytest.raises(ClientFailed, match="'c0'"):
            engine.updates(tasks, dict.fromkeys(tasks, 7))
        found = engine.updates(good, {"c1": 1, "c2": 2})
        for client_id, update in expected.items():
            assert np.array_equal(found[client_id].vector, update.vector)
    engine.close()


def test_a_worker_that_dies_is_an_error_that_says_so():
    model = mlp()
    engine = Workers(model, ModelState.of(model), make_clients(SIZES), TRAINING, num_workers=2)
    server = fb.Server(ModelState.of(model).params.numel(), rule=fb.NeverSplit())
    tasks = server.plan(["c0", "c1", "c2"])
    engine.updates(tasks, dict.fromkeys(tasks, 1))
    for process in multiprocessing.active_children():
        os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(ClientFailed, match="exit code -9"):
        engine.updates(tasks, dict.fromkeys(tasks, 1))

    engine.close()


def children():
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()


def test_where_processes_cannot_be_forked_the_reference_does_the_work(monkeypatch):
    monkeypatch.setattr(workers.sys, "platform", "darwin")

    ended = run(mlp(), engine="workers")

    assert ended.engine.name == "reference"
    assert "Linux" in ended.engine.reason


def test_large_models_at_several_leaves_do_not_block_the_pipes():
    rng = np.random.default_rng(0)
    clients = {
        f"c{i}": fb.ClientData(
            train=(rng.normal(size=(20, 200)), rng.integers(0, 3, 20)), group=str(i % 3)
        )
        for i in range(9)
    }
    model = seeded(lambda: nn.Sequential(nn.Linear(200, 2000), nn.ReLU(), nn.Linear(2000, 3)))

    ended = fb.oracle(
        model, clients, rounds=2, training=fb.LocalTraining(epochs=1), engine="workers",
        num_workers=2,
    )  # fmt: skip

    assert len(ended.clusters) == 3


def test_a_daemonic_process_has_no_workers_and_says_so(monkeypatch):
    monkeypatch.setitem(workers.multiprocessing.current_process()._config, "daemon", True)

    ended = run(mlp(), engine="workers")

    assert ended.engine.name == "reference"
    assert "daemonic" in ended.engine.reason
