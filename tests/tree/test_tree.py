import numpy as np
import pytest

from fedbranch import DamagedFile, ParameterTree
from fedbranch.storage.sealed_json import seal, unseal


def vector(*entries):
    return np.array(entries, dtype=np.float32)


EAST, NORTH, WEST, SOUTH = vector(1, 0), vector(0, 1), vector(-1, 0), vector(0, -1)


@pytest.fixture
def tree():
    """Root split into east {a, b} and the rest {c, d, e}; the rest into west {c} and {d, e}.

    ::

        0 ── 1 (a, b)
          └─ 2 ── 3 (c)
               └─ 4 (d, e)
    """
    tree = ParameterTree(2)
    for client_id in "abcde":
        tree.place(client_id, 0)
    tree.advance(0, vector(10, 10))
    tree.split(0, [{"a": EAST, "b": EAST}, {"c": WEST, "d": WEST, "e": WEST}], in_round=5)
    tree.advance(2, vector(0, 5))
    tree.split(2, [{"c": NORTH}, {"d": SOUTH, "e": SOUTH}], in_round=9)
    return tree


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


# Assigning new clients


@pytest.mark.parametrize(
    ("update_at_root", "update_at_2", "leaf"),
    [
        (vector(3, 1), None, 1),
        (vector(-2, 1), vector(1, 2), 3),
        (vector(-2, 1), vector(0.5, -0.1), 4),
    ],
)
def test_a_new_client_walks_to_the_branch_with_the_most_similar_update(
    tree, update_at_root, update_at_2, leaf
):
    # Read literally, the paper's algorithm would send it to the other side.
    updates = {(10, 10): update_at_root, (10, 15): update_at_2}

    assert tree.assign(lambda params: updates[tuple(params)]) == leaf


def test_descending_says_how_similar_each_side_was(tree):
    child_id, similarities = tree.descend(0, vector(3, 4))

    assert child_id == 1
    assert similarities == {1: pytest.approx(0.6), 2: pytest.approx(-0.6)}


def test_the_most_similar_cached_update_decides_not_the_mean():
    tree = ParameterTree(2)
    for client_id in "abc":
        tree.place(client_id, 0)
    tree.split(0, [{"a": vector(1, 0), "b": vector(-1, 0.1)}, {"c": vector(0.5, 1)}])

    assert tree.descend(0, vector(1, 0.1)).child_id == 1


def test_equally_similar_children_give_the_first(tree):
    assert tree.descend(0, vector(0, 1)).child_id == 1


def test_a_leaf_has_nowhere_to_descend(tree):
    with pytest.raises(ValueError, match="no edges"):
        tree.descend(1, EAST)


def test_a_split_without_updates_cannot_route():
    tree = ParameterTree(2)
    tree.split(0, [{"a": None}, {"b": None}])

    assert not tree.can_route(0)
    with pytest.raises(ValueError, match="no edges with cached updates"):
        tree.descend(0, EAST)


# Undo


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


def test_a_new_client_cannot_write_into_the_solution_it_is_shown(tree):
    def careless(params):
        params += 5
        return params

    with pytest.raises(ValueError, match="read-only"):
        tree.assign(careless)


def test_there_is_nothing_to_undo_at_a_leaf(tree):
    with pytest.raises(ValueError, match="node 1 is a leaf"):
        tree.undo_split(1)


# Clients


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


# Files


def test_a_loaded_tree_is_the_saved_one(tree, tmp_path):
    tree.save(tmp_path)
    loaded = ParameterTree.load(tmp_path)

    assert loaded.to_state()[0] == tree.to_state()[0]
    for node in tree:
        same = loaded[node.id]
        assert np.array_equal(same.params, node.params)
        assert list(same.cached_updates) == list(node.cached_updates)
        for client_id, update in node.cached_updates.items():
            assert np.array_equal(same.cached_updates[client_id], update)


def test_a_loaded_tree_can_go_on(tree, tmp_path):
    tree.save(tmp_path)
    loaded = ParameterTree.load(tmp_path)

    loaded.advance(1, vector(1, 1))
    loaded.undo_split(2)

    assert loaded[1].params.tolist() == [11, 11]
    assert tree[1].params.tolist() == [10, 10]


@pytest.mark.parametrize(
    "edit",
    [
        lambda state: state["nodes"][1].update(parent_id=4),
        lambda state: state["nodes"][0].update(child_ids=[1]),
        lambda state: state["nodes"][0].update(child_ids=[1, 2, 0]),
        lambda state: state["nodes"].pop(),
        lambda state: state.update(next_id=2),
        lambda state: state.update(num_params=3),
        lambda state: state.update(num_params=10**12),
        lambda state: state.update(num_buffers=10**18),
        lambda state: state["clients"].update(num_newest=4),
        lambda state: state["clients"].update(num_newest=0),
        lambda state: state["clients"].update(num_newest=[5]),
        lambda state: state["clients"].update(runs=[0]),
        lambda state: state["clients"].update(runs=5),
        lambda state: state["nodes"][3].update(id=-1),
        lambda state: state["nodes"][3].update(id=2**31),
        lambda state: state["nodes"][3].update(id="3"),
        lambda state: state["nodes"][1].update(num_cached=1),
        lambda state: state["nodes"][1].update(num_cached=0),
        lambda state: state["nodes"][1].update(num_cached=2.0),
        lambda state: state["nodes"][1].update(num_cached=None),
        lambda state: state["nodes"][0].update(num_cached=2),
        lambda state: state["nodes"][1].pop("num_cached"),
        lambda state: state.pop("clients"),
        lambda state: state.update(nodes=None),
    ],
)
def test_a_saved_tree_that_contradicts_itself_is_refused(tree, tmp_path, edit):
    tree.save(tmp_path)
    path = tmp_path / "state.json"
    document = unseal(path.read_bytes())
    edit(document["state"])
    path.write_bytes(seal(document))

    with pytest.raises(DamagedFile, match="contradicts itself"):
        ParameterTree.load(tmp_path)


@pytest.mark.parametrize(
    "edit",
    [
        lambda files: files.pop("ids-1"),
        lambda files: files.pop("edge-1"),
        lambda files: files.update({"ids-1": files["ids-2"]}),
        lambda files: files.update({"ids-1": {"packed": files["ids-1"]["packed"]}}),
        lambda files: files.update({"ids-1": ids_of(b"aa", 1, 2)}),
        lambda files: files.update({"ids-1": ids_of(b"abc", 1, 2)}),
        lambda files: files.update({"ids-1": ids_of(b"ab", 2, 1)}),
        lambda files: files.update({"ids-1": ids_of(b"ab", 1, 4)}),
        lambda files: files.update({"ids-1": ids_of("aä".encode(), 2, 3)}),
        lambda files: files.update({"ids-1": ids_of(b"a\xff", 1, 2)}),
        lambda files: files.update({"ids-1": {**ids_of(b"ab", 1, 2), "ends": [1, 2]}}),
        lambda files: files.update({"ids-1": {**ids_of(b"ab", 1, 2), "ends": np.ones((2, 1))}}),
    ],
)
def test_ids_that_no_edge_can_have_are_refused(tree, edit):
    state, files = tree.to_state()
    edit(files)

    with pytest.raises(DamagedFile, match="contradicts itself"):
        ParameterTree.from_state(state, files)


def ids_of(content, *ends):
    return {"packed": np.frombuffer(content, dtype=np.uint8), "ends": np.uint32(ends)}


def test_any_id_is_loaded_as_it_was(tmp_path):
    ids = ["a", "", "ä", "\ud800", "日本", "b\0", "x" * 5000]
    tree = ParameterTree(2)
    tree.split(0, [dict.fromkeys(ids, EAST), {"else": WEST}])

    tree.save(tmp_path)

    assert list(ParameterTree.load(tmp_path)[1].cached_updates) == ids


def test_what_a_save_writes_does_not_grow_with_the_clients_on_edges(tmp_path):
    num_bytes = []
    for num_clients in (100, 10_000):
        tree, folder = ParameterTree(1), tmp_path / str(num_clients)
        ids = [f"client-{n}" for n in range(num_clients)]
        tree.split(0, [dict.fromkeys(ids, vector(1)), {"else": vector(-1)}])
        for client_id in (*ids, "else"):
            tree.remove(client_id)
        tree.save(folder)
        before = {path.name for path in folder.iterdir()}
        tree.advance(1, vector(1))
        tree.save(folder)
        new = [path for path in folder.iterdir() if path.name not in before]
        num_bytes.append(sum(p.stat().st_size for p in (*new, folder / "state.json")))

    assert num_bytes[1] < 2 * num_bytes[0]


def test_a_split_that_was_undone_and_made_otherwise_is_saved_as_it_is(tmp_path):
    tree = ParameterTree(2)
    tree.split(0, [{"a": np.float32([1, 0])}, {"b": np.float32([-1, 0])}])
    tree.save(tmp_path)
    tree.undo_split(0)
    tree.advance(0, np.float32([5, 5]))
    tree.split(0, [{"a": np.float32([2, 0])}, {"b": np.float32([-2, 0])}])

    tree.save(tmp_path)

    loaded = ParameterTree.load(tmp_path)
    assert loaded.root.params.tolist() == [5, 5]
    assert [u.tolist() for leaf in loaded.leaves for u in leaf.cached_updates.values()] == [
        [2, 0],
        [-2, 0],
    ]
