"""Descent: the child to which a newcomer goes, with and without poisoned updates."""

import numpy as np
import pytest

from fedbranch import Guard, InMemory, ParameterTree
from fedbranch.tree.descent import descents
from tree.made_edges import EAST, KINDS, caches, newcomers, planted, split_tree, vector


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


def test_a_new_client_cannot_write_into_the_solution_it_is_shown(tree):
    def careless(params):
        params += 5
        return params

    with pytest.raises(ValueError, match="read-only"):
        tree.assign(careless)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_best", [1, 4])
def test_newcomers_find_their_group_whatever_edges_keep(kind, num_best, tmp_path):
    groups, pulls, rng = planted(1)
    tree = split_tree(caches(tmp_path)[kind], groups)
    own, updates = newcomers(pulls, rng, 60)

    descents = tree.descend_all(0, updates, num_best=num_best)

    assert [descent.child_id for descent in descents] == (1 + own).tolist()


@pytest.mark.parametrize("at_once", [1, 2**25])
@pytest.mark.parametrize("kind", KINDS)
def test_many_updates_at_once_are_routed_as_one_by_one(kind, at_once, tmp_path):
    groups, pulls, rng = planted(2, noise=3.0)
    tree = split_tree(caches(tmp_path)[kind], groups)
    _, updates = newcomers(pulls, rng, 40, noise=3.0)

    edges = {child_id: tree[child_id].cached_updates for child_id in tree.root.child_ids}
    together = descents(
        edges, tree.cache, updates, ignored_share=0.2, num_best=3, similarities_at_once=at_once
    )

    for update, descent in zip(updates, together, strict=True):
        alone = tree.descend(0, update, ignored_share=0.2, num_best=3)
        assert alone.child_id == descent.child_id
        assert alone.similarities == pytest.approx(descent.similarities, abs=1e-6)


def test_the_mean_of_the_best_by_hand():
    # Cosines with (1, 0): 1, 0.8, 0.6 and 0.
    tree = ParameterTree(2)
    one = {"a": [1, 0], "b": [4, 3], "c": [3, 4], "d": [0, 1]}
    tree.split(0, [{i: np.float32(v) for i, v in one.items()}, {"e": np.float32([-1, 0])}])
    east = np.float32([1, 0])

    def similarity(**settings):
        return tree.descend(0, east, **settings).similarities[1]

    assert similarity() == pytest.approx(1)
    assert similarity(num_best=2) == pytest.approx(0.9)
    assert similarity(num_best=3) == pytest.approx(0.8)
    assert similarity(num_best=9) == pytest.approx(0.6)
    assert similarity(num_best=2, ignored_share=0.25) == pytest.approx(0.7)
    assert similarity(num_best=2, ignored_share=1.0) == pytest.approx(0)


@pytest.mark.parametrize("settings", [{"num_best": 0}, {"ignored_share": -0.1}])
def test_at_least_one_cached_update_counts(settings):
    tree = split_tree(InMemory(), [{"a": np.float32([1])}, {"b": np.float32([-1])}], dim=1)

    with pytest.raises(ValueError, match="at least one update counts"):
        tree.descend(0, np.float32([1]), **settings)


SIZES = [2, 3, 4, 6, 10, 20, 50]


def share_right(size, *, noise, is_poisoned, seeds=5, **settings):
    """Compute the share of newcomers of two groups that go to their group.

    The edge of the other group may have one poisoned update.
    """
    num_right = num_routed = 0
    for seed in range(seeds):
        groups, pulls, rng = planted(seed, num_groups=2, num_clients=size, dim=500, noise=noise)
        own, updates = newcomers(pulls, rng, 40, noise=noise)
        for group in (0, 1):
            edges = [dict(updates_of) for updates_of in groups]
            if is_poisoned:  # the very direction of the newcomers, without noise
                edges[1 - group][f"{1 - group}-0"] = pulls[group]
            tree = split_tree(InMemory(), edges, dim=500)
            descents = tree.descend_all(0, updates[own == group], **settings)
            num_right += sum(descent.child_id == 1 + group for descent in descents)
            num_routed += len(descents)
    return num_right / num_routed


def by_default():
    guard = Guard()
    return {"ignored_share": guard.ignored_share, "num_best": guard.num_best}


@pytest.mark.parametrize("noise", [0.3, 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_one_poisoned_update_attracts_no_newcomer_by_default_and_all_by_the_maximum(size, noise):
    assert share_right(size, noise=noise, is_poisoned=True, **by_default()) >= 0.99
    assert share_right(size, noise=noise, is_poisoned=True) < 0.01


@pytest.mark.parametrize("size", SIZES[2:])
def test_where_the_noise_is_twice_the_signal_four_updates_are_enough_to_bear_a_poisoned_one(size):
    assert share_right(size, noise=2.0, is_poisoned=True, **by_default()) >= 0.98
    # Ignoring a share alone does nothing where a tenth of the updates is none.
    if size == 4:
        assert share_right(4, noise=2.0, is_poisoned=True, ignored_share=0.1) < 0.01


@pytest.mark.parametrize("noise", [0.3, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("size", SIZES)
def test_without_poison_the_default_routes_as_well_as_the_maximum(size, noise):
    ours = share_right(size, noise=noise, is_poisoned=False, **by_default())
    paper = share_right(size, noise=noise, is_poisoned=False)

    assert ours >= paper - 0.005
