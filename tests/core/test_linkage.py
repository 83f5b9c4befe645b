import sys
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import cut_tree, fcluster, linkage
from scipy.spatial.distance import squareform

from fedbranch import bipartition, cosine_similarity, hierarchy, separation_gap
from fedbranch.core import products


def random_symmetric(seed, num_clients, levels=None):
    """Random similarities; with few levels, most of them are tied."""
    rng = np.random.default_rng(seed)
    values = rng.uniform(-1, 1, (num_clients, num_clients))
    if levels is not None:
        values = np.round(values * levels) / levels
    upper = np.triu(values, 1)
    return upper + upper.T + np.eye(num_clients)


def smallest_cross_similarity(similarity):
    """Try every split."""
    num_clients = len(similarity)
    best = np.inf
    for mask in range(1, 2 ** (num_clients - 1)):
        right = np.array([bool(mask >> row & 1) for row in range(num_clients - 1)] + [False])
        best = min(best, similarity[np.ix_(right, ~right)].max())
    return best


def paper_bipartition(similarity):
    """The paper's algorithm, line by line: merge the most similar until two clusters are left."""
    num_clients = len(similarity)
    order = np.argsort(-similarity, axis=None, kind="stable")
    clusters = [{row} for row in range(num_clients)]
    for flat in order:
        if len(clusters) == 2:
            break
        first, second = divmod(int(flat), num_clients)
        merged = set()
        for cluster in list(clusters):
            if first in cluster or second in cluster:
                merged |= cluster
                clusters.remove(cluster)
        clusters.append(merged)
    return {frozenset(cluster) for cluster in clusters}


similarities = st.builds(
    random_symmetric,
    seed=st.integers(0, 2**32 - 1),
    num_clients=st.integers(2, 10),
    levels=st.sampled_from([None, 1, 2, 5]),
)


@settings(max_examples=3000)
@given(similarities)
def test_no_split_has_a_smaller_cross_similarity(similarity):
    split = bipartition(similarity)

    crossing = similarity[np.ix_(split.left_rows, split.right_rows)]
    assert split.cross_similarity == crossing.max() == smallest_cross_similarity(similarity)


@settings(max_examples=1000)
@given(similarities)
def test_the_split_is_the_one_of_the_papers_algorithm_also_with_ties(similarity):
    split = bipartition(similarity)

    assert {frozenset(split.left_rows), frozenset(split.right_rows)} == paper_bipartition(
        similarity
    )


@settings(max_examples=300)
@given(similarities)
def test_a_split_uses_every_row_once_and_row_0_is_left(similarity):
    left_rows, right_rows, _ = bipartition(similarity)

    assert sorted([*left_rows, *right_rows]) == list(range(len(similarity)))
    assert 0 in left_rows
    assert len(right_rows) > 0
    assert list(left_rows) == sorted(left_rows)
    assert list(right_rows) == sorted(right_rows)


@pytest.mark.parametrize("num_clients", [2, 3, 10, 100, 500, 2000])
def test_the_hierarchy_equals_scipys_single_linkage(num_clients):
    similarity = random_symmetric(num_clients, num_clients)
    reference = linkage(squareform(1 - similarity, checks=False), method="single")

    ours = hierarchy(similarity)

    np.testing.assert_allclose(1 - ours.similarities, reference[:, 2], atol=1e-12)
    for num_groups in {2, min(5, num_clients), max(2, num_clients // 3)}:
        expected = fcluster(reference, num_groups, criterion="maxclust")
        assert same_grouping(ours.groups(num_groups), expected)


def test_the_linkage_matrix_is_readable_by_scipy():
    similarity = random_symmetric(7, 40)
    ours = hierarchy(similarity)

    cut = cut_tree(ours.linkage(), n_clusters=6)[:, 0]

    assert same_grouping(cut, ours.groups(6))


def same_grouping(a, b):
    pairs = set(zip(a, b, strict=True))
    return len(pairs) == len(set(a)) == len(set(b))


@settings(max_examples=200)
@given(similarities, st.data())
def test_every_cut_of_the_hierarchy_is_optimal(similarity, data):
    merges = hierarchy(similarity)
    num_groups = data.draw(st.integers(2, len(similarity)))

    groups = merges.groups(num_groups)

    crossing = [
        similarity[a, b] for a, b in combinations(range(len(groups)), 2) if groups[a] != groups[b]
    ]
    assert max(crossing) == merges.similarities[-(num_groups - 1)]
    assert len(set(groups)) == num_groups


@settings(max_examples=200)
@given(similarities, st.randoms(use_true_random=False))
def test_renaming_the_rows_renames_the_split(similarity, random):
    # Distinct similarities, so that no tie depends on the order of the rows.
    similarity = similarity + random_symmetric(random.randrange(2**32), len(similarity)) * 1e-6
    order = list(range(len(similarity)))
    random.shuffle(order)

    split = bipartition(similarity)
    renamed = bipartition(similarity[np.ix_(order, order)])

    assert {frozenset(split.left_rows), frozenset(split.right_rows)} == {
        frozenset(order[row] for row in renamed.left_rows),
        frozenset(order[row] for row in renamed.right_rows),
    }


def test_the_papers_two_distributions_by_hand():
    # α is 1 within and -1 across: c1 = {i | α_i0 = 1}.
    groups = np.array([0, 1, 0, 1, 1])
    similarity = np.where(groups[:, None] == groups[None, :], 1.0, -1.0)

    split = bipartition(similarity)

    assert split.left_rows.tolist() == [0, 2]
    assert split.right_rows.tolist() == [1, 3, 4]
    assert split.cross_similarity == -1
    assert separation_gap(similarity, groups) == 2


def test_two_clients_are_already_a_split():
    split = bipartition(np.array([[1.0, 0.3], [0.3, 1.0]]))

    assert (split.left_rows.tolist(), split.right_rows.tolist()) == ([0], [1])
    assert split.cross_similarity == 0.3


def test_complete_linkage_would_be_wrong_here():
    # A chain 0-1-2 of similar neighbours; the ends are not similar. The weakest link is to 3.
    similarity = np.array(
        [
            [1.0, 0.9, 0.1, 0.2],
            [0.9, 1.0, 0.8, 0.3],
            [0.1, 0.8, 1.0, 0.4],
            [0.2, 0.3, 0.4, 1.0],
        ]
    )

    assert bipartition(similarity).right_rows.tolist() == [3]


def test_a_tensor_gives_the_same_split():
    updates = np.random.default_rng(0).normal(size=(12, 50)).astype(np.float32)
    similarity = cosine_similarity(updates)

    split = bipartition(similarity)
    same = bipartition(torch.from_numpy(similarity))

    assert split.left_rows.tolist() == same.left_rows.tolist()
    assert split.cross_similarity == same.cross_similarity


@pytest.mark.parametrize(
    ("similarity", "message"),
    [
        (np.ones((2, 3)), r"shape \(2, 3\)"),
        (np.ones((1, 1)), "single client"),
        (np.ones((0, 0)), r"shape \(0, 0\)"),
        (np.array([[1, np.nan], [np.nan, 1]]), "NaN"),
        (np.array([[1.0, 0.5], [0.1, 1.0]]), "transpose by 0.4"),
    ],
)
def test_bad_matrices_are_named(similarity, message):
    with pytest.raises(ValueError, match=message):
        bipartition(similarity)


def test_groups_outside_the_possible_are_named():
    with pytest.raises(ValueError, match="num_groups is 4; 3 clients"):
        hierarchy(np.eye(3)).groups(4)


# The separation gap


def unit_vectors(degrees):
    angles = np.deg2rad(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def test_a_split_can_be_correct_with_a_negative_gap():
    # The counter-example to the paper's "only if".
    similarity = cosine_similarity(unit_vectors([0, 50, 100, 190, 195]))
    groups = [0, 0, 0, 1, 1]

    assert bipartition(similarity).right_rows.tolist() == [3, 4]
    assert separation_gap(similarity, groups) == pytest.approx(-0.1736, abs=1e-4)


@settings(max_examples=300)
@given(similarities, st.data())
def test_a_positive_gap_means_a_correct_split(similarity, data):
    groups = data.draw(
        st.lists(st.integers(0, 3), min_size=len(similarity), max_size=len(similarity))
    )

    if separation_gap(similarity, groups) > 0:
        split = bipartition(similarity)
        left = {groups[row] for row in split.left_rows}
        assert left.isdisjoint(groups[row] for row in split.right_rows)


@settings(max_examples=300)
@given(similarities)
def test_the_gap_of_a_pure_cluster_is_never_positive(similarity):
    assert separation_gap(similarity, [0] * len(similarity)) <= 0


def test_the_gap_needs_a_group_for_each_row():
    with pytest.raises(ValueError, match="one group for each of the 2 rows"):
        separation_gap(np.eye(2), [0, 1, 1])


def test_groups_are_distinguished_by_equality():
    similarity = cosine_similarity(unit_vectors([0, 90, 180]))

    assert separation_gap(similarity, [1, "1", 2]) == separation_gap(similarity, "abc")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("levels", [None, 1, 3, 30])
def test_edges_are_those_of_kruskal_in_strict_order(seed, levels):
    num_clients = 60
    similarity = random_symmetric(seed, num_clients, levels)

    found = hierarchy(similarity)

    first, second = np.triu_indices(num_clients, 1)
    order = np.lexsort((second, first, -similarity[first, second]))
    group = list(range(num_clients))
    kept = []
    for a, b in zip(first[order].tolist(), second[order].tolist(), strict=True):
        if group[a] != group[b]:
            kept.append((a, b))
            group = [group[a] if g == group[b] else g for g in group]
    assert [tuple(edge) for edge in found.edge_rows.tolist()] == kept


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [(0, 1), (1, 2), (300, 7)])
def test_similarities_that_are_not_finite_are_an_error(value, place):
    similarity = random_symmetric(0, 301)
    similarity[place] = similarity[place[::-1]] = value

    with pytest.raises(ValueError, match="NaN or infinity"):
        hierarchy(similarity)


def test_a_client_that_is_infinitely_unlike_all_others_is_an_error():
    similarity = random_symmetric(0, 30)
    similarity[4] = similarity[:, 4] = -np.inf

    with pytest.raises(ValueError, match="NaN or infinity"):
        hierarchy(similarity)


def test_a_matrix_that_is_not_symmetric_is_an_error():
    similarity = random_symmetric(0, 300)
    similarity[270, 3] += 0.1

    with pytest.raises(ValueError, match=r"differs from its transpose by 0\.1"):
        hierarchy(similarity)


@pytest.mark.parametrize("value", [0.1, np.nan, np.inf])
def test_several_threads_find_the_error_in_a_matrix(monkeypatch, value):
    monkeypatch.setattr(products, "ROWS_PER_THREAD", 100)
    monkeypatch.setattr(products, "num_cores", lambda: 3)
    similarity = random_symmetric(0, 600)
    similarity[20, 10] += 0.01
    similarity[590, 300] += value

    message = r"differs from its transpose by 0\.1" if np.isfinite(value) else "NaN or infinity"
    with pytest.raises(ValueError, match=message):
        hierarchy(similarity)


def test_equal_similarities_take_no_more_steps_than_others():
    num_calls = 0

    def count(frame, event, argument):
        nonlocal num_calls
        num_calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = hierarchy(np.ones((300, 300)))
    finally:
        sys.setprofile(before)

    assert found.edge_rows.tolist() == [[0, row] for row in range(1, 300)]
    assert num_calls < 20 * 300  # and not for each pair
