import pytest

from fedbranch.training.client_sampling import draw_clients
from fedbranch.training.seeds import stream_seed

PRESENT = [f"c{i:02d}" for i in range(20)]


def test_the_same_seed_draws_the_same_clients():
    assert draw_clients(PRESENT, 5, 3) == draw_clients(PRESENT, 5, 3)
    assert draw_clients(PRESENT, 5, 3) != draw_clients(PRESENT, 5, 4)


@pytest.mark.parametrize("seed", range(20))
def test_awaited_clients_are_drawn_first(seed):
    drawn = draw_clients(PRESENT, 5, seed, first=["c07", "c19", "not there"])

    assert {"c07", "c19"} <= set(drawn)
    assert drawn == sorted(drawn)
    assert len(set(drawn)) == 5


def test_asking_more_clients_than_are_present_draws_all():
    assert draw_clients(PRESENT, 99, 0) == PRESENT


def test_all_clients_are_drawn_about_equally_often():
    counts = dict.fromkeys(PRESENT, 0)
    for number in range(2000):
        for client_id in draw_clients(PRESENT, 5, stream_seed(0, number)):
            counts[client_id] += 1

    # 500 expected, with a standard deviation of 19
    assert all(400 < count < 600 for count in counts.values())
