"""The facts of runs, as one JSON object for the page."""

import base64
import json

import numpy as np
import pytest

import fedbranch as fb
from fedbranch.report.facts.facts import read_facts
from fedbranch.runs import Round, RunFolder
from fedbranch.server.records import RoundRecord
from report.folders import about, decision, pass_rounds, played, split, split_run
from tests.flower.federations import make_grid, start


def only_run(folder):
    return read_facts([folder])["runs"][0]


@pytest.fixture
def run(tmp_path):
    return only_run(split_run(tmp_path / "small"))


def test_a_run_is_named_after_its_folder_and_no_path_is_shown(tmp_path):
    facts = read_facts([split_run(tmp_path / "small")])

    assert facts["schema"] == 1
    assert facts["fedbranch"] == fb.__version__
    assert facts["comparison"] is None
    run = facts["runs"][0]
    assert run["name"] == "small"
    assert str(tmp_path) not in json.dumps(facts)
    assert run["how_to_go_on"] == "continue with: fedbranch resume small"
    assert (run["rounds_done"], run["rounds_planned"], run["is_complete"]) == (4, 4, False)
    assert run["rule"] == "AutoRule(coverage=0.5)"


def test_the_main_metric_is_the_first_that_is_not_a_loss(run):
    assert run["metrics"] == [
        {"name": "accuracy", "is_better": "higher", "is_log": False},
        {"name": "loss", "is_better": "lower", "is_log": False},
    ]


def test_clients_are_columns_up_to_the_last_round_not_only_the_saved_one(run):
    clients = run["clients"]

    assert clients["ids"] == ["a", "b", "c", "d"]
    assert clients["leaf"] == [1, 1, 2, 2]  # d was routed after the server was saved
    assert clients["examples"] == [10, 10, 10, 10]
    assert clients["group"] == ["x", "x", "y", "y"]
    assert clients["joined"] == [None, None, None, 3]
    assert clients["left"] == [None] * 4
    assert clients["refused"] == [0, 1, 0, 0]
    assert clients["refusals"] == [[], [[2, "too long"]], [], []]
    assert clients["last"]["accuracy"] == [0.9, 0.7, 0.8, 0.6]
    assert clients["plain"] is None


def test_nodes_have_their_clients_and_means(run):
    root, left, right = run["nodes"]

    assert (root["children"], root["split_in_round"], root["clients"]) == ([1, 2], 2, [0, 1, 2, 3])
    assert root["groups"] == {"x": 2, "y": 2}
    assert root["last"]["accuracy"] == 0.75
    assert (left["parent"], left["born"], left["clients"], left["num_clients"]) == (0, 2, [0, 1], 2)
    assert right["last"]["accuracy"] == 0.7


def test_a_cluster_has_a_curve_while_it_trained(run):
    series = run["series"]

    assert series["rounds"] == [1, 2, 4]
    accuracy = series["nodes"]["accuracy"]
    assert accuracy["0"] == {"first": 0, "mean": [0.5], "low": [0.34], "high": [0.66]}
    assert accuracy["1"]["first"] == 1
    assert accuracy["1"]["mean"] == [0.7, 0.8]
    assert accuracy["1"]["low"] == [0.62, 0.72]
    assert accuracy["2"]["mean"] == [0.4, 0.7]
    assert series["clients"]["accuracy"][3] == [None, None, 0.6]
    assert series["plain"] is None


def test_decisions_are_episodes_with_their_numbers_in_words(run):
    split, first, second = run["decisions"]

    assert split == {
        "node": 0,
        "first_round": 2,
        "round": 2,
        "verdict": "split",
        "title": "splits",
        "reason": "because of 2",
        "measured": ["the mean update is 0.2 long", "the longest update 1"],
        "children": [1, 2],
        "moves": [],
    }
    assert [(e["node"], e["first_round"], e["round"]) for e in (first, second)] == [
        (1, 3, 4),
        (2, 3, 4),
    ]


def test_norms_are_those_measured_and_the_gap_is_seen_at_the_split(run):
    # Cosines: 1 within {a, b}, -1 to c. So g = 1 - (-1).
    assert run["norms"]["0"] == {
        "rounds": [2],
        "mean": [0.2],
        "max": [1.0],
        "gap": [2.0],
        "cross": [-1.0],
    }
    assert run["norms"]["1"]["rounds"] == [3, 4]
    assert run["norms"]["1"]["gap"] == [None, None]


def test_the_similarity_matrix_has_the_cosines_in_the_order_of_the_children(run):
    (matrix,) = run["similarities"]

    cells = np.frombuffer(base64.b64decode(matrix["matrix"]), dtype=np.int8).reshape(3, 3)
    assert cells.tolist() == [[127, 127, -127], [127, 127, -127], [-127, -127, 127]]
    assert (matrix["node"], matrix["round"], matrix["num_clients"], matrix["size"]) == (0, 2, 3, 3)
    assert (matrix["order"], matrix["children"]) == ([0, 1, 2], [1, 1, 2])
    assert (matrix["gap"], matrix["cross"]) == (2.0, -1.0)


def test_news_name_clients_that_came_and_moved(run):
    assert run["news"] == [[3, "d joined"], [4, "d found the way to node 2"]]


def test_the_same_folder_gives_the_same_bytes(tmp_path):
    folder = split_run(tmp_path / "small")

    assert json.dumps(read_facts([folder])) == json.dumps(read_facts([folder]))


def test_a_run_that_has_not_begun_is_a_root_alone(tmp_path):
    run = only_run(RunFolder.create(tmp_path / "new", about("ab")))

    assert [node["id"] for node in run["nodes"]] == [0]
    assert run["clients"]["leaf"] == [None, None]
    assert (run["metrics"], run["series"]["rounds"], run["decisions"]) == ([], [], [])
    assert run["truth"] is None


def test_without_a_saved_server_the_history_is_enough(tmp_path):
    folder = RunFolder.create(tmp_path / "new", about("abc"))
    folder.append(played(1, {0: 3}, {"a": 1.0}, joined=("a", "b", "c")))
    folder.append(played(2, {1: 1, 2: 1, 3: 1}, **split(0, 2, _1="a", _2="b", _3="c")))

    run = only_run(folder)

    assert run["clients"]["leaf"] == [1, 2, 3]
    assert run["nodes"][0]["children"] == [1, 2, 3]
    assert run["similarities"] == []


def test_the_clusters_of_a_merged_split_are_gone_but_keep_their_curves(tmp_path):
    folder = RunFolder.create(tmp_path / "merged", about("ab"))
    folder.append(played(1, {0: 2}, {"a": 0.2, "b": 0.4}, joined=("a", "b")))
    accuracy = {"a": 0.1, "b": 0.3}
    folder.append(played(2, {1: 1, 2: 1}, accuracy, **split(0, 2, _1="a", _2="b")))
    merge = {
        "decisions": (decision(0, 3, "merge"),),
        "vanished": {1: 0, 2: 0},
    }
    folder.append(played(3, {0: 2}, {"a": 0.5, "b": 0.7}, **merge))
    accuracy = {"a": 0.6, "b": 0.8}
    folder.append(played(4, {3: 1, 4: 1}, accuracy, **split(0, 4, _3="a", _4="b")))

    run = only_run(folder)

    assert [node["id"] for node in run["nodes"]] == [0, 3, 4]  # no number is used twice
    assert [d["children"] for d in run["decisions"]] == [[1, 2], [], [3, 4]]
    curves = run["series"]["nodes"]["accuracy"]
    assert curves["0"]["mean"] == [0.3, None, 0.6]
    assert curves["1"] == {"first": 1, "mean": [0.1], "low": [0.1], "high": [0.1]}
    assert run["news"] == [[3, "node 0 was merged back"]]


def test_clients_that_left_are_at_no_node_and_moves_are_followed(tmp_path):
    folder = RunFolder.create(tmp_path / "left", about("abc"))
    first = split(0, 1, _1="ab", _2="c")
    folder.append(played(1, {1: 2, 2: 1}, {"a": 0.5}, joined=("a", "b", "c"), **first))
    kept = decision(0, 2, "keep", moves={"b": 2})
    folder.append(played(2, {1: 0, 2: 2}, left=("a",), decisions=(kept,), moved={"b": 2}))

    run = only_run(folder)

    assert run["clients"]["leaf"] == [None, 2, 2]
    assert run["clients"]["left"] == [2, None, None]
    assert run["clients"]["last"]["accuracy"] == [0.5, None, None]
    assert run["decisions"][1]["moves"] == [[1, 2]]
    assert run["nodes"][1]["last"]["accuracy"] is None


def test_without_evaluation_what_clients_report_in_training_is_shown(tmp_path):
    folder = RunFolder.create(tmp_path / "training", about([], driver="flower"))
    for number in (1, 2):
        metrics = {"7": {"loss": 1.0 / number}, "8": {"loss": None}}
        joined = ("7", "8") if number == 1 else ()
        record = RoundRecord(round=number, cluster_sizes={0: 2}, joined=joined, metrics=metrics)
        folder.append(Round(record=record))
    folder.save_names({"8": "Ulm"})

    run = only_run(folder)

    assert run["driver"] == "flower"
    assert run["clients"]["ids"] == ["7", "8"]
    assert run["clients"]["names"] == [None, "Ulm"]
    assert run["clients"]["examples"] == [None, None]
    assert run["series"]["nodes"]["loss"]["0"]["mean"] == [1.0, 0.5]
    assert run["clients"]["last"]["loss"] == [0.5, None]
    assert ["measured on", "training data, as the clients report it"] in run["about"]


@pytest.mark.parametrize("is_complete", [True, False])
def test_plain_federated_learning_stands_beside_the_run(tmp_path, is_complete):
    folder = split_run(tmp_path / "small")
    plain = RunFolder.create(tmp_path / "small/baselines/fedavg", about(method="fedavg"))
    plain.append(played(1, {0: 3}, {"a": 0.1, "b": 0.3, "c": 0.2}, joined=("a", "b", "c")))
    if is_complete:
        plain.finish({"rounds": 1, "clusters": {"0": ["a", "b", "c"]}, "mean": {}})

    facts = read_facts([folder])
    run = facts["runs"][0]

    assert run["series"]["plain"] == {
        "rounds": [1],
        "nodes": {
            "accuracy": {"0": [0.2], "1": [0.2], "2": [0.2]},
            "loss": {"0": [0.8], "1": [0.8], "2": [0.8]},
        },
    }
    # What a run has reached halfway is no measure for the other's end.
    assert (run["clients"]["plain"] is not None) == is_complete
    if is_complete:
        assert run["clients"]["plain"]["accuracy"] == [0.1, 0.3, 0.2, None]
        assert run["nodes"][0]["plain"]["accuracy"] == 0.2
    assert [curve["title"] for curve in facts["comparison"]["curves"]] == ["CFL", "plain FL"]
    assert [curve["is_reference"] for curve in facts["comparison"]["curves"]] == [False, True]
    assert [row["ari"] for row in facts["comparison"]["table"]] == [
        1.0,
        0.0 if is_complete else None,
    ]


def test_given_clusters_are_children_of_the_root_from_the_start(tmp_path):
    folder = RunFolder.create(tmp_path / "oracle", about("ab", method="oracle"))
    server = fb.Server(2, rule=fb.NeverSplit())
    server.partition({"x": ["a"], "y": ["b"]})
    pass_rounds(server, 1)
    given = {"children": {0: (1, 2)}, "moved": {"a": 1, "b": 2}}
    folder.append(played(1, {1: 1, 2: 1}, {"a": 0.5, "b": 0.7}, joined=("a", "b"), **given))
    folder.save_server(server)

    run = only_run(folder)

    assert run["clients"]["leaf"] == [1, 2]
    assert run["series"]["nodes"]["accuracy"]["2"]["mean"] == [0.7]
    assert run["similarities"] == []


def test_nothing_to_report_on_is_an_error():
    with pytest.raises(ValueError, match="give at least one"):
        read_facts([])


def large_run(path, num_clients, num_rounds, num_clusters):
    """A run whose clients split in the second round, with two metrics and long histories."""
    ids = [f"client-{i:05d}" for i in range(num_clients)]
    rng = np.random.default_rng(0)
    folder = RunFolder.create(path, about(ids, rounds=num_rounds))
    server = fb.Server(8, rule=fb.NeverSplit())
    server.join(ids)
    groups = [ids[g::num_clusters] for g in range(num_clusters)]
    updates = rng.normal(size=(num_clients, 8)).astype(np.float32)
    rows = dict(zip(ids, updates, strict=True))
    server.tree.split(0, [{i: rows[i] for i in group} for group in groups], in_round=2)
    pass_rounds(server, num_rounds)
    lines = []
    for number in range(1, num_rounds + 1):
        values = rng.uniform(0.1, 0.9, num_clients)
        sizes = (
            {g + 1: len(groups[g]) for g in range(num_clusters)} if number > 1 else {0: num_clients}
        )
        examined = [0] if number <= 2 else sizes
        changes = {"decisions": tuple(decision(n, number) for n in examined)}
        if number == 2:
            changes = split(0, 2, **{f"_{g + 1}": groups[g] for g in range(num_clusters)})
        entry = played(
            number,
            sizes,
            dict(zip(ids, values.tolist(), strict=True)),
            joined=tuple(ids) if number == 1 else (),
            refused=dict.fromkeys(ids[::3], "its update is 1.2e+05 times as long as the others'"),
            **changes,
        )
        lines.append(entry)
    for entry in lines:
        folder.append(entry)
    folder.save_server(server)
    return folder


def test_the_folder_of_a_federation_can_be_read(tmp_path):
    start(make_grid(), num_rounds=4, checkpoint_dir=tmp_path / "federation")

    run = only_run(RunFolder(tmp_path / "federation"))

    assert run["driver"] == "flower"
    assert run["rounds_done"] == 4
    assert len(run["clients"]["ids"]) == 6
    assert None not in run["clients"]["leaf"]
    assert run["series"]["rounds"]


@pytest.mark.parametrize("num_clusters", [4, 50])
def test_a_hundred_clients_and_two_hundred_rounds_fit_on_a_page(tmp_path, num_clusters):
    folder = large_run(tmp_path / "large", 100, 200, num_clusters)

    facts = read_facts([folder])

    assert len(json.dumps(facts, separators=(",", ":"))) < 1_500_000
    assert facts["runs"][0]["series"]["clients"] is not None


@pytest.mark.slow
def test_ten_thousand_clients_are_folded(tmp_path):
    folder = large_run(tmp_path / "huge", 10_000, 12, 20)

    facts = read_facts([folder])

    assert len(json.dumps(facts, separators=(",", ":"))) < 4_000_000
    run = facts["runs"][0]
    assert run["series"]["clients"] is None
    assert run["similarities"][0]["size"] == 256
    assert sum(map(len, run["clients"]["refusals"])) == 2000
    assert sum(run["clients"]["refused"]) == 12 * 3334


def test_a_client_that_left_does_not_count_at_the_end(tmp_path):
    folder = RunFolder.create(tmp_path / "left", about("abc"))
    folder.append(played(1, {0: 3}, {"a": 0.8, "b": 0.8, "c": 0.1}, joined=tuple("abc")))
    folder.append(played(2, {0: 2}, {"a": 0.9, "b": 0.9}, left=("c",)))

    row = read_facts([folder, folder])["comparison"]["table"][0]

    assert (row["last"]["accuracy"], row["worst"]["accuracy"]) == (0.9, 0.9)


def test_the_norms_of_a_split_in_the_first_round_are_shown(tmp_path):
    folder = RunFolder.create(tmp_path / "first", about("ab"))
    folder.append(played(1, {1: 1, 2: 1}, joined=("a", "b"), **split(0, 1, _1="a", _2="b")))

    assert only_run(folder)["norms"]["0"]["mean"] == [0.1]


def test_a_link_to_a_run_does_not_garble_how_to_go_on(tmp_path, monkeypatch):
    RunFolder.create(tmp_path / "real", about())
    (tmp_path / "e").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)

    run = only_run(RunFolder("e"))

    assert run["how_to_go_on"] == "continue with: fedbranch resume real"


def test_the_largest_float_stays_finite(tmp_path):
    folder = RunFolder.create(tmp_path / "large", about("a"))
    largest = {"a": {"loss": 1.7976931348623157e308}}
    record = RoundRecord(round=1, cluster_sizes={0: 1}, joined=("a",))
    folder.append(Round(record=record, evaluation=largest))

    json.dumps(read_facts([folder]), allow_nan=False)


def test_a_loss_is_not_the_main_metric_however_it_is_written(tmp_path):
    folder = RunFolder.create(tmp_path / "Loss", about("a"))
    record = RoundRecord(round=1, cluster_sizes={0: 1}, joined=("a",))
    folder.append(Round(record=record, evaluation={"a": {"Loss": 1.0, "accuracy": 0.5}}))

    assert [metric["name"] for metric in only_run(folder)["metrics"]] == ["accuracy", "Loss"]


def test_folders_of_the_same_name_are_told_apart(tmp_path):
    folders = [split_run(tmp_path / part / "run") for part in "ab"]

    assert [run["name"] for run in read_facts(folders)["runs"]] == ["run", "run (2)"]
