"""Caches in checkpoints: which cache may read the edges of which."""

import pytest

from fedbranch import InMemory, OnDisk, ParameterTree, Sketched
from fedbranch.storage.checkpoint import read_generation
from tree.made_edges import LONG, caches, files_in, newcomers, planted, split_tree


def test_a_saved_tree_can_come_from_disk_or_go_there(tmp_path):
    groups, pulls, rng = planted(0)
    split_tree(OnDisk(folder=tmp_path / "edges"), groups).save(tmp_path / "disk")
    split_tree(InMemory(), groups).save(tmp_path / "memory")
    _, updates = newcomers(pulls, rng, 9)

    in_memory = ParameterTree.load(tmp_path / "disk", cache=InMemory())
    on_disk = ParameterTree.load(tmp_path / "memory", cache=OnDisk(folder=tmp_path / "new"))

    assert "in memory" in repr(in_memory[1].cached_updates)
    assert "on disk" in repr(on_disk[1].cached_updates)
    assert len(files_in(tmp_path / "new")) == 3
    assert in_memory.descend_all(0, updates) == on_disk.descend_all(0, updates)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (InMemory(), Sketched(size=256)),
        (Sketched(size=256), InMemory()),
        (Sketched(size=256), Sketched(size=128)),
    ],
)
def test_a_saved_tree_does_not_change_what_its_edges_keep(tmp_path, saved, wanted):
    groups, _, _ = planted(0)
    split_tree(saved, groups).save(tmp_path)

    with pytest.raises(ValueError, match="sketches cannot become other ones"):
        ParameterTree.load(tmp_path, cache=wanted)
    assert ParameterTree.load(tmp_path).cache == saved


def test_a_tree_of_sketches_is_loaded_as_it_was(tmp_path):
    groups, pulls, rng = planted(0)
    tree = split_tree(Sketched(size=256, seed=3), groups)
    _, updates = newcomers(pulls, rng, 9)
    tree.save(tmp_path)

    loaded = ParameterTree.load(tmp_path)

    assert loaded.cache == Sketched(size=256, seed=3)
    assert loaded.descend_all(0, updates) == tree.descend_all(0, updates)
    with pytest.raises(ValueError, match=r"has 256 numbers and the cached ones \[3000\]"):
        loaded.descend(0, updates[0][:256])


@pytest.mark.parametrize("name", ["node-0-*", "edge-1-*"])
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_damage_to_a_saved_tree_is_made_good_by_the_next_save(tmp_path, name, kind):
    groups, _, _ = planted(0)
    tree = ParameterTree(LONG, cache=caches(tmp_path)[kind])
    tree.save(tmp_path / "saved")
    tree.split(0, groups)
    tree.save(tmp_path / "saved")
    file = next((tmp_path / "saved").glob(name))
    content = file.read_bytes()
    file.unlink()  # what is mapped stays as it is
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    tree.place("new", 0)

    tree.save(tmp_path / "saved")

    for generation, num_clients in (("current", 19), ("previous", 18)):
        state, files = read_generation(tmp_path / "saved", "tree", generation)
        loaded = ParameterTree.from_state(state, files, cache=tree.cache)
        assert len(loaded.client_ids) == num_clients
        assert loaded[1].cached_updates["0-3"].tolist() == groups[0]["0-3"].tolist()
