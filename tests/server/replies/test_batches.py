"""A batch is worth its replies one by one, and a bad row of it is refused alone."""

import numpy as np
import pytest
import torch

from fakes import DIM, QuadraticClients
from fedbranch import NeverSplit, Server, Thresholds, Update, UpdateBatch

GOOD = np.ones(DIM, dtype=np.float32)


def with_entry(value):
    vector = GOOD.copy()
    vector[3] = value
    return vector


def as_batch(updates, convert):
    """Stack single updates in a batch, in the opposite order."""
    ids = sorted(updates, reverse=True)
    return UpdateBatch(
        client_ids=ids,
        vectors=convert(np.stack([updates[i].vector for i in ids])),
        num_examples=[updates[i].num_examples for i in ids],
        metrics=[updates[i].metrics for i in ids],
        bases=[updates[i].base for i in ids],
    )


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_a_batch_is_worth_the_same_as_its_updates_one_by_one(convert):
    rule = Thresholds(eps_mean=0.5, eps_max=0.5, gamma_max=0.3)
    servers = [Server(DIM, rule=rule) for _ in range(2)]
    clients = QuadraticClients(2, 6)

    for _ in range(12):
        records = []
        for server, form in zip(servers, [dict, lambda u: as_batch(u, convert)], strict=True):
            tasks = server.plan(clients.client_ids)
            updates = {i: clients.update(i, task) for i, task in tasks.items()}
            records.append(server.step(form(updates)))
        ours, theirs = (record.to_json() for record in records)
        for decision, expected in zip(ours["decisions"], theirs["decisions"], strict=True):
            assert decision["verdict"] == expected["verdict"]
            assert decision["measurements"] == pytest.approx(expected["measurements"], abs=1e-6)

    assert servers[0].clusters == servers[1].clusters
    assert len(servers[0].clusters) > 1
    for leaf, other in zip(servers[0].tree.leaves, servers[1].tree.leaves, strict=True):
        np.testing.assert_allclose(leaf.params, other.params, atol=1e-6)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [(np.nan, "NaN or infinity"), (np.inf, "NaN or infinity"), (1e35, "beyond"), (0.0, "zero")],
)
def test_a_bad_row_of_a_batch_is_refused_alone(entry, reason):
    server = Server(DIM, rule=NeverSplit())
    tasks = server.plan(["a", "b", "c"])
    matrix = np.ones((3, DIM), dtype=np.float32)
    matrix[1] = entry if entry == 0 else with_entry(entry)

    record = server.step(
        UpdateBatch(
            client_ids=["a", "b", "c"], vectors=matrix, num_examples=[1, 1, -1], metrics=[{}] * 3,
            bases=[tasks[i].base for i in "abc"],
        )
    )  # fmt: skip

    assert reason in record.refused["b"]
    assert "num_examples is -1" in record.refused["c"]
    assert sorted(record.metrics) == ["a"]
    assert server.tree.root.params.tolist() == [1.0] * DIM


def test_a_batch_from_another_round_or_of_strangers_is_refused():
    server = Server(DIM, rule=NeverSplit())
    old = server.plan(["a"])["a"].base
    server.step({"a": Update(GOOD, 1)})
    server.plan(["a"])

    record = server.step(
        UpdateBatch(
            client_ids=["a", "x"], vectors=np.ones((2, DIM), np.float32), num_examples=[1, 1],
            metrics=[{}] * 2, bases=[old, old],
        )
    )  # fmt: skip

    assert "computed at other parameters" in record.refused["a"]
    assert "unknown client" in record.refused["x"]


def test_rows_that_a_driver_refused_are_not_read():
    server = Server(2, rule=NeverSplit())
    tasks = server.plan(["a", "b", "c"])
    batch = UpdateBatch(
        client_ids=["a", "b"],
        vectors=np.float32([[1, 2], [np.nan, 0]]),
        num_examples=[1, 0],
        bases=[tasks["a"].base, ""],
        metrics=[{}, {}],
        refused={"b": "cannot be read", "stranger": "two keys"},
    )

    record = server.step(batch)

    assert record.refused == {"b": "cannot be read", "stranger": "two keys"}
    assert list(record.metrics) == ["a"]
    assert server.tree.root.params.tolist() == [1, 2]


def test_a_row_whose_numbers_fail_is_refused_alone():
    server = Server(1, rule=NeverSplit())
    tasks = server.plan(["a", "b"])

    class Failing(dict):
        def items(self):
            raise KeyError("trap")

    record = server.step(
        UpdateBatch(
            client_ids=["a", "b"], vectors=np.float32([[2], [9]]), num_examples=[1, 1],
            metrics=[{}, Failing()], bases=[tasks[i].base for i in "ab"],
        )
    )  # fmt: skip

    assert record.refused == {"b": "the reply cannot be read: KeyError('trap')"}
    assert server.tree.root.params.tolist() == [2]


def test_a_mask_hides_nothing_in_a_batch():
    server = Server(1, rule=NeverSplit())
    tasks = server.plan(["a", "b"])

    record = server.step(
        UpdateBatch(
            client_ids=["a", "b"], vectors=np.ma.masked_invalid(np.float32([[2], [np.nan]])),
            num_examples=[1, 1], metrics=[{}, {}], bases=[tasks[i].base for i in "ab"],
        )
    )  # fmt: skip

    assert "NaN or infinity" in record.refused["b"]
