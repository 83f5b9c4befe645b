import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbranch.core.groups import compared_halves, find_structure


def halves_of(centres, noise, dim=200, seed=0):
    """Draw half updates of clients around the centre of their group."""
    rng = np.random.default_rng(seed)
    names = sorted(set(centres))
    directions = dict(zip(names, rng.normal(size=(len(names), dim)), strict=True))
    gradients = np.stack([directions[name] for name in centres])
    a, b = (gradients + noise * rng.normal(size=gradients.shape) for _ in range(2))
    return compared_halves((a + b) / 2, (a - b) / 2)


def same_grouping(groups, truth):
    return len({*zip(groups, truth, strict=True)}) == len(set(groups)) == len(set(truth))


@pytest.mark.parametrize(
    "truth",
    ["aaaaabbbbb", "abcabcabcabcabc", "aaaaaaaaaaaaaaaaaabb", "aaaaaaaaaaaaaaaaaaab", "aaabbb"],
)
@pytest.mark.parametrize("seed", range(3))
def test_all_groups_are_found_at_once(truth, seed):
    found = find_structure(halves_of(truth, noise=0.5, seed=seed))

    assert found.is_clear, found.doubt
    assert same_grouping(found.groups.tolist(), truth)


@pytest.mark.parametrize("num_clients", [3, 4, 6, 10, 20, 40])
def test_no_groups_are_found_in_noise(num_clients):
    clear = [
        find_structure(halves_of("a" * num_clients, noise=2.0, seed=seed)).is_clear
        for seed in range(40)
    ]

    assert not any(clear)


def test_no_groups_are_found_if_every_client_has_its_own_distribution():
    """As with label skew: real differences that no grouping explains."""
    clear = [
        find_structure(halves_of(range(100, 120), noise=0.3, seed=seed)).is_clear
        for seed in range(20)
    ]

    assert not any(clear)


def test_the_lengths_of_updates_do_not_matter():
    rng = np.random.default_rng(0)
    truth = "ababababab"
    directions = dict(zip("ab", rng.normal(size=(2, 100)), strict=True))
    gradients = np.stack([directions[name] for name in truth])
    a, b = (gradients + 0.5 * rng.normal(size=gradients.shape) for _ in range(2))
    lengths = 10.0 ** rng.uniform(-3, 3, size=(10, 1))

    plain = find_structure(compared_halves((a + b) / 2, (a - b) / 2))
    scaled = find_structure(compared_halves(lengths * (a + b) / 2, lengths * (a - b) / 2))

    assert plain.groups.tolist() == scaled.groups.tolist()
    assert scaled.p_value == pytest.approx(plain.p_value, rel=1e-6)
    assert scaled.scatter == pytest.approx(plain.scatter, rel=1e-6)


def test_noise_is_estimated_from_the_halves():
    """Halves with noise s have whole updates with noise s / sqrt(2); signals have length sqrt(d)."""
    halves = halves_of("a" * 50, noise=1.0, dim=5000)

    assert halves.noise == pytest.approx(np.sqrt(0.5), rel=0.05)


@given(st.permutations(range(12)), st.integers(0, 5))
def test_the_order_of_clients_does_not_matter(order, seed):
    truth = "aaaabbbbcccc"
    rng = np.random.default_rng(seed)
    directions = dict(zip("abc", rng.normal(size=(3, 60)), strict=True))
    gradients = np.stack([directions[name] for name in truth])
    a, b = (gradients + rng.normal(size=gradients.shape) for _ in range(2))

    first = find_structure(compared_halves((a + b) / 2, (a - b) / 2))
    second = find_structure(compared_halves((a + b)[order] / 2, (a - b)[order] / 2))

    assert same_grouping(first.groups[order].tolist(), second.groups.tolist())
    assert first.is_clear == second.is_clear


def test_two_clients_are_too_few():
    assert find_structure(halves_of("ab", noise=0.1)) is None


def test_a_doubt_names_the_reason_against_the_groups():
    assert "differ by" in find_structure(halves_of(range(100, 120), noise=0.3)).doubt
