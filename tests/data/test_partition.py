import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbranch.data import dirichlet, iid, quantity_skew, shards

LABELS = np.random.default_rng(0).integers(0, 10, size=600)

PARTITIONS = {
    "iid": iid,
    "dirichlet": lambda labels, n, *, seed: dirichlet(labels, n, alpha=0.5, seed=seed),
    "shards": lambda labels, n, *, seed: shards(labels, n, shards_per_client=2, seed=seed),
    "quantity_skew": lambda labels, n, *, seed: quantity_skew(labels, n, ratio=10, seed=seed),
}


@pytest.mark.parametrize("name", PARTITIONS)
@settings(max_examples=30)
@given(num_clients=st.integers(1, 25), seed=st.integers(0, 2**32 - 1))
def test_every_row_goes_to_exactly_one_client(name, num_clients, seed):
    parts = PARTITIONS[name](LABELS, num_clients, seed=seed)

    assert len(parts) == num_clients
    assert sorted(np.concatenate(parts)) == list(range(len(LABELS)))
    assert all(len(part) > 0 for part in parts)


@pytest.mark.parametrize("name", PARTITIONS)
def test_the_seed_decides(name):
    first, same, other = (PARTITIONS[name](LABELS, 7, seed=seed) for seed in (1, 1, 2))

    assert all(np.array_equal(a, b) for a, b in zip(first, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def label_shares(rows):
    return np.bincount(LABELS[rows], minlength=10) / len(rows)


def test_small_alpha_skews_labels_and_large_alpha_does_not():
    skewed = dirichlet(LABELS, 5, alpha=0.1, seed=0)
    even = dirichlet(LABELS, 5, alpha=1000, seed=0)

    assert np.mean([label_shares(rows).max() for rows in skewed]) > 0.3
    assert np.mean([label_shares(rows).max() for rows in even]) < 0.2


def test_two_shards_hold_few_labels():
    parts = shards(np.repeat(np.arange(10), 60), 10, shards_per_client=2, seed=0)

    assert all(len(set(np.repeat(np.arange(10), 60)[rows])) <= 4 for rows in parts)


def test_the_largest_client_has_ratio_times_the_rows_of_the_smallest():
    sizes = [len(rows) for rows in quantity_skew(np.zeros(10_000), 10, ratio=20, seed=0)]

    assert max(sizes) / min(sizes) == pytest.approx(20, rel=0.05)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iid([0, 1], 3, seed=0), "num_clients is 3; 2 rows"),
        (lambda: iid([0, 1], 0, seed=0), "num_clients is 0"),
        (lambda: dirichlet(LABELS, 5, alpha=0, seed=0), "alpha is 0"),
        (lambda: dirichlet([0, 1, 2], 2, alpha=1, seed=0), "3 rows cannot give each of 2"),
        (lambda: dirichlet(LABELS, 200, alpha=0.001, seed=0), "1000 draws"),
        (lambda: shards([0, 1, 2], 2, seed=0), "3 rows cannot make 4 shards"),
        (lambda: shards([0, 1], 2, shards_per_client=0, seed=0), "shards_per_client is 0"),
        (lambda: quantity_skew(LABELS, 5, ratio=0.5, seed=0), "ratio is 0.5"),
    ],
)
def test_impossible_partitions_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
