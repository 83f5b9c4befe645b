"""Models and training that are easy to get wrong for many clients at once.

Whichever engine trains them in the end, the numbers must be those of the reference.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedbranch as fb
from sim.engines.small_problems import make_clients, mlp, seeded

SIZES = [23, 30, 40, 41, 9]


def sorted_by_label(clients):
    for client in clients.values():
        client.train.y.sort()
    return clients


def with_equal_first_rows(clients):
    for client in clients.values():
        client.train.x[:4] = 0.0
    return clients


def of_one_class_at_both_ends(clients):
    for client in clients.values():
        client.train.y[:2] = client.train.y[-2:] = 0
    return clients


def partly_ignored(clients):
    for client in clients.values():
        client.train.y[5:8] = -100
    return clients


def precision(outputs, targets):
    found = outputs.argmax(1) == 1
    return (found & (targets == 1)).sum() / found.sum().clamp(min=1)


def padded_at_the_end(module, x):
    table = module.layer.weight.t()  # (6, 3): six words
    words = (x[:, 0] * 2).long().clamp(0, 4) + (x[:, 1] > 1).long()
    return functional.embedding(words, table, padding_idx=-1)


def mean_as_a_number(outputs, targets):
    return float((outputs.argmax(1) == targets).float().mean())


def words(seed=0):
    rng = np.random.default_rng(seed)

    def examples(rows):
        x = rng.integers(1, 12, (rows, 5))
        x[:, 3:] = 0  # padding
        return x, rng.integers(0, 3, rows)

    return {f"c{i}": fb.ClientData(examples(rows), examples(7)) for i, rows in enumerate(SIZES)}


class Wrapped(nn.Module):
    def __init__(self, around):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.around = around

    def forward(self, x):
        return self.around(self, x)


def divided_by_length(module, x):
    return module.layer(x) / len(x)


def centred_when_measured(module, x):
    return module.layer(x if module.training else x - x.mean(0))


def dropped_across(module, x):
    return functional.dropout(module.layer(x).t(), 0.4, module.training).t()


def clamped(module, x):
    with torch.no_grad():
        module.layer.weight.clamp_(-0.2, 0.2)
    return module.layer(x)


def reads_when_measured(module, x):
    return module.layer(x) * (1.0 if module.training or x.sum().item() > 0 else 0.5)


def writes_into_its_input(module, x):
    return module.layer(x.mul_(2).add_(1))


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return self.layer(x - self.mean)


def weighted(outputs, targets):
    return functional.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 5.0, 20.0]))


def ignoring(outputs, targets):
    return functional.cross_entropy(outputs, targets, ignore_index=2)


def accuracy_in_numpy(outputs, targets):
    return torch.tensor((outputs.argmax(1).numpy() == targets.numpy()).mean())


def accuracy_of_the_first_class(outputs, targets):
    return (outputs.argmax(1)[targets == targets[0]] == targets[0]).float().mean()


def projected(params):
    optimizer = torch.optim.SGD(params, lr=0.1)

    def project(optimizer, *_):
        with torch.no_grad():
            for param in optimizer.param_groups[0]["params"]:
                param /= max(1.0, float(param.norm()))

    optimizer.register_step_post_hook(project)
    return optimizer


def embedded(**settings):
    return seeded(
        lambda: nn.Sequential(nn.Embedding(12, 4, **settings), nn.Flatten(), nn.Linear(20, 3))
    )


def signal_net():
    return seeded(
        lambda: nn.Sequential(
            nn.Conv1d(1, 4, 3), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten(),
            nn.Linear(16, 3),
        )
    )  # fmt: skip


def wrapped(around):
    return seeded(lambda: Wrapped(around))


PLAIN = make_clients(SIZES)


CASES = {
    "padding of an embedding": (embedded(padding_idx=0), words(), {}),
    "embedding by frequency": (embedded(padding_idx=0, scale_grad_by_freq=True), words(), {}),
    "weighted loss, sorted labels": (
        mlp(), sorted_by_label(make_clients(SIZES)), {"loss": weighted}),
    "ignored class, sorted labels": (
        mlp(), sorted_by_label(make_clients(SIZES)), {"loss": ignoring}),
    "BatchNorm, equal first rows": (
        mlp(nn.BatchNorm1d(8)), with_equal_first_rows(make_clients(SIZES)), {}),
    "depends on the number of rows": (wrapped(divided_by_length), PLAIN, {}),
    "mixes rows only when measured": (wrapped(centred_when_measured), PLAIN, {}),
    "dropout across rows": (wrapped(dropped_across), PLAIN, {}),
    "statistics of its inputs": (signal_net(), make_clients(SIZES, shape=(1, 6)), {}),
    "a buffer put in place anew": (seeded(RunningMean), PLAIN, {}),
    "changes its parameters": (wrapped(clamped), PLAIN, {}),
    "reads numbers only when measured": (wrapped(reads_when_measured), PLAIN, {}),
    "optimiser with a hook": (mlp(), PLAIN, {"optimizer": projected}),
    "metric in NumPy": (mlp(), PLAIN, {"metrics": {"accuracy": accuracy_in_numpy}}),
    "metric with a mask": (mlp(), PLAIN, {"metrics": {"first": accuracy_of_the_first_class}}),
    "weighted loss, one class at both ends": (
        mlp(), of_one_class_at_both_ends(make_clients(SIZES)), {"loss": weighted}),
    "weighted loss as a module": (
        mlp(), PLAIN, {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 20.0]))}),
    "targets that are ignored": (mlp(), partly_ignored(make_clients(SIZES)), {}),
    "precision": (mlp(), PLAIN, {"metrics": {"precision": precision}}),
    "metric that is a number": (mlp(), PLAIN, {"metrics": {"accuracy": mean_as_a_number}}),
    "padding counted from the end": (wrapped(padded_at_the_end), PLAIN, {}),
    "one row each": (mlp(), make_clients([1, 1, 1]), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_the_reference(case):
    model, clients, settings = CASES[case]
    training = fb.LocalTraining(epochs=1, batch_size=16, **settings)

    ours, reference = (
        fb.fedavg(model, clients, rounds=2, training=training, engine=engine)
        for engine in ("vectorised", "reference")
    )

    node, expected = ours.tree.root, reference.tree.root
    length = np.linalg.norm(expected.params)
    assert np.linalg.norm(node.params - expected.params) < 1e-4 * length
    np.testing.assert_allclose(node.buffers, expected.buffers, atol=1e-4)
    for client_id, metrics in reference.evaluation.items():
        for name, value in metrics.items():
            if value is None:
                assert ours.evaluation[client_id][name] is None
            else:
                assert ours.evaluation[client_id][name] == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("engine", ["vectorised", "workers"])
def test_a_model_that_writes_into_its_input_does_not_change_the_users_data(engine):
    clients = make_clients(SIZES)
    before = {i: [part.x.copy() for part in (c.train, c.test)] for i, c in clients.items()}

    fb.fedavg(
        wrapped(writes_into_its_input), clients, rounds=2,
        training=fb.LocalTraining(epochs=1, batch_size=16), engine=engine,
    )  # fmt: skip

    for client_id, client in clients.items():
        for part, expected in zip((client.train, client.test), before[client_id], strict=True):
            assert np.array_equal(part.x, expected)
