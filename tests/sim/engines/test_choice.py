import json

import numpy as np
import pytest
import torch
from torch import nn

import fedbranch as fb
from fedbranch.sim import Normalised
from fedbranch.sim.engines.choice import preferred
from fedbranch.sim.engines.stacked.layout import pooled_first
from sim.engines.stacked.test_engine import seeded
from sim.test_simulation import RULE, TRAINING, folder_bytes, make_clients, make_model, simulate


@pytest.mark.parametrize(
    ("model", "device", "expected"),
    [
        (nn.Linear(64, 10), "cpu", "vectorised"),
        (nn.Sequential(nn.Linear(784, 200), nn.Linear(200, 10)), "cpu", "vectorised"),
        (nn.Sequential(Normalised([0.5], [0.5]), nn.Linear(784, 10)), "cpu", "vectorised"),
        (nn.Linear(5000, 5000), "cpu", "workers"),
        (nn.Conv2d(1, 4, 3), "cpu", "workers"),
        (nn.LSTM(5, 5), "cpu", "workers"),
        (nn.Conv2d(1, 4, 3), "cuda", "vectorised"),
        (nn.LSTM(5, 5), "cuda", "vectorised"),
    ],
)
def test_the_choice_depends_on_model_batch_and_device(model, device, expected):
    training = fb.LocalTraining(epochs=1, batch_size=20)

    name, reason = preferred(model, training, device)

    assert name == expected
    assert reason


def test_all_engines_decide_alike():
    runs = {engine: simulate(engine=engine) for engine in ("vectorised", "workers", "reference")}

    reference = runs["reference"]
    assert len(reference.clusters) > 1  # there is something to decide
    for engine, run in runs.items():
        assert run.engine.name == engine
        assert run.clusters == reference.clusters
        for entry, expected in zip(run.history, reference.history, strict=True):
            ours, theirs = entry.record.decisions, expected.record.decisions
            assert [(d.verdict, d.groups) for d in ours] == [(d.verdict, d.groups) for d in theirs]


def test_the_engine_is_recorded_and_kept_on_resume(tmp_path):
    def run(folder, rounds=15, **settings):
        return fb.simulate(
            make_model(), make_clients(), rule=RULE, rounds=rounds, training=TRAINING, seed=3,
            folder=folder, checkpoint_every=5, **settings,
        )  # fmt: skip

    class Stop(Exception):
        pass

    def stop(entry):
        if entry.record.round == 7:
            raise Stop

    whole = run(tmp_path / "whole", engine="workers")
    with pytest.raises(Stop):
        run(tmp_path / "parts", engine="workers", on_round=stop)
    ended = run(tmp_path / "parts", resume=True)  # auto would take another one

    assert whole.engine.name == ended.engine.name == "workers"
    assert json.loads((tmp_path / "parts" / "run.json").read_text())["engine"] == "workers"
    assert folder_bytes(tmp_path / "parts") == folder_bytes(tmp_path / "whole")
    with pytest.raises(fb.UnusableRun, match="its engine is not the one given now"):
        run(tmp_path / "parts", resume=True, engine="reference")


def test_unknown_engines_and_impossible_numbers_of_workers_are_refused():
    with pytest.raises(ValueError, match="engine is 'fast'; it must be one of"):
        simulate(engine="fast")
    with pytest.raises(ValueError, match="num_workers is 0"):
        simulate(engine="workers", num_workers=0)


def test_every_round_says_how_many_examples_were_seen():
    run = fb.fedavg(
        make_model(),
        make_clients(),
        rounds=2,
        training=fb.LocalTraining(epochs=3, batch_size=7),
        participation=0.5,
    )

    assert [entry.num_visits for entry in run.history] == [3 * 3 * 40] * 2


def test_pooling_before_relu_is_the_same_to_the_bit():
    torch.manual_seed(0)
    x = torch.randn(6, 2, 9, 9)
    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(3, padding=1)))
    x[0] = 0.0  # ties

    results = []
    for arrange in (lambda m: m, pooled_first):
        arranged = arrange(nn.Sequential(*model))
        inputs = x.clone().requires_grad_()
        outputs = arranged(inputs)
        gradient = torch.autograd.grad(outputs.square().sum(), inputs)[0]
        results.append((outputs, gradient, [type(module) for module in arranged]))

    (before, gradient_before, _), (after, gradient_after, order) = results
    assert order == [nn.Conv2d, nn.MaxPool2d, nn.ReLU]
    assert torch.equal(before, after)
    assert torch.equal(gradient_before, gradient_after)


def test_clients_come_and_go_as_they_did_when_all_were_asked_every_round():
    rng = np.random.default_rng(0)
    times = [(1, None), (1, 3), (2, None), (3, 5), (4, None)]
    clients = {
        f"c{i}": fb.ClientData(
            train=(rng.normal(size=(9, 3)), rng.integers(0, 2, 9)), joins=joins, leaves=leaves
        )
        for i, (joins, leaves) in enumerate(times)
    }

    run = fb.fedavg(nn.Linear(3, 2), clients, rounds=6, training=fb.LocalTraining(epochs=1))

    for entry in run.history:
        expected = [i for i, client in clients.items() if client.takes_part(entry.record.round)]
        assert sorted(entry.record.metrics) == expected
