import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbranch import cosine_similarity, hierarchy
from fedbranch.core import blocked_linkage as forest
from fedbranch.core.blocked_linkage import hierarchy_of
from fedbranch.core.linkage import strict_order

LIBRARIES = {"numpy": lambda array: array, "torch": torch.from_numpy}


@pytest.fixture(params=LIBRARIES)
def convert(request):
    return LIBRARIES[request.param]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks, sieves and joins so small that little data goes through all of them."""
    monkeypatch.setattr(forest, "SIFTED_ON_HOST", 500)
    monkeypatch.setattr(forest, "MOST_WAITING", 300)
    monkeypatch.setattr(forest, "FEWEST_AROUND_A_HUB", 3)


def planted(seed, num_clients, num_groups, dim=60, noise=0.5):
    rng = np.random.default_rng(seed)
    groups = rng.integers(num_groups, size=num_clients)
    centres = rng.normal(size=(num_groups, dim))
    updates = centres[groups] + noise * rng.normal(size=(num_clients, dim))
    return updates, groups


def exact_cosines(kind, seed, num_clients):
    """Make updates whose cosines are exact in float32, and mostly equal."""
    rng = np.random.default_rng(seed)
    updates = rng.choice([-1.0, 1.0], size=(num_clients, 16))
    if kind == "few values":
        updates = updates[:, :4]
    elif kind == "zeros":
        updates[rng.random(num_clients) < 0.4] = 0
    elif kind == "copies":
        updates[rng.random(num_clients) < 0.4] = updates[num_clients // 3]
    elif kind == "apart":  # groups that share no coordinate
        updates[np.arange(16) // 4 != rng.integers(4, size=(num_clients, 1))] = 0
    return updates.astype(np.float32)


@pytest.mark.parametrize("kind", ["noise", "groups", "one strong client", "many lengths", "chain"])
@pytest.mark.parametrize("num_clients", [2, 3, 50, 400])
def test_blocks_give_the_hierarchy_of_the_whole_matrix(small_blocks, convert, kind, num_clients):
    rng = np.random.default_rng(num_clients)
    updates, _ = planted(0, num_clients, 5)
    if kind == "noise":
        updates = rng.normal(size=updates.shape)
    elif kind == "one strong client":
        updates = updates[0] + updates * rng.uniform(0.1, 3, size=(num_clients, 1))
    elif kind == "many lengths":
        updates *= 10.0 ** rng.integers(-100, 100, size=(num_clients, 1))
    elif kind == "chain":
        angles = np.linspace(0, 3, num_clients) ** 1.3
        updates = np.stack([np.cos(angles), np.sin(angles)], axis=1)

    whole = hierarchy(cosine_similarity(updates))
    blocks = hierarchy_of(convert(updates), memory_bytes=8 * num_clients**2 // 3)

    assert np.array_equal(blocks.edge_rows, whole.edge_rows)
    np.testing.assert_allclose(blocks.similarities, whole.similarities, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["few values", "zeros", "copies", "apart"])
@pytest.mark.parametrize("is_on_host", [True, False])
def test_ties_have_the_answer_of_the_whole_matrix(
    monkeypatch, small_blocks, convert, is_on_host, kind, seed
):
    monkeypatch.setattr(forest, "is_on_host", lambda array: is_on_host)
    updates = exact_cosines(kind, seed, 150)

    whole = hierarchy(cosine_similarity(updates))
    blocks = hierarchy_of(convert(updates), memory_bytes=20_000)

    assert np.array_equal(blocks.edge_rows, whole.edge_rows)
    assert np.array_equal(blocks.similarities, whole.similarities)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_copies_of_updates_are_in_the_promised_order(convert, dtype):
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(40, 300))[rng.integers(40, size=1000)].astype(dtype)

    whole = hierarchy(cosine_similarity(updates))
    blocks = hierarchy_of(convert(updates), memory_bytes=2**18)

    assert np.array_equal(strict_order(blocks.edge_rows, blocks.similarities, 1000), np.arange(999))
    assert blocks.similarities.max() <= 1
    np.testing.assert_allclose(blocks.similarities, whole.similarities, atol=1e-6)
    assert np.array_equal(blocks.groups(40), whole.groups(40))


@given(
    seed=st.integers(0, 2**32 - 1),
    num_clients=st.integers(2, 40),
    dim=st.integers(1, 5),
    memory_bytes=st.integers(64, 8000),
)
@settings(max_examples=150, deadline=None)
def test_any_block_size_gives_the_same_cuts(seed, num_clients, dim, memory_bytes):
    updates = np.random.default_rng(seed).normal(size=(num_clients, dim))

    whole = hierarchy(cosine_similarity(updates))
    blocks = hierarchy_of(updates, memory_bytes=memory_bytes)

    np.testing.assert_allclose(blocks.similarities, whole.similarities, atol=1e-12)
    gaps = whole.similarities[:-1] - whole.similarities[1:]
    for num_groups in range(2, num_clients + 1):
        if num_groups == num_clients or gaps[-num_groups + 1] > 1e-9:
            assert np.array_equal(blocks.groups(num_groups), whole.groups(num_groups))


def test_planted_groups_are_the_cut_and_memory_stays_bounded():
    updates, groups = planted(1, 5000, 10, dim=100)
    updates = updates.astype(np.float32)
    hierarchy_of(updates[:500], memory_bytes=2**18)  # imports

    tracemalloc.start()
    found = hierarchy_of(updates, memory_bytes=2**22).groups(10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert len(set(zip(found.tolist(), groups.tolist(), strict=True))) == 10
    assert peak < 5000 * 5000 * 4 / 5  # a fifth of the matrix


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_long_updates_take_no_more_memory_than_documented(dtype):
    updates = np.random.default_rng(0).normal(size=(1500, 10_000)).astype(dtype)
    hierarchy_of(updates[:200], memory_bytes=2**16)  # imports

    tracemalloc.start()
    hierarchy_of(updates, memory_bytes=2**21)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak <= 1.1 * 2**21


def test_few_similarities_are_kept():
    """Otherwise it would be right, but slow."""
    kept = []
    grown = forest._Forest(2**18)
    keep = grown._keep
    grown._keep = lambda edges: kept.append(len(edges.similarities)) or keep(edges)
    rng = np.random.default_rng(0)
    updates, _ = planted(2, 4000, 10, dim=200)
    updates *= rng.uniform(0.2, 2, size=(4000, 1))
    updates += rng.normal(size=updates.shape) * rng.uniform(0.1, 2, size=(4000, 1))

    grown.grown_over(updates)

    assert sum(kept) < 0.02 * 4000 * 4000 / 2


@pytest.mark.parametrize("kind", ["zeros", "copies", "apart"])
def test_few_of_equal_similarities_are_kept(kind):
    kept = []
    grown = forest._Forest(2**18)
    keep = grown._keep
    grown._keep = lambda edges: kept.append(len(edges.similarities)) or keep(edges)

    grown.grown_over(exact_cosines(kind, seed=0, num_clients=4000))

    assert sum(kept) < 0.02 * 4000 * 4000 / 2


@pytest.mark.parametrize("is_on_host", [True, False])
def test_only_so_many_wait_however_many_are_nearly_equal(
    monkeypatch, small_blocks, convert, is_on_host
):
    monkeypatch.setattr(forest, "is_on_host", lambda array: is_on_host)
    rng = np.random.default_rng(0)
    updates = (1 + 1e-4 * rng.normal(size=(500, 4))).astype(np.float32)
    waiting = []
    grown = forest._Forest(200_000)
    keep = grown._keep
    grown._keep = lambda edges: keep(edges) or waiting.append(grown._num_waiting)

    found = grown.grown_over(convert(updates))

    assert (
        max(waiting) <= 2 * forest.MOST_WAITING + 500
    )  # the waiting, a strip, the best of each row
    whole = hierarchy(cosine_similarity(updates))
    np.testing.assert_allclose(found.similarities, whole.similarities, atol=1e-6)


def test_zero_updates_are_similar_to_nothing():
    updates = np.float32([[1, 0], [0, 0], [1, 0.1], [-1, 0]])

    found = hierarchy_of(updates, memory_bytes=16)

    assert (
        found.similarities.tolist() == hierarchy(cosine_similarity(updates)).similarities.tolist()
    )
    assert 0 in found.similarities


def test_no_updates_are_an_error():
    with pytest.raises(ValueError, match="no updates"):
        hierarchy_of(np.zeros((0, 3)))


def test_one_client_is_a_hierarchy_of_one():
    assert hierarchy_of(np.ones((1, 3)), memory_bytes=1).num_clients == 1


@pytest.mark.parametrize("memory_bytes", [None, 64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("num_clients", [1, 2, 3, 9])
@pytest.mark.parametrize("row", [0, -1])
def test_updates_that_are_not_finite_are_an_error(
    convert, row, num_clients, dtype, value, memory_bytes
):
    updates = np.random.default_rng(0).normal(size=(num_clients, 4)).astype(dtype)
    updates[:-1, 1:] = 0
    updates[row, 2] = value

    with pytest.raises(ValueError, match="NaN or infinity"):
        hierarchy_of(convert(updates), memory_bytes=memory_bytes)


def test_arrays_that_are_no_updates_are_an_error():
    with pytest.raises(TypeError, match="convert them to float32"):
        hierarchy_of(np.ones((4, 3), dtype=np.int64))
    with pytest.raises(ValueError, match="stack them"):
        hierarchy_of(np.ones(4))
    with pytest.raises(ValueError, match="memory_bytes is -5"):
        hierarchy_of(np.ones((4, 3)), memory_bytes=-5)


@pytest.mark.parametrize("memory_bytes", [1e9, "1GB"])
def test_memory_is_a_whole_number_of_bytes(memory_bytes):
    with pytest.raises(TypeError, match=r"memory_bytes is .*; pass a whole number"):
        hierarchy_of(np.eye(3), memory_bytes=memory_bytes)
