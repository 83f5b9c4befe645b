"""Edges on disk: their files, damage to them, and the memory they take."""

import os
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
import safetensors.numpy

from fakes import DIM, QuadraticClients
from fedbranch import CannotWrite, DamagedFile, InMemory, OnDisk, ParameterTree, Server, Thresholds
from fedbranch.errors import UsingPreviousState
from tree.made_edges import LONG, files_in, newcomers, planted, split_tree


def test_every_edge_is_a_safetensors_file_until_the_split_is_undone(tmp_path):
    groups, _, _ = planted(0)
    tree = split_tree(OnDisk(folder=tmp_path), groups)
    (kept_in,) = (
        path
        for path in tmp_path.iterdir()
        if np.array_equal(
            safetensors.numpy.load_file(path)["updates"], np.stack(list(groups[1].values()))
        )
    )
    assert kept_in.suffix == ".safetensors"
    assert len(files_in(tmp_path)) == 3

    tree.undo_split(0)

    assert files_in(tmp_path) == []


def test_a_saved_edge_is_the_same_file_whether_it_was_in_memory_or_on_disk(tmp_path):
    groups, _, _ = planted(0)
    folder = tmp_path / "edges"
    split_tree(InMemory(), groups).save(tmp_path / "a")
    split_tree(OnDisk(folder=folder), groups).save(tmp_path / "b")

    saved = [sorted((tmp_path / name).glob("edge-*")) for name in "ab"]

    assert [path.name for path in saved[0]] == [path.name for path in saved[1]]
    for one, other in zip(*saved, strict=True):
        assert one.read_bytes() == other.read_bytes()
    # On one disk it is there once.
    assert {path.stat().st_ino for path in saved[1]} == {p.stat().st_ino for p in folder.iterdir()}


@pytest.mark.parametrize("can_link", [True, False])
def test_a_loaded_tree_is_on_disk_again_and_leaves_the_saved_files_alone(
    tmp_path, monkeypatch, can_link
):
    if not can_link:
        monkeypatch.setattr(os, "link", refuse)
    groups, pulls, rng = planted(0)
    tree = split_tree(OnDisk(folder=tmp_path / "edges"), groups)
    tree.save(tmp_path / "saved")
    before = files_in(tmp_path / "saved")
    _, updates = newcomers(pulls, rng, 9)
    expected = tree.descend_all(0, updates)
    tree.undo_split(0)

    loaded = ParameterTree.load(tmp_path / "saved")

    assert loaded.cache == OnDisk(folder=tmp_path / "saved" / "edges")
    assert loaded.descend_all(0, updates) == expected
    assert "on disk" in repr(loaded[1].cached_updates)
    loaded.save(tmp_path / "copy")
    loaded.undo_split(0)
    assert files_in(tmp_path / "saved") == before
    assert ParameterTree.load(tmp_path / "copy").descend_all(0, updates) == expected
    assert not list(tmp_path.rglob("*.tmp"))


def refuse(*_, **__):
    raise OSError(95, "Operation not supported")


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def cut(path):
    os.truncate(path, path.stat().st_size - 8)


@pytest.mark.parametrize("damage", [flip_a_bit, cut, lambda path: path.unlink()])
def test_damage_to_a_file_on_disk_is_noticed_when_it_is_loaded(tmp_path, damage):
    groups, _, _ = planted(0)
    split_tree(OnDisk(folder=tmp_path / "edges"), groups).save(tmp_path / "saved")
    damage(next((tmp_path / "saved").glob("edge-2-*")))

    with pytest.raises(DamagedFile, match=r"edge-2-\w+\.safetensors (was cut or|is missing)"):
        ParameterTree.load(tmp_path / "saved")


def test_a_file_that_is_cut_while_it_is_in_use_is_an_error_and_no_crash(tmp_path):
    groups, _, _ = planted(0)
    tree = split_tree(OnDisk(folder=tmp_path), groups)
    for path in tmp_path.iterdir():
        cut(path)

    with pytest.raises(DamagedFile, match="was cut or changed while it was in use"):
        tree.descend(0, groups[0]["0-0"])


def test_files_that_are_removed_while_they_are_in_use_are_saved_all_the_same(tmp_path):
    groups, _, _ = planted(0)
    tree = split_tree(OnDisk(folder=tmp_path / "edges"), groups)
    for path in (tmp_path / "edges").iterdir():
        path.unlink()

    tree.save(tmp_path / "saved")

    loaded = ParameterTree.load(tmp_path / "saved")
    for child_id, group in zip(tree.root.child_ids, groups, strict=True):
        assert all(np.array_equal(loaded[child_id].cached_updates[i], group[i]) for i in group)


def change_in_place(path):
    with path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"x")


@pytest.mark.parametrize("is_saved", [False, True])
def test_an_edge_that_was_changed_on_disk_never_replaces_a_state_that_is_whole(tmp_path, is_saved):
    groups, _, _ = planted(0)
    tree = ParameterTree(LONG, cache=OnDisk(folder=tmp_path / "edges"))
    tree.save(tmp_path / "saved")
    tree.split(0, groups)
    if is_saved:
        tree.save(tmp_path / "saved")
    change_in_place(next((tmp_path / "edges").iterdir()))
    tree.place("new", 0)

    with pytest.raises(DamagedFile, match="was changed while it was in use"):
        tree.save(tmp_path / "saved")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if is_saved else "error", UsingPreviousState)
        assert len(ParameterTree.load(tmp_path / "saved")) == 1


def test_a_split_whose_files_cannot_be_written_does_not_happen(tmp_path):
    groups, _, _ = planted(0)
    tree = ParameterTree(LONG, cache=OnDisk(folder=tmp_path / "edges"))
    (tmp_path / "edges").rmdir()
    (tmp_path / "edges").write_text("in the way")
    before = tree.to_state()[0]

    with pytest.raises(CannotWrite, match="edges cannot be written"):
        tree.split(0, groups)

    assert tree.to_state()[0] == before


def test_a_folder_that_cannot_be_made_is_known_at_the_start(tmp_path):
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(CannotWrite, match="file/edges cannot be written"):
        Server(3, cache=OnDisk(folder=tmp_path / "file" / "edges"))


def test_a_round_whose_split_cannot_be_written_can_be_tried_again(tmp_path):
    clients = QuadraticClients(2, 4)
    folder = tmp_path / "edges"
    rule = Thresholds(eps_mean=0.5, eps_max=1.0, gamma_max=0.5)
    server = Server(DIM, rule=rule, cache=OnDisk(folder=folder))
    undisturbed = Server(DIM, rule=rule, cache=InMemory())
    folder.rmdir()
    folder.write_text("in the way")
    while len(undisturbed.tree) == 1:
        clients.play_round(undisturbed, clients.client_ids)
        if len(undisturbed.tree) == 1:
            clients.play_round(server, clients.client_ids)
    with pytest.raises(CannotWrite):
        clients.play_round(server, clients.client_ids)
    folder.unlink()
    assert server.round == undisturbed.round - 1
    assert len(server.tree) == 1

    clients.play_round(server, clients.client_ids)

    assert len(server.tree) == 3
    assert server.clusters == undisturbed.clusters
    for leaf, other in zip(server.tree.leaves, undisturbed.tree.leaves, strict=True):
        assert np.array_equal(leaf.params, other.params)


def test_two_servers_may_make_the_same_split_at_once_in_one_folder(tmp_path):
    groups, pulls, rng = planted(0)
    cache = OnDisk(folder=tmp_path)
    one, other = (ParameterTree(LONG, cache=cache) for _ in range(2))

    class Disturbed:
        shape = (LONG,)

        def __array__(self, dtype=None, copy=None):
            if not other.root.is_leaf:
                other.undo_split(0)
            other.split(0, groups)
            return groups[0]["0-0"]

    one.split(0, [{**groups[0], "0-0": Disturbed()}, *groups[1:]])

    _, updates = newcomers(pulls, rng, 9)
    assert len(files_in(tmp_path)) == 3
    assert one.descend_all(0, updates) == other.descend_all(0, updates)
    other.undo_split(0)
    one.save(tmp_path / "saved")
    assert ParameterTree.load(tmp_path / "saved").descend_all(0, updates) == one.descend_all(
        0, updates
    )


PEAK = r"""
    import re, sys
    from pathlib import Path
    import numpy as np
    import fedbranch as fb

    def most_memory():  # of this program alone, unlike ru_maxrss
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])

    folder, num_clients, dim = Path(sys.argv[1]), 400, 100_000
    row = np.arange(dim, dtype=np.float32)

    class Lazy:  # an array that is made when it is looked at
        shape = (dim,)
        def __init__(self, number):
            self.number = number
        def __array__(self, dtype=None, copy=None):
            return row * np.float32(self.number) + np.float32(1)

    groups = [{str(n): Lazy(n) for n in range(odd, num_clients, 2)} for odd in (0, 1)]

    warm = fb.ParameterTree(4)
    warm.split(0, [{"a": np.ones(4)}, {"b": -np.ones(4)}])
    warm.save(folder / "warm")
    fb.ParameterTree.load(folder / "warm").descend(0, np.ones(4, dtype=np.float32))
    tree = fb.ParameterTree(dim, cache=fb.OnDisk(folder=folder / "edges"))
    newcomer = 2 * row
    start = most_memory()
    tree.split(0, groups)
    tree.descend(0, newcomer, num_best=4)
    for child_id in (1, 2):
        for vector in tree[child_id].cached_updates.values():
            assert vector[0] == 1
    if len(sys.argv) > 2:
        import os
        def refuse(*_, **__):
            raise OSError(95, "no links here")
        os.link = refuse
    tree.save(folder / "saved")
    loaded = fb.ParameterTree.load(folder / "saved")
    assert loaded.descend(0, newcomer) == tree.descend(0, newcomer)
    loaded.save(folder / "copy")
    print(most_memory() - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", [[], ["no links"]])
def test_memory_does_not_grow_with_what_is_on_disk(tmp_path, how):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PEAK), str(tmp_path), *how],
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    on_disk = 400 * 100_000 * 4
    assert int(result.stdout) < on_disk / 2  # a few blocks of rows


@pytest.mark.parametrize("can_link", [True, False])
def test_a_loaded_server_goes_on_with_the_files_of_the_one_before(tmp_path, monkeypatch, can_link):
    if not can_link:
        monkeypatch.setattr(os, "link", refuse)
    groups, pulls, rng = planted(0)
    _, updates = newcomers(pulls, rng, 9)
    cache = OnDisk(folder=tmp_path / "edges")
    tree = split_tree(cache, groups)
    tree.save(tmp_path / "saved")
    expected, saved = tree.descend_all(0, updates), files_in(tmp_path / "saved")

    loaded = ParameterTree.load(tmp_path / "saved", cache=cache)

    assert loaded.descend_all(0, updates) == expected
    loaded.save(tmp_path / "saved")
    assert files_in(tmp_path / "saved") == saved
    loaded.undo_split(0)
    assert files_in(tmp_path / "edges") == []
    assert tree.descend_all(0, updates) == expected  # had it not ended
    assert ParameterTree.load(tmp_path / "saved").descend_all(0, updates) == expected


def test_a_changed_file_of_the_server_before_is_not_used(tmp_path):
    groups, pulls, rng = planted(0)
    _, updates = newcomers(pulls, rng, 9)
    cache = OnDisk(folder=tmp_path / "edges")
    tree = split_tree(cache, groups)
    tree.save(tmp_path / "saved")
    expected = tree.descend_all(0, updates)
    for path in (tmp_path / "edges").iterdir():
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[:-4] + b"1234")

    assert ParameterTree.load(tmp_path / "saved", cache=cache).descend_all(0, updates) == expected


def test_the_files_of_an_undone_split_are_removed_after_loading_as_well(tmp_path):
    clients = QuadraticClients(2, 4)
    rule = Thresholds(eps_mean=0.5, eps_max=1.0, gamma_max=0.5)
    Server(DIM, rule=rule, cache=OnDisk(folder=tmp_path / "edges")).save(tmp_path / "saved")
    server = Server.load(tmp_path / "saved")
    for _ in range(30):
        clients.play_round(server, clients.client_ids)
    server.save(tmp_path / "saved")
    assert len(files_in(tmp_path / "saved" / "edges")) == 2

    server.undo_split(0)

    assert files_in(tmp_path / "saved" / "edges") == []
    assert len(Server.load(tmp_path / "saved").tree) == 3
