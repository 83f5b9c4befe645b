"""Neither the order of replies nor the number of workers changes a bit."""

import numpy as np
import pytest
import torch
from torch import nn

import fedbranch as fb
from fakes import QuadraticClients, fingerprint
from fedbranch.protocol.tasks import UpdateBatch
from tests.reliability.interruptions import folder_digest

ROUNDS = 40
RULE = fb.Thresholds(eps_mean=0.4, eps_max=1.0, gamma_max=0.3)


def as_mapping(replies, order):
    return {i: replies[i] for i in order}


def as_pairs(replies, order):
    return ((i, replies[i]) for i in order)


def as_batch(replies, order):
    own = [replies[i] for i in order]
    return UpdateBatch(
        client_ids=list(order),
        vectors=np.stack([reply.vector for reply in own]),
        num_examples=[reply.num_examples for reply in own],
        metrics=[reply.metrics for reply in own],
        bases=[reply.base for reply in own],
    )


def served(rule, shape, seed):
    """Serve clients, of which some come late or are silent; the seed only sets the order.

    One client sends unusable replies. Returns the fingerprints after all rounds, and the server.
    """
    clients = QuadraticClients(num_groups=3, clients_per_group=4)
    server = fb.Server(20, rule=rule)
    shuffle = np.random.default_rng(seed)
    chance = np.random.default_rng(1)  # the same for all orders
    prints = []
    for number in range(1, ROUNDS + 1):
        here = clients.client_ids[: 9 if number < 20 else None]
        asked = sorted(i for i in here if chance.random() < 0.8)
        tasks = server.plan(asked)
        trials = server.trials(asked)
        replies = {
            i: fb.Update(
                clients.update(i, task).vector,
                num_examples=10 + len(i) + number % 3,
                metrics={"loss": float(chance.random())},
                base=task.base if i != "c02" else "elsewhere",
            )
            for i, task in tasks.items()
        }
        order = [str(i) for i in shuffle.permutation(sorted(replies))] if seed else sorted(replies)
        losses = {
            i: [float(np.sum((clients.optimum[i] - trial.params) ** 2)) for trial in own]
            for i, own in trials.items()
        }
        shuffled_losses = {str(i): losses[i] for i in shuffle.permutation(sorted(losses))}
        server.step(shape(replies, order) if order else {}, losses=shuffled_losses)
        prints.append(fingerprint(server))
    return prints, server


def simulated(folder, engine, num_workers):
    """Simulate clients that disagree; return the SHA-256 of the run folder without run.json.

    The model has no convolutions, for which workers lay out numbers in another way. So workers
    give the reference's bytes, too.
    """
    clients = {}
    for number in range(9):
        rng = np.random.default_rng(number)
        x = rng.normal(size=(30 + 5 * number, 3)).astype(np.float32)
        y = ((x[:, 0] > 0) ^ (number % 2 == 1)).astype(np.int64)
        clients[f"c{number}"] = fb.ClientData(
            (x[10:], y[10:]), (x[:10], y[:10]), joins=1 if number < 7 else 12
        )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 2))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers have: sums of several threads are others
    try:
        run = fb.simulate(
            model,
            clients,
            rule=fb.Thresholds(eps_mean=0.3, eps_max=0.5, gamma_max=0.5),
            rounds=20,
            training=fb.LocalTraining(optimizer=fb.sgd(0.3), epochs=2, batch_size=10),
            folder=folder,
            engine=engine,
            num_workers=num_workers,
        )
    finally:
        torch.set_num_threads(threads)
    assert run.engine.name == engine
    assert len(run.clusters) > 1
    return folder_digest(folder, except_for="run.json")  # which names the engine


RULES = {"thresholds": RULE, "auto": fb.AutoRule()}


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_replies_changes_no_bit(rule):
    expected, server = served(RULES[rule], as_mapping, seed=0)

    assert len(server.clusters) > 1  # it did more than to average
    for shape in (as_mapping, as_pairs, as_batch):
        assert served(RULES[rule], shape, seed=1)[0] == expected


def test_neither_the_workers_nor_their_number_change_a_bit(tmp_path):
    digests = {
        simulated(tmp_path / f"{engine}-{num_workers}", engine, num_workers)
        for engine, num_workers in [("workers", 1), ("workers", 2), ("reference", None)]
    }

    assert len(digests) == 1


@pytest.mark.reliability
def test_no_order_changes_a_bit(tmp_path, measured):
    num_orders = 0
    for rule in RULES.values():
        expected, _ = served(rule, as_mapping, seed=0)
        for shape in (as_mapping, as_pairs, as_batch):
            for seed in range(1, 11):
                assert served(rule, shape, seed)[0] == expected
                num_orders += 1
    by_workers = {
        simulated(tmp_path / str(num_workers), "workers", num_workers) for num_workers in (1, 2)
    }

    assert len(by_workers) == 1
    measured(
        "order",
        f"{num_orders} of {num_orders} shuffled runs of {ROUNDS} rounds have the same SHA-256 after "
        "every round, as do the run folders of 1 and 2 workers",
    )
