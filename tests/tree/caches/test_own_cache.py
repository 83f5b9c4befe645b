"""A cache that is not ours works everywhere; checkpoints have only its name."""

from dataclasses import dataclass

import numpy as np
import pytest

from fakes import DIM, QuadraticClients, fingerprint
from fedbranch import DamagedFile, Edge, InMemory, OnDisk, ParameterTree, Server, Thresholds
from fedbranch.core.geometry import to_numpy
from fedbranch.storage.checkpoint import read_checkpoint
from fedbranch.tree import cache_to_state, restored_cache, row_blocks
from tree.made_edges import LONG, newcomers, planted, split_tree


@dataclass(frozen=True)
class EveryNth:
    """Keep every n-th number of an update."""

    n: int = 2

    def prepare(self):
        pass

    def num_kept(self, dim):
        return -(-dim // self.n)

    def compared(self, updates):
        return np.ascontiguousarray(to_numpy(updates)[:, :: self.n], dtype=np.float32)

    def keep(self, updates):
        dim = len(next(iter(updates.values())))
        rows = [self.compared(block) for block in row_blocks(updates.values(), dim)]
        return Edge(list(updates), np.concatenate(rows), dim=dim)

    def restore(self, saved):
        return saved.in_memory()


@pytest.fixture
def saved(tmp_path):
    """A tree with such a cache, which is saved; and updates with the children they go to."""
    groups, pulls, rng = planted(1)
    tree = split_tree(EveryNth(), groups)
    own, updates = newcomers(pulls, rng, 30)
    tree.save(tmp_path)
    return tree, updates, (1 + own).tolist()


def children(tree, updates):
    return [descent.child_id for descent in tree.descend_all(0, updates)]


def test_newcomers_find_their_group(saved):
    tree, updates, expected = saved

    assert children(tree, updates) == expected
    assert repr(tree[1].cached_updates) == "Edge(6 clients, 1500 numbers each, in memory)"
    assert tree.num_compared(LONG) == 1500


def test_a_saved_tree_is_loaded_with_the_same_cache(saved, tmp_path):
    tree, updates, _ = saved

    loaded = ParameterTree.load(tmp_path, cache=EveryNth())

    assert loaded.descend_all(0, updates) == tree.descend_all(0, updates)


def test_without_the_cache_a_saved_tree_is_refused_and_the_error_names_it(saved, tmp_path):
    assert cache_to_state(saved[0].cache) == {"kind": "other", "name": "EveryNth"}

    with pytest.raises(DamagedFile, match=r"the cache 'EveryNth' is not part of fedbranch.*cache="):
        ParameterTree.load(tmp_path)


def test_another_cache_cannot_read_its_edges(saved, tmp_path):
    for cache in (InMemory(), OnDisk(folder=tmp_path / "edges")):
        with pytest.raises(ValueError, match="pass a cache of the kind that made them"):
            ParameterTree.load(tmp_path, cache=cache)
    with pytest.raises(DamagedFile, match="have 1500 numbers instead of 1000"):
        ParameterTree.load(tmp_path, cache=EveryNth(3))


def test_it_cannot_read_the_edges_of_ours(tmp_path):
    split_tree(InMemory(), planted(1)[0]).save(tmp_path)

    with pytest.raises(ValueError, match="pass a cache of the kind that made them"):
        ParameterTree.load(tmp_path, cache=EveryNth())


def test_a_tree_that_is_only_read_needs_no_cache(saved, tmp_path):
    tree, updates, _ = saved
    state, files = read_checkpoint(tmp_path, "tree")

    loaded = ParameterTree.from_state(state, files, cache=restored_cache(state, only_to_read=True))

    for node, same in zip(tree, loaded, strict=True):
        assert list(same.cached_updates) == list(node.cached_updates)
        for client_id, kept in node.cached_updates.items():
            assert np.array_equal(same.cached_updates[client_id], kept)
    with pytest.raises(ValueError, match="the cache 'EveryNth', which is not part of fedbranch"):
        loaded.descend_all(0, updates)
    with pytest.raises(ValueError, match="the cache 'EveryNth', which is not part of fedbranch"):
        loaded.split(1, [{"a": updates[0]}, {"b": updates[1]}])
    loaded.save(tmp_path / "copy")
    assert read_checkpoint(tmp_path / "copy", "tree")[0] == state


def test_an_object_without_the_methods_is_refused():
    class Half:
        def keep(self, updates):
            raise NotImplementedError

    for cache in (Half(), EveryNth, InMemory):
        with pytest.raises(TypeError, match=r"cache is .*fedbranch\.tree\.EdgeCache"):
            ParameterTree(3, cache=cache)


def test_a_server_goes_on_to_the_same_bytes_after_loading(tmp_path):
    def play(server, clients, num_rounds):
        for _ in range(num_rounds):
            clients.play_round(server, clients.client_ids)

    clients = QuadraticClients(3, 4)
    rule = Thresholds(eps_mean=0.5, eps_max=1.0, gamma_max=0.5)
    server = Server(DIM, rule=rule, cache=EveryNth())
    play(server, clients, 30)
    server.save(tmp_path)

    loaded = Server.load(tmp_path, cache=EveryNth())

    assert len(server.tree) > 1
    play(server, clients, 5)
    play(loaded, clients, 5)
    assert fingerprint(loaded) == fingerprint(server)
