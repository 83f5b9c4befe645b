"""The parameter tree: positions, splits and their undoing."""

import numpy as np
import pytest

from fedbranch import OnDisk, ParameterTree
from tree.made_edges import EAST, NORTH, SOUTH, WEST, vector


def test_positions_and_clusters_by_hand(tree):
    assert [leaf.id for leaf in tree.leaves] == [1, 3, 4]
    assert {node.id: tree.cluster(node.id) for node in tree} == {
        0: ["a", "b", "c", "d", "e"],
        1: ["a", "b"],
        2: ["c", "d", "e"],
        3: ["c"],
        4: ["d", "e"],
    }
    assert [tree.position(client_id) for client_id in "abcde"] == [1, 1, 3, 4, 4]


def test_children_start_from_the_parents_stationary_solution(tree):
    assert tree[1].params.tolist() == [10, 10]
    assert tree[2].params.tolist() == [10, 15]
    assert tree[3].params.tolist() == tree[4].params.tolist() == [10, 15]
    tree.advance(4, vector(1, 1))
    assert tree[2].params.tolist() == tree[3].params.tolist() == [10, 15]


def test_the_path_goes_from_general_to_specific(tree):
    assert [node.id for node in tree.path(4)] == [0, 2, 4]
    assert [node.id for node in tree.path(0)] == [0]


def test_an_inner_nodes_parameters_are_frozen(tree):
    with pytest.raises(ValueError, match="node 2 is not a leaf"):
        tree.advance(2, vector(1, 1))
    with pytest.raises(ValueError, match="node 0 is not a leaf"):
        tree.split(0, [{}, {}])


def test_undoing_a_split_gives_the_cluster_and_its_solution_back(tree):
    tree.advance(3, vector(1, 1))
    tree.place("late", 4)

    tree.undo_split(2)

    assert tree[2].is_leaf
    assert tree[2].params.tolist() == [10, 15]
    assert tree.members(2) == ["c", "d", "e", "late"]
    assert len(tree) == 3


def test_undoing_the_root_takes_everything_back(tree):
    tree.undo_split(0)

    assert len(tree) == 1
    assert tree.members(0) == list("abcde")
    assert tree.root.params.tolist() == [10, 10]


def test_node_ids_are_never_used_again(tree):
    tree.undo_split(2)

    assert tree.split(2, [{"c": NORTH}, {"d": SOUTH}]) == (5, 6)


def test_a_base_names_the_numbers_and_not_only_their_version():
    first, second = ParameterTree(2), ParameterTree(2)
    assert first.root.base == second.root.base

    first.advance(0, EAST)
    second.advance(0, WEST)

    assert first.root.base != second.root.base


def test_undoing_leads_back_to_the_same_parameters(tree):
    base = tree[2].base
    tree.undo_split(2)
    assert tree[2].base == base


def test_a_very_deep_tree_can_be_walked_and_undone():
    tree = ParameterTree(1)
    leaf = 0
    for number in range(1500):
        tree.place(f"c{number}", leaf)
        tree.place("last", leaf)
        one = np.float32([1])
        leaf = tree.split(leaf, [{f"c{number}": one}, {"last": -one}])[1]

    assert len(tree.cluster(0)) == 1501
    tree.undo_split(0)
    assert len(tree) == 1


def test_there_is_nothing_to_undo_at_a_leaf(tree):
    with pytest.raises(ValueError, match="node 1 is a leaf"):
        tree.undo_split(1)


def test_a_client_is_at_one_place_only(tree):
    tree.place("a", 4)

    assert tree.members(1) == ["b"]
    assert tree.members(4) == ["a", "d", "e"]


def test_a_removed_client_leaves_its_cached_update_behind(tree):
    tree.remove("a")

    assert "a" not in tree
    assert list(tree[1].cached_updates) == ["a", "b"]
    with pytest.raises(ValueError, match="client 'a' has no position"):
        tree.position("a")


def test_clients_in_no_group_stay_at_the_inner_node():
    tree = ParameterTree(2)
    for client_id in "abc":
        tree.place(client_id, 0)

    tree.split(0, [{"a": EAST}, {"b": WEST}])

    assert tree.position("c") == 0


@pytest.mark.parametrize(
    ("groups", "message"),
    [([{"a": EAST}], "got 1 groups"), ([{"a": EAST}, {"a": EAST}], "two groups")],
)
def test_impossible_splits_are_named(groups, message):
    with pytest.raises(ValueError, match=message):
        ParameterTree(2).split(0, groups)


def test_a_split_may_have_many_sides():
    tree = ParameterTree(2)
    groups = [{"a": EAST}, {"b": NORTH}, {"c": WEST}]

    assert tree.split(0, groups) == (1, 2, 3)
    assert tree.descend(0, vector(0.1, 3)).child_id == 2


@pytest.mark.parametrize("sizes", [(0, 0), (3, -1)])
def test_a_model_needs_parameters(sizes):
    with pytest.raises(ValueError, match=f"num_params is {sizes[0]}"):
        ParameterTree(*sizes)


def test_edges_of_a_tree_are_equally_long(tmp_path):
    tree = ParameterTree(4, cache=OnDisk(folder=tmp_path))
    first = {"a": np.ones(4), "b": np.ones(4)}, {"c": -np.ones(4), "d": -np.ones(4)}
    tree.split(0, first)
    there = sorted(tmp_path.iterdir())

    with pytest.raises(ValueError, match=r"lengths \[4, 5\]"):
        tree.split(1, [{"a": np.ones(5)}, {"b": -np.ones(5)}])

    assert tree[1].is_leaf
    assert sorted(tmp_path.iterdir()) == there


def test_a_cache_of_another_type_is_refused():
    with pytest.raises(TypeError, match="cache is 'disk'; pass InMemory"):
        ParameterTree(3, cache="disk")
