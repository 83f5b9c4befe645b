"""The model of a run: the tree after the last round, whatever was saved."""

import pytest

from fedbranch.report.facts.facts import page_facts
from fedbranch.report.facts.run import read_run
from fedbranch.report.text.run_json import run_json
from fedbranch.runs import RunFolder
from report.folders import about, decision, played, split, split_run


@pytest.fixture
def run(tmp_path):
    return read_run(split_run(tmp_path / "small"))


def test_the_clusters_are_those_after_the_last_round(run):
    assert run.reading.saved.round == 2
    assert len(run.history) == 4
    assert run.clusters == {1: ["a", "b"], 2: ["c", "d"]}  # d was routed in round 4
    assert run.known_client_ids == ["a", "b", "c", "d"]
    assert run.finds_true_groups


def test_page_and_terminal_have_the_same_clusters_and_groups(run):
    page, terminal = page_facts([run])["runs"][0], run_json(run)

    ids = page["clients"]["ids"]
    of_page = {
        str(node["id"]): [ids[i] for i in node["clients"]]
        for node in page["nodes"]
        if not node["children"]
    }
    assert of_page == terminal["clusters"]
    assert [(n["id"], n["num_clients"], n["split_in_round"]) for n in page["nodes"]] == [
        (n["node_id"], n["num_clients"], n["split_in_round"]) for n in terminal["tree"]
    ]
    assert {str(n["id"]): n["groups"] for n in page["nodes"]} == terminal["true_groups"] | {
        "0": {"x": 2, "y": 2}
    }
    assert sum(page["clients"]["refused"]) == sum(terminal["refused"].values())


def test_the_json_of_the_terminal_has_the_documented_keys(run):
    assert set(run_json(run)) == {
        "run", "is_complete", "rounds", "metric", "clusters", "names", "true_groups", "tree",
        "finds_true_groups", "splits", "last_decisions", "refused", "mean",
    }  # fmt: skip


def test_the_last_decision_on_a_leaf_is_its_last_examination(tmp_path):
    folder = RunFolder.create(tmp_path / "run", about("ab"))
    waits = decision(1, 3, is_examination=False)
    folder.append(played(1, {1: 1, 2: 1}, joined=("a", "b"), **split(0, 1, _1="a", _2="b")))
    folder.append(played(2, {1: 1, 2: 1}, decisions=(decision(1, 2),)))
    folder.append(played(3, {1: 1, 2: 1}, decisions=(waits, decision(2, 3, is_examination=False))))

    run = read_run(folder)

    assert [(d.node_id, d.round) for d in run.last_decisions] == [(1, 2), (2, 3)]
    assert [(d.node_id, d.round) for d in run.examinations] == [(0, 1), (1, 2)]


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_run_is_complete_with_all_baselines_that_its_experiment_names(tmp_path, is_complete):
    experiment = {"experiment": {"baselines": ["fedavg"]}}
    folder = split_run(tmp_path / "run", about=experiment)
    folder.finish({"rounds": 4})
    baseline = RunFolder.create(tmp_path / "run/baselines/fedavg", about(method="fedavg"))
    if is_complete:
        baseline.finish({"rounds": 4})

    run = read_run(folder)

    assert run.is_complete == is_complete
    assert run.missing_baselines == (set() if is_complete else {"fedavg"})
    assert list(run.final_by_method) == ["cfl", "fedavg"][: 1 + is_complete]


def test_groups_that_are_not_known_are_neither_found_nor_missed(tmp_path):
    folder = RunFolder.create(tmp_path / "run", about("ab", groups={"a": "x"}))
    folder.append(played(1, {0: 2}, joined=("a", "b")))

    assert read_run(folder).finds_true_groups is None


def test_clusters_that_differ_from_the_groups_do_not_find_them(tmp_path):
    folder = RunFolder.create(tmp_path / "run", about("ab", groups={"a": "x", "b": "y"}))
    folder.append(played(1, {0: 2}, joined=("a", "b")))

    assert read_run(folder).finds_true_groups is False
