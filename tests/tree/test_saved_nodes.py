"""Saved trees: read as they were, or refused."""

import numpy as np
import pytest

from fedbranch import DamagedFile, ParameterTree
from fedbranch.storage.sealed_json import seal, unseal
from tree.made_edges import EAST, WEST, vector


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
