"""Real handwritten digits: clients find their groups, and every single client gains."""

import pytest

import fedbranch as fb
from fedbranch.data import digits, label_permutations, label_swaps
from fedbranch.sim import mlp

# Permuted labels leave less in common, so updates are longer; see the presets.
SWAP_RULE = fb.Thresholds(eps_mean=0.1, eps_max=0.4, gamma_max=0.5)
PERMUTATION_RULE = fb.Thresholds(eps_mean=0.15, eps_max=0.5, gamma_max=0.5)
TRAINING = fb.LocalTraining(optimizer=fb.sgd(0.2), epochs=3, batch_size=36)


def federation(structure, num_groups, seed):
    groups = structure(num_groups, seed=seed)
    clients = fb.federate(*digits(), num_clients=20, groups=groups, seed=seed)
    return mlp((1, 8, 8), 10, hidden=(32,), seed=seed), clients


def true_groups(clients):
    groups = {}
    for client_id, client in clients.items():
        groups.setdefault(client.group, []).append(client_id)
    return sorted(groups.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("structure", "num_groups", "rule", "rounds"),
    [
        (label_swaps, 2, SWAP_RULE, 45),
        (label_swaps, 3, SWAP_RULE, 55),
        (label_swaps, 4, SWAP_RULE, 65),
        (label_permutations, 4, PERMUTATION_RULE, 60),
    ],
)
def test_all_clients_find_their_group_and_gain(structure, num_groups, rule, rounds, seed):
    model, clients = federation(structure, num_groups, seed)
    settings = {"rounds": rounds, "training": TRAINING, "seed": seed, "evaluate_every": rounds}

    cfl = fb.simulate(model, clients, rule=rule, **settings)
    plain = fb.fedavg(model, clients, **settings)

    assert sorted(cfl.clusters.values()) == true_groups(clients)
    for client_id in clients:
        gain = cfl.evaluation[client_id]["accuracy"] - plain.evaluation[client_id]["accuracy"]
        assert gain > 0.05, client_id


@pytest.mark.slow
def test_half_participation_late_joiners_and_leavers_at_once():
    model, clients = federation(label_swaps, 4, seed=0)
    ids = list(clients)
    changes = {i: {"joins": 60} for i in ids[12:18]} | {i: {"leaves": 70} for i in ids[:2]}
    clients = {
        i: fb.ClientData(tuple(c.train), tuple(c.test), group=c.group, **changes.get(i, {}))
        for i, c in clients.items()
    }

    run = fb.simulate(
        model,
        clients,
        rule=SWAP_RULE,
        rounds=130,
        training=TRAINING,
        participation=0.5,
        evaluate_every=130,
    )

    stayed = {i: c for i, c in clients.items() if c.leaves is None}
    assert sorted(run.clusters.values()) == true_groups(stayed)
    routed = {m.client_id for entry in run.history for m in entry.record.routed}
    assert routed >= set(ids[12:18])


@pytest.mark.slow
def test_identically_distributed_clients_stay_together():
    clients = fb.federate(*digits(), num_clients=20, seed=0)
    model = mlp((1, 8, 8), 10, hidden=(32,), seed=0)

    run = fb.simulate(
        model, clients, rule=SWAP_RULE, rounds=60, training=TRAINING, evaluate_every=60
    )

    assert len(run.clusters) == 1
