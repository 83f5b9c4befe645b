"""What is left of rounds and matrices when there are too many, and how runs lie over each other."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbranch.core.geometry import cosine_similarity
from fedbranch.core.linkage import hierarchy
from fedbranch.report.facts.facts import read_facts
from fedbranch.report.facts.folding import folded, thinned
from fedbranch.report.facts.natural_order import natural_order
from fedbranch.report.facts.series import quantile
from fedbranch.report.facts.similarities import dendrogram_order
from fedbranch.runs import RunFolder
from report.folders import about, played, split_run


@given(
    rounds=st.lists(st.integers(1, 500), unique=True, min_size=1).map(sorted),
    kept=st.sets(st.integers(1, 500), max_size=30),
    most=st.integers(2, 60),
)
def test_thinned_rounds_keep_both_ends_and_what_must_stay(rounds, kept, most):
    left = thinned(rounds, kept, most)

    assert left == sorted(set(left))
    assert set(left) <= set(rounds)
    assert len(left) == min(len(rounds), most)
    assert {rounds[0], rounds[-1]} <= set(left)
    must_stay = kept & set(rounds)
    if len(must_stay | {rounds[0], rounds[-1]}) <= most:
        assert must_stay <= set(left)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_are_numpys(values, share):
    assert quantile(np.sort(values), share) == pytest.approx(np.quantile(values, share))


@pytest.mark.parametrize("seed", range(10))
def test_in_the_order_of_the_dendrogram_every_group_stands_together(seed):
    similarity = cosine_similarity(np.random.default_rng(seed).normal(size=(9, 4)))

    order = dendrogram_order(similarity)

    assert sorted(order) == list(range(9))
    for num_groups in range(1, 10):
        groups = hierarchy(similarity).groups(num_groups)[order]
        assert len(list(itertools.groupby(groups))) == num_groups


@pytest.mark.parametrize(("num_rows", "size"), [(7, 3), (9, 9), (10, 4), (5, 1)])
def test_folding_averages_neighbours(num_rows, size):
    matrix = np.random.default_rng(0).normal(size=(num_rows, num_rows))

    cells = folded(matrix, size)

    edges = [i * num_rows // size for i in range(size + 1)]
    for i, j in itertools.product(range(size), repeat=2):
        block = matrix[edges[i] : edges[i + 1], edges[j] : edges[j + 1]]
        assert cells[i, j] == pytest.approx(block.mean())


def test_names_are_sorted_as_people_sort_them():
    assert sorted(["c10", "10", "c9", "9", "c"], key=natural_order) == ["9", "10", "c", "c9", "c10"]


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


def test_folders_of_the_same_name_are_told_apart(tmp_path):
    folders = [split_run(tmp_path / part / "run") for part in "ab"]

    assert [run["name"] for run in read_facts(folders)["runs"]] == ["run", "run (2)"]
