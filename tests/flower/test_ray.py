"""On Flower's own simulation engine, beside Flower's own FedAvg."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedbranch.runs import RunFolder

SCRIPT = Path(__file__).parent / "ray_federation.py"
APP = Path(__file__).parents[2] / "examples" / "flower_app"
NUM_GROUPS = 4
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(APP), str(SCRIPT.parent)]),
    "FLWR_TELEMETRY_ENABLED": "0",  # both would call home otherwise
    "RAY_USAGE_STATS_ENABLED": "0",
}


@pytest.mark.slow
def test_every_client_of_every_group_is_better_off_than_under_fedavg(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=400,
    )

    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads((tmp_path / "found.json").read_text())
    # Clients are named by their partition, though the server never sees it before they answer.
    assert found["partitions"] == {f"partition-{i:04d}": i for i in range(20)}
    groups = [[f"partition-{i:04d}" for i in range(g, 20, NUM_GROUPS)] for g in range(NUM_GROUPS)]
    assert sorted(found["clusters"]) == groups
    assert found["clustered"].keys() == found["fedavg"].keys() == found["partitions"].keys()
    for client_id, accuracy in found["clustered"].items():
        assert accuracy > found["fedavg"][client_id]
    assert RunFolder(tmp_path / "run").is_complete
