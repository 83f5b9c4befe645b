import numpy as np
import pytest

from fedbranch.training.half_split import half_rows, halves_seed, training_seeds


@pytest.mark.parametrize("num_rows", [4, 5, 6, 31, 200])
def test_every_row_is_in_exactly_one_half(num_rows):
    first, second = half_rows(num_rows, seed=3, halves=1)

    assert np.array_equal(np.sort(np.concatenate([first, second])), np.arange(num_rows))
    assert len(second) - len(first) in (0, 1)
    for rows in (first, second):
        assert np.array_equal(rows, np.sort(rows))


def test_the_same_number_gives_the_same_halves():
    first = half_rows(40, seed=3, halves=7)
    same, other = half_rows(40, seed=3, halves=7), half_rows(40, seed=3, halves=8)
    of_another_client = half_rows(40, seed=4, halves=7)

    assert all(np.array_equal(a, b) for a, b in zip(first, same, strict=True))
    assert not np.array_equal(first.first_rows, other.first_rows)
    assert not np.array_equal(first.first_rows, of_another_client.first_rows)


def test_each_row_is_in_the_first_half_about_every_second_time():
    num_draws = 2000
    counts = np.zeros(6)
    for number in range(num_draws):
        counts[half_rows(6, seed=0, halves=number).first_rows] += 1

    # Five standard deviations of a fair coin.
    assert np.abs(counts - num_draws / 2).max() < 5 * np.sqrt(num_draws / 4)


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_too_few_rows_have_no_halves(num_rows):
    assert half_rows(num_rows, seed=0, halves=1) is None


def test_seeds_differ_between_runs_clients_and_halves():
    assert halves_seed(0, "a") == halves_seed(0, "a")
    assert len({halves_seed(0, "a"), halves_seed(0, "b"), halves_seed(1, "a")}) == 3
    assert len({5, *training_seeds(5), *training_seeds(6)}) == 5
