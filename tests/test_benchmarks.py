import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import simulate, workloads
workload = workloads.digits_workload("W2", 12, participation=1.0)
print(simulate.check_equality(workload, "cpu"))
print(min(simulate.simulated(workload, 2, "cpu")), min(simulate.bare_loop(workload, 1, "cpu")))
"""


def test_the_benchmark_checks_equality_and_times_both():
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, BENCHMARKS], capture_output=True, text=True, timeout=300
    )

    assert result.returncode == 0, result.stderr
    difference, ours, theirs = map(float, result.stdout.split())
    assert 0 <= difference < 1e-4
    assert ours > 0
    assert theirs > 0


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_committed_results_reach_what_they_must(path):
    for result in json.loads(path.read_text())["results"]:
        ratios = result.get("times faster than", {})
        for name, least in result["must reach"].items():
            if name == "ratio at most":
                assert result["ratio"] <= least
                if "FedAvg" in result["seconds per round"]:
                    seconds = result["seconds per round"]
                    ratio = seconds["fedbranch"] / seconds["FedAvg"]
                    assert result["ratio"] == pytest.approx(ratio, rel=1e-3)
            else:
                assert ratios[name] >= least
        for name, ratio in ratios.items():
            seconds = result["seconds per round"]
            assert ratio == pytest.approx(seconds[name] / seconds["fedbranch"], rel=1e-3)
