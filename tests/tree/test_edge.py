"""Edges: what they keep, and how they compare."""

import numpy as np
import pytest

from fedbranch import Edge, InMemory, OnDisk, cosine_similarity
from fedbranch.core.geometry import scaled_for_cosines
from fedbranch.tree import make_edge
from fedbranch.tree.edge import BLOCK_BYTES
from tree.made_edges import KINDS, caches, planted


@pytest.mark.parametrize("kind", KINDS)
def test_an_edge_is_a_mapping_from_clients_to_read_only_vectors(kind, tmp_path):
    cache = caches(tmp_path)[kind]
    updates = planted(0)[0][0]

    edge = make_edge(cache, updates)

    assert list(edge) == list(updates)
    assert len(edge) == len(updates)
    assert "0-0" in edge
    assert "else" not in edge
    expected = cache.compared(np.stack(list(updates.values())))
    assert np.array_equal(np.stack(list(edge.values())), expected)
    assert np.array_equal(edge.tensors["updates"], expected)
    assert all(vector.dtype == np.float32 for vector in edge.values())
    with pytest.raises(ValueError, match="read-only"):
        edge["0-1"][0] = 1
    with pytest.raises(KeyError):
        edge["else"]


def test_an_edge_does_not_change_with_the_arrays_that_it_was_made_from():
    updates = {"a": np.ones(3, dtype=np.float32)}
    edge = make_edge(InMemory(), updates)

    updates["a"][:] = 7

    assert edge["a"].tolist() == [1, 1, 1]


def test_an_edge_is_made_of_vectors_of_any_library():
    torch = pytest.importorskip("torch")
    updates = planted(0)[0][0]
    tensors = {i: torch.asarray(update, dtype=torch.float64) for i, update in updates.items()}

    edge = make_edge(InMemory(), tensors)

    assert all(np.array_equal(edge[i], update) for i, update in updates.items())


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ({"a": np.ones(3), "b": np.ones(4)}, r"shapes \[\(3,\), \(4,\)\]"),
        ({"a": np.ones((3, 1))}, r"shapes \[\(3, 1\)\]"),
        ({"a": np.ones(0)}, r"shapes \[\(0,\)\]"),
    ],
)
def test_updates_that_are_not_equally_long_vectors_are_refused(updates, message):
    with pytest.raises(ValueError, match=message):
        make_edge(InMemory(), updates)


def test_an_edge_on_disk_gives_the_same_bits_as_one_in_memory(tmp_path):
    # More rows than one block has, and a last one that is not full.
    dim = BLOCK_BYTES // (4 * 7)
    rng = np.random.default_rng(0)
    updates = {f"c{n}": rng.normal(size=dim).astype(np.float32) for n in range(17)}
    others = rng.normal(size=(3, dim)).astype(np.float32)

    in_memory = make_edge(InMemory(), updates).similarities(scaled_for_cosines(others))
    on_disk = make_edge(OnDisk(folder=tmp_path), updates).similarities(scaled_for_cosines(others))

    assert np.array_equal(in_memory, on_disk)
    expected = cosine_similarity(
        others.astype(np.float64), np.stack(list(updates.values())).astype(np.float64)
    )
    np.testing.assert_allclose(in_memory, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", ">f4"])
def test_rows_that_are_not_float32_are_refused_where_the_edge_is_made(dtype):
    """Such an edge could be saved, but not loaded again."""
    rows = np.ones((1, 3), dtype=dtype)

    with pytest.raises(TypeError, match=rf"are {rows.dtype}; .*astype\(np.float32\)"):
        Edge(["a"], rows, dim=3)


class HalfPrecision(Edge):
    """Hold rows as float16, as a user might write it."""

    def __init__(self, client_ids, rows):
        super().__init__(client_ids, np.broadcast_to(np.float32(0), rows.shape), dim=rows.shape[1])
        self._held = rows.astype(np.float16)

    def __getitem__(self, client_id):
        return self._held[self.row(client_id)].astype(np.float32)

    def blocks(self, num_rows):
        for first in range(0, len(self), num_rows):
            yield self._held[first : first + num_rows].astype(np.float32)


def test_a_subclass_can_hold_less_than_float32():
    rows = np.float32([[1, 2, 2], [-3, 0, 4]])
    edge = HalfPrecision(["a", "b"], rows)

    assert np.array_equal(np.stack(list(edge.values())), rows)
    expected = Edge(["a", "b"], rows, dim=3).similarities(scaled_for_cosines(rows))
    assert np.array_equal(edge.similarities(scaled_for_cosines(rows)), expected)


def test_an_empty_edge_is_an_empty_mapping():
    assert dict(Edge()) == {}
    assert not make_edge(InMemory(), {"a": None})
