"""Who stood where, followed through the history."""

import pytest

from fedbranch.report.facts.growth import Growth, Saved, grow
from tests.reliability.small_run import play


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A real run with splits, a client that joins late and one that leaves."""
    from fedbranch.runs import RunFolder

    path = tmp_path_factory.mktemp("run") / "small"
    play(path)
    return RunFolder(path)


def test_a_history_leads_to_the_tree_that_was_saved(run_folder):
    tree, number = run_folder.saved_tree()
    followed = Growth()
    rounds = list(grow(run_folder.history(), None, followed))

    assert len(rounds) == number
    assert len(tree) > 1
    assert followed.positions == {i: tree.position(i) for i in tree.client_ids}
    assert {n.id: (n.parent_id, n.child_ids, n.split_in_round) for n in tree} == {
        n.id: (n.parent_id, n.child_ids, n.split_in_round) for n in followed.nodes.values()
    }
    assert followed.clients_at() == {node.id: tree.cluster(node.id) for node in tree}


def test_after_every_round_the_clusters_have_the_recorded_sizes(run_folder):
    for entry, growth in grow(run_folder.history(), None, Growth()):
        positions = list(growth.positions.values())
        for leaf_id, size in entry.record.cluster_sizes.items():
            assert positions.count(leaf_id) == size
            assert growth.nodes[leaf_id].child_ids == ()


def test_a_tree_saved_before_the_end_is_gone_on_from(run_folder):
    tree, number = run_folder.saved_tree()
    first, second = Growth(), Growth()

    list(grow(run_folder.history(), None, first))
    list(grow(run_folder.history(), Saved(tree, number), second))

    assert first.positions == second.positions
    assert first.nodes == second.nodes
