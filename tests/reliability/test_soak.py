"""Long runs take no more memory and no more files than short ones."""

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import fedbranch as fb

ROUNDS = 2000
SETTLED = 200  # rounds, after which nothing may grow any more
MOST_GROWTH = 0.05
REPOSITORY = Path(__file__).parents[2]


def soaked(kind, folder):
    result = subprocess.run(
        [sys.executable, "-m", "tests.reliability.soak", kind, str(ROUNDS), str(folder)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.reliability
@pytest.mark.skipif(sys.platform != "linux", reason="it looks at /proc")
def test_memory_and_open_files_stay_as_they_are(tmp_path, measured):
    phrases = []
    for kind, name in [("server", "a server"), ("simulate", "the simulator")]:
        report = soaked(kind, tmp_path / kind)

        events = report["events"]
        later = [seen for seen in report["seen"] if seen["round"] >= SETTLED]
        growth = max(seen["memory_bytes"] for seen in later) / later[0]["memory_bytes"] - 1
        assert later[-1]["round"] == ROUNDS
        assert events["split"] >= 1
        assert min(events["joined"], events["left"], events["routed"]) >= 100
        assert {seen["open_files"] for seen in later} == {later[0]["open_files"]}
        assert growth <= MOST_GROWTH
        phrases.append(
            f"{name} (splits {events['split']}, joins {events['joined']}, leaves {events['left']}): "
            f"memory {growth:+.1%} of {later[0]['memory_bytes'] / 2**20:.0f} MiB after round "
            f"{SETTLED}, {later[0]['open_files']} open files throughout"
        )
    measured("soak", "; ".join(phrases))


def test_a_run_with_a_folder_does_not_keep_its_rounds_in_memory(tmp_path):
    rng = np.random.default_rng(0)
    clients = {
        f"c{i}": fb.ClientData((rng.normal(size=(9, 3)), rng.integers(0, 2, 9))) for i in range(3)
    }
    rounds = []

    run = fb.fedavg(
        torch.nn.Linear(3, 2),
        clients,
        rounds=6,
        training=fb.LocalTraining(epochs=1),
        folder=tmp_path / "run",
        on_round=lambda entry: rounds.append(weakref.ref(entry)),
    )
    gc.collect()

    assert [reference() for reference in rounds] == [None] * 6
    assert [entry.record.round for entry in run.history] == [1, 2, 3, 4, 5, 6]
