"""Runs laid over each other."""

from fedbranch.report.facts.facts import read_facts
from fedbranch.runs import RunFolder
from report.folders import about, played


def seeded(path, seed, accuracies, **kwargs):
    folder = RunFolder.create(path, about("ab", seed=seed, **kwargs))
    for number, (a, b) in enumerate(accuracies, start=1):
        joined = ("a", "b") if number == 1 else ()
        folder.append(played(number, {0: 2}, {"a": a, "b": b}, joined=joined))
    return folder


def test_seeds_are_a_band_over_the_rounds_that_all_have(tmp_path):
    folders = [
        seeded(tmp_path / "one", 0, [(0.1, 0.3), (0.5, 0.7)]),
        seeded(tmp_path / "two", 1, [(0.3, 0.5), (0.5, 0.5), (0.9, 0.9)]),
    ]

    comparison = read_facts(folders)["comparison"]

    assert comparison["metric"] == "accuracy"
    assert comparison["curves"] == [
        {
            "title": "CFL",
            "num_runs": 2,
            "rounds": [1, 2],
            "mean": [0.3, 0.55],
            "low": [0.2, 0.5],
            "high": [0.4, 0.6],
            "is_reference": False,
        }
    ]
    second = comparison["table"][1]
    assert (second["run"], second["seed"], second["rounds"]) == ("two", 1, 3)
    assert (second["last"]["accuracy"], second["worst"]["loss"]) == (0.9, 0.1)


def test_runs_with_other_rules_are_curves_of_their_own(tmp_path):
    other = {"name": "NeverSplit", "settings": {}}
    folders = [
        seeded(tmp_path / "one", 0, [(0.1, 0.3)]),
        seeded(tmp_path / "two", 0, [(0.1, 0.3)], rule=other),
    ]

    curves = read_facts(folders)["comparison"]["curves"]

    assert [curve["title"] for curve in curves] == [
        "CFL, AutoRule(coverage=0.5)",
        "CFL, NeverSplit()",
    ]


def test_the_same_baseline_of_two_runs_counts_once(tmp_path):
    folders = []
    for name, rule in (("one", "AutoRule"), ("two", "NeverSplit")):
        settings = {"name": rule, "settings": {}}
        folders.append(seeded(tmp_path / name, 0, [(0.1, 0.3)], rule=settings))
        seeded(tmp_path / name / "baselines/fedavg", 0, [(0.2, 0.2)], method="fedavg")

    curves = read_facts(folders)["comparison"]["curves"]

    assert [(c["num_runs"], c["is_reference"]) for c in curves] == [
        (1, False),
        (1, True),
        (1, False),
    ]
