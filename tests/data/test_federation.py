"""One data set as a federation of clients."""

import numpy as np
import pytest

from fedbranch import federate
from fedbranch.data import dirichlet, feature_noise, label_swaps

X = np.arange(200, dtype=np.float32).reshape(100, 2)
Y = np.arange(100) % 10


def test_training_rows_are_dealt_out_and_test_rows_are_shared():
    clients = federate(X, Y, num_clients=4, seed=0)

    train = np.concatenate([client.train.x[:, 0] for client in clients.values()])
    tests = [client.test.x[:, 0] for client in clients.values()]
    assert len(tests[0]) == 20
    assert all(np.array_equal(test, tests[0]) for test in tests)
    assert sorted([*train, *tests[0]]) == sorted(X[:, 0])


def test_a_data_sets_own_test_rows_are_shared_by_all_clients():
    swaps = label_swaps(2, seed=0)
    clients = federate(X, Y, num_clients=4, groups=swaps, test=(X[:7] + 0.5, Y[:7]), seed=0)

    train = np.concatenate([client.train.x[:, 0] for client in clients.values()])
    assert sorted(train) == sorted(X[:, 0])
    for client in clients.values():
        new_labels = np.array(swaps[int(client.group)].new_labels)
        assert (client.test.x == X[:7] + 0.5).all()
        assert (client.test.y == new_labels[Y[:7]]).all()


@pytest.mark.parametrize("test", [None, (X[:7], Y[:7])])
def test_test_rows_that_are_the_same_for_a_group_are_kept_once(test):
    groups = {True: label_swaps(2, seed=0), False: feature_noise(2, standard_deviation=0.1)}

    for is_alike, transforms in groups.items():
        clients = federate(X, Y, test=test, num_clients=4, groups=transforms, seed=0)

        first, _, third, _ = (client.test.x for client in clients.values())
        assert np.shares_memory(first, third) is is_alike
        assert not np.shares_memory(first, X)


def test_own_test_rows_are_held_out_of_the_clients_own():
    clients = federate(X, Y, num_clients=4, held_out="own", test_fraction=0.4, seed=0)

    rows = [x for c in clients.values() for x in [*c.train.x[:, 0], *c.test.x[:, 0]]]
    assert sorted(rows) == sorted(X[:, 0])
    assert [len(client.test.x) for client in clients.values()] == [10] * 4


@pytest.mark.parametrize("held_out", ["shared", "own"])
def test_validation_rows_are_set_aside_from_the_clients_own_training_rows(held_out):
    settings = {
        "num_clients": 4, "held_out": held_out, "seed": 0,
        "groups": feature_noise(2, standard_deviation=1.0),
    }  # fmt: skip
    without = federate(X, Y, **settings)
    clients = federate(X, Y, validation_fraction=0.3, **settings)

    for client_id, client in clients.items():
        whole = without[client_id]
        assert whole.validation is None
        assert len(client.validation.x) == 6
        together = np.concatenate([client.train.x, client.validation.x])
        assert np.array_equal(np.sort(together, axis=0), np.sort(whole.train.x, axis=0))
        label_of = {tuple(row): label for row, label in zip(*whole.train, strict=True)}
        for part in (client.train, client.validation):
            assert [label_of[tuple(row)] for row in part.x] == part.y.tolist()
        assert np.array_equal(client.test.x, whole.test.x)


def test_one_row_stays_on_each_side():
    few = federate(X[:8], Y[:8], num_clients=3, validation_fraction=0.01, seed=0)
    most = federate(X[:8], Y[:8], num_clients=3, validation_fraction=0.99, seed=0)

    assert [len(client.validation.x) for client in few.values()] == [1] * 3
    assert [len(client.train.x) for client in most.values()] == [1] * 3


def test_training_and_test_data_are_seen_through_the_groups_transform():
    swaps = label_swaps(2, seed=0)
    clients = federate(X, Y, num_clients=4, groups=swaps, seed=0)

    for client in clients.values():
        new_labels = np.array(swaps[int(client.group)].new_labels)
        for part in (client.train, client.test):
            original = (part.x[:, 0] / 2).astype(int) % 10
            assert np.array_equal(part.y, new_labels[original])


def test_groups_take_turns_or_are_given():
    swaps = label_swaps(3, seed=0)
    turns = federate(X, Y, num_clients=5, groups=swaps, seed=0)
    given = federate(X, Y, num_clients=5, groups=swaps, group_of=[2, 2, 2, 2, 0], seed=0)

    assert [client.group for client in turns.values()] == ["0", "1", "2", "0", "1"]
    assert [client.group for client in given.values()] == ["2", "2", "2", "2", "0"]


def test_the_seed_decides_everything():
    def make(seed):
        noise = feature_noise(2, standard_deviation=1.0)
        return federate(X, Y, num_clients=4, groups=noise, seed=seed)

    first, same, other = make(1), make(1), make(2)

    for client_id, client in first.items():
        assert np.array_equal(client.train.x, same[client_id].train.x)
        assert np.array_equal(client.test.x, same[client_id].test.x)
    assert not np.array_equal(first["client-0"].train.x, other["client-0"].train.x)


def test_a_users_partition_and_ids_in_order():
    def skewed(labels, num_clients, *, seed):
        return dirichlet(labels, num_clients, alpha=0.3, seed=seed)

    clients = federate(X, Y, num_clients=11, partition=skewed, seed=0)

    assert next(iter(clients)) == "client-00"
    assert list(clients)[-1] == "client-10"
    assert len({len(client.train.x) for client in clients.values()}) > 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"test_fraction": 1.0}, "test_fraction is 1.0"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
        ({"validation_fraction": -0.1}, "validation_fraction is -0.1"),
        ({"num_clients": 80, "validation_fraction": 0.5}, "into training and validation"),
        ({"held_out": "mine"}, "held_out is 'mine'"),
        ({"group_of": [0, 0]}, "group_of is"),
        ({"y": Y[:50]}, r"\(100, 2\) and targets of shape \(50,\)"),
        ({"group_of": [0, 0, 0, 1]}, "group_of is"),
        ({"num_clients": 100, "held_out": "own"}, "cannot be split into training and test"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        federate(**{"x": X, "y": Y, "num_clients": 4, "seed": 0, **settings})
