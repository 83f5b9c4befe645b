import json

import pytest
from torch import nn

import fedbranch as fb
from fedbranch.sim import Normalised
from fedbranch.sim.engines.choice import preferred
from sim.two_groups import RULE, TRAINING, folder_bytes, make_clients, make_model, simulate


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
    assert len(reference.clusters) > 1  # so there were decisions to compare
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
    ended = run(tmp_path / "parts", resume=True)  # "auto" would choose another engine

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
