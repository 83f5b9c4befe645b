import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCENARIOS = BENCHMARKS / "results" / "scenarios.json"
OF_SERVER = sorted((BENCHMARKS / "results").glob("server-*.json"))
RESULTS = sorted(set((BENCHMARKS / "results").glob("*.json")) - {SCENARIOS, *OF_SERVER})

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


# Case and target of what was not reached; docs/scale.md says why.
MISSED = {("ingest-few-arrays", "times FedAvg's updates per second")}


@pytest.mark.parametrize("path", OF_SERVER, ids=lambda path: path.stem)
def test_the_committed_results_of_the_server_reach_what_they_must(path):
    for result in json.loads(path.read_text())["results"]:
        for name, (relation, limit) in result["must reach"].items():
            is_reached = result[name] <= limit if relation == "at most" else result[name] >= limit
            assert is_reached != ((result["case"], name) in MISSED)


@pytest.mark.parametrize("path", OF_SERVER, ids=lambda path: path.stem)
def test_the_committed_results_of_the_server_are_in_the_documentation(path):
    docs = (BENCHMARKS.parent / "docs" / "scale.md").read_text()
    printed = subprocess.run(
        [sys.executable, BENCHMARKS / "server.py", "cpu", "--table", path],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout.strip()  # fmt: skip

    assert printed in docs


def test_the_servers_benchmark_measures_similarities_beside_its_peers():
    script = """
import sys
sys.path.insert(0, sys.argv[1])
import server
server.peers = lambda updates, folder: {"NumPy alone": lambda: server.fb.bipartition(
    server.fb.cosine_similarity(updates.astype(float)))}
import argparse, json
options = argparse.Namespace(repeats=1, peers=None)
print(json.dumps(server.similarities_and_split(300, 400, options)))
print(json.dumps(server.stream(2000, 3000, 256)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, BENCHMARKS], capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines()[-2:]:
        result = json.loads(line)
        assert all(seconds > 0 for seconds in result["seconds"].values())
        assert result["times the bare product"] > 0


def test_a_small_crowd_is_found_as_the_large_one_is():
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "crowd.py", "--clients", "2000", "--params", "2000"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "round 3" in done.stdout
    assert "the 10 groups were found exactly" in done.stdout


def test_the_committed_scenarios_are_what_the_documentation_says():
    report = json.loads(SCENARIOS.read_text())
    docs = (BENCHMARKS.parent / "docs" / "rules.md").read_text()
    printed = subprocess.run(
        [sys.executable, BENCHMARKS / "scenarios.py", "--table", SCENARIOS],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout.strip()  # fmt: skip

    assert printed in docs
    found = report["summary"]
    assert found["false splits among the congruent"] == 0
    gaining, exact = (
        found[name] for name in ("incongruent where the oracle gains", "exact recovery there")
    )
    assert f"{exact} of {gaining}" in docs
    assert len(report["problems"]) == found["problems"]


DRAW = """
import sys
sys.path.insert(0, sys.argv[1])
import problems, scenarios
one, same, other = (problems.draw("label swap, k = 3", seed, None) for seed in (7, 7, 8))
assert one.drawn == same.drawn != other.drawn
assert all((one.clients[i].train.x == same.clients[i].train.x).all() for i in one.clients)
scenarios.ROUNDS = 6
result = scenarios.studied("XOR, linear model", 1, None, "cpu")
print(scenarios.line(result))
print(scenarios.table([result]))
print(scenarios.summary([result]))
assert result["AutoRule"]["ARI"] == 1
"""


def test_a_scenario_is_drawn_and_studied():
    result = subprocess.run(
        [sys.executable, "-c", DRAW, BENCHMARKS], capture_output=True, text=True, timeout=300
    )

    assert result.returncode == 0, result.stderr
    assert "exactly in 1 of 1" in result.stdout
