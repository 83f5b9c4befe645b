"""The tree and the positions, followed through the records of a history."""

import pytest

import fedbranch as fb
from fedbranch.report.facts.growth import Growth, grow
from fedbranch.runs import Round, RunFolder
from report.restless_run import RestlessRun
from tests.reliability.small_run import TRAINING, make_clients, play


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A real run with splits, a client that joins late and one that leaves."""
    path = tmp_path_factory.mktemp("run") / "small"
    play(path)
    return RunFolder(path)


def shape_of(nodes):
    return {n.id: (n.parent_id, n.child_ids, n.split_in_round, n.born_in_round) for n in nodes}


def assert_same(growth, tree):
    assert growth.positions == {i: tree.position(i) for i in tree.client_ids}
    assert shape_of(growth.nodes.values()) == shape_of(tree)
    assert growth.clients_at() == {node.id: tree.cluster(node.id) for node in tree}
    assert growth.leaf_ids == [leaf.id for leaf in tree.leaves]


def grown(history):
    growth = Growth()
    for _ in grow(history, growth):
        pass
    return growth


def test_a_history_leads_to_the_tree_that_was_saved(run_folder):
    tree, number = run_folder.saved_tree()
    history = run_folder.history()

    assert len(history) == number
    assert len(tree) > 1
    assert_same(grown(history), tree)


def test_after_every_round_the_clusters_have_the_recorded_sizes(run_folder):
    for entry, growth in grow(run_folder.history(), Growth()):
        positions = list(growth.positions.values())
        for leaf_id, size in entry.record.cluster_sizes.items():
            assert positions.count(leaf_id) == size
            assert growth.nodes[leaf_id].is_leaf


@pytest.mark.parametrize("given", [0, 3])
@pytest.mark.parametrize("from_outside", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_after_every_round_the_tree_is_the_servers(seed, from_outside, given):
    run = RestlessRun(seed, from_outside=from_outside, given=given)
    growth = Growth()
    for record in run.play(30):
        growth.follow(Round.from_json(Round(record=record).to_json()).record)

        assert_same(growth, run.server.tree)


@pytest.mark.parametrize("given", [0, 3])
def test_the_restless_run_does_all_that_a_server_can_do(given):
    run = RestlessRun(0, given=given)
    records = list(run.play(30))

    decisions = [decision for record in records for decision in record.decisions]
    assert {"split", "merge", "keep"} <= {decision.verdict for decision in decisions}
    assert any(decision.moves for decision in decisions)
    assert any(record.left for record in records)
    assert any(record.joined for record in records[1:])
    assert given or any(record.routed for record in records)


@pytest.mark.parametrize("method", ["oracle", "ifca"])
def test_given_clusters_are_followed(tmp_path, method):
    groups = {f"c{i}": str(i % 2) for i in range(8)}
    clients = {
        i: fb.ClientData(c.train, c.test, group=groups[i]) for i, c in make_clients().items()
    }
    more = {"num_clusters": 2} if method == "ifca" else {}
    run = getattr(fb, method)(
        model_of_two_layers(),
        clients,
        rounds=4,
        training=TRAINING,
        participation=0.5,
        folder=tmp_path / "run",
        engine="reference",
        device="cpu",
        **more,
    )

    assert_same(grown(run.history), run.tree)
    assert any(entry.record.moved for entry in run.history)


def model_of_two_layers():
    import torch
    from torch import nn

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def test_a_run_without_a_round_is_as_its_tree():
    server = fb.Server(2, rule=fb.NeverSplit())
    server.partition({"x": ["a"], "y": ["b", "c"]})

    assert_same(Growth.of_tree(server.tree), server.tree)
