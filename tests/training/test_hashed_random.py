import pytest
import torch
from torch import nn

from fedbranch.training.hashed_random import SeededDropout, permutations, splitmix64


def test_the_numbers_are_those_of_splitmix64():
    # The first outputs for the seed 1234567, as published with the generator.
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]

    ours = [int(splitmix64(torch.tensor(1234567), place)) % 2**64 for place in range(5)]

    assert ours == published


def test_every_order_has_every_row_once():
    seeds, sizes = torch.arange(50), torch.arange(1, 51)

    orders = permutations(seeds, sizes, passes=[0, 3], width=60)

    for client in range(50):
        for order in orders[client]:
            assert sorted(order[: client + 1].tolist()) == list(range(client + 1))
            assert order[client + 1 :].tolist() == list(range(client + 1, 60))


def test_a_clients_order_does_not_depend_on_the_others():
    seeds, sizes = torch.tensor([5, 17, 99]), torch.tensor([4, 30, 9])

    together = permutations(seeds, sizes, passes=[2, 7], width=33)

    for client in range(3):
        alone = permutations(seeds[client : client + 1], sizes[client : client + 1], [7], 33)
        assert torch.equal(together[client, 1], alone[0, 0])


def test_all_orders_are_equally_frequent():
    num_draws = 6000
    seeds = torch.arange(num_draws)

    orders = permutations(seeds, torch.full((num_draws,), 3), passes=[0], width=3)[:, 0]

    counts = torch.bincount(orders @ torch.tensor([9, 3, 1]), minlength=27)
    expected = num_draws / 6
    chi_squared = float(((counts[counts > 0] - expected) ** 2 / expected).sum())
    assert int((counts > 0).sum()) == 6
    assert chi_squared < 20.5  # 0.1 % of fair generators exceed this with 5 degrees of freedom


def dropped(seed, step=0, p=0.3, layer=nn.Dropout, shape=(200, 50)):
    with SeededDropout(torch.tensor(seed), step):
        return layer(p)(torch.ones(shape))


def test_dropout_drops_its_share_and_keeps_the_mean():
    result = dropped(seed=1)

    assert float((result == 0).float().mean()) == pytest.approx(0.3, abs=0.02)
    assert result[result > 0].unique().tolist() == pytest.approx([1 / 0.7])


def test_dropout_depends_on_seed_and_step_only():
    torch.manual_seed(0)
    first = dropped(seed=1, step=4)
    torch.manual_seed(1)

    assert torch.equal(dropped(seed=1, step=4), first)
    assert not torch.equal(dropped(seed=2, step=4), first)
    assert not torch.equal(dropped(seed=1, step=5), first)


def test_two_dropouts_in_one_step_differ():
    x = torch.ones(40, 40)
    with SeededDropout(torch.tensor(3), 0):
        assert not torch.equal(nn.functional.dropout(x), nn.functional.dropout(x))


def test_more_rows_do_not_change_the_first_ones():
    assert torch.equal(dropped(seed=1, shape=(9, 50))[:4], dropped(seed=1, shape=(4, 50)))


def test_dropout_of_channels_drops_whole_channels():
    result = dropped(seed=1, layer=nn.Dropout2d, shape=(50, 8, 3, 3))

    assert ((result == 0).all(dim=(2, 3)) | (result > 0).all(dim=(2, 3))).all()
    assert float((result == 0).float().mean()) == pytest.approx(0.3, abs=0.06)


def test_dropout_drops_nothing_in_evaluation_and_everything_at_one():
    with SeededDropout(torch.tensor(1), 0):
        assert nn.Dropout(0.5).eval()(torch.ones(5)).tolist() == [1.0] * 5
        assert nn.Dropout(1.0)(torch.ones(5)).tolist() == [0.0] * 5
