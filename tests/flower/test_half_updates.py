"""Client apps that know of half updates, and the rule that asks for them."""

from collections import Counter

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbranch.errors import InvalidUpdate
from fedbranch.flower import ClusteredStrategy
from fedbranch.flower.arrays import Layout
from fedbranch.flower.half_updates import with_halves
from fedbranch.flower.testing import FakeGrid, FakeNode
from fedbranch.training.half_split import half_rows
from flower.federations import make_grid, start
from swapped_digits import task

NUM_CLIENTS, NUM_GROUPS = 12, 2


def taken(examples, rows):
    return task.Examples(*(part[rows] for part in examples))


def make_app():
    """The example's client app, as docs/flower.md would have it changed."""
    app = ClientApp()

    def load(message, context):
        partition = context.node_config["partition-id"]
        train, test = task.load_client(partition, NUM_CLIENTS, NUM_GROUPS)
        config = message.content["config"]
        halves = None
        if "fedbranch-halves" in config:
            halves = half_rows(len(train.x), partition, config["fedbranch-halves"])
        model = {name: array.numpy() for name, array in message.content["arrays"].items()}
        return model, train, test, halves

    @app.train()
    def train(message, context):
        model, examples, _, halves = load(message, context)
        settings = {"learning_rate": 0.5, "seed": message.content["config"]["server-round"]}
        if halves is None:
            after = task.train(model, examples, epochs=2, **settings)
            records = {"arrays": ArrayRecord({n: Array(a) for n, a in after.items()})}
        else:
            both = [task.train(model, taken(examples, r), epochs=4, **settings) for r in halves]
            records = with_halves(*both)
        metrics = MetricRecord({"num-examples": len(examples.x)})
        return Message(RecordDict({**records, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        model, examples, held_out, halves = load(message, context)
        if halves is not None:
            is_second = message.content["config"]["fedbranch-half"] == "second"
            held_out = taken(examples, halves[is_second])
        metrics = {**task.evaluate(model, held_out), "num-examples": len(held_out.x)}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


def start_digits(grid, num_rounds):
    arrays = ArrayRecord({name: Array(array) for name, array in task.initial_model().items()})
    strategy = ClusteredStrategy(half_updates=True)
    return strategy.start(grid, arrays, num_rounds=num_rounds, timeout=5)


def make_digits_grid(**settings):
    nodes = [FakeNode.simulated(i, NUM_CLIENTS) for i in range(NUM_CLIENTS)]
    return FakeGrid(make_app(), nodes, **settings)


def test_half_updates_are_asked_for_and_confirm_the_groups():
    grid = make_digits_grid()

    result = start_digits(grid, num_rounds=4)

    assert not grid.errors
    assert sorted(result.clusters.values()) == [
        [f"partition-{i:04d}" for i in range(group, NUM_CLIENTS, NUM_GROUPS)]
        for group in range(NUM_GROUPS)
    ]
    proposal, split = (result.history[i].record.decisions[0] for i in (1, 2))
    assert "the other half of the data confirms them" in proposal.reason
    assert split.verdict == "split"
    # Steps of either half, all together or in the group, measured on the other half.
    trials = [m for m in grid.sent if m.metadata.group_id == "3"][: 4 * NUM_CLIENTS]
    per_client = Counter(
        (m.metadata.dst_node_id, m.content["config"]["fedbranch-half"]) for m in trials
    )
    assert per_client == {(i, half): 2 for i in grid.nodes for half in ("first", "second")}
    assert len({id(m.content) for m in trials}) == 2 * (1 + NUM_GROUPS)


def test_a_bad_half_difference_is_refused_with_its_client_alone():
    bad = FakeNode.simulated(1, NUM_CLIENTS).node_id

    def on_reply(message, reply):
        key = "arrays-half-difference"
        if message.metadata.dst_node_id == bad and key in reply.content:
            reply.content[key] = ArrayRecord({"weight": Array(np.zeros(3, np.float32))})
        return reply

    result = start_digits(make_digits_grid(on_reply=on_reply), num_rounds=2)

    assert result.history[1].record.refused == {
        "partition-0001": "the half difference lacks the arrays ['bias']"
    }


def test_an_unmodified_app_finds_nothing_new_in_its_configuration():
    grid = make_grid()

    start(grid, rule=None, num_rounds=3)

    assert {name for m in grid.sent for name in m.content["config"]} == {"server-round"}


def test_the_mean_and_half_the_difference():
    first = {"w": np.float32([[1.0, 3.0]]), "mask": np.float32([np.inf]), "count": np.int64([3])}
    second = {"w": np.float32([[2.0, 1.0]]), "mask": np.float32([np.inf]), "count": np.int64([4])}
    layout = Layout.of(
        ArrayRecord({n: Array(np.zeros_like(a)) for n, a in first.items()}), ["mask", "count"]
    )

    records = with_halves(first, second, "model")

    means, differences = records["model"], records["model-half-difference"]
    np.testing.assert_array_equal(means["w"].numpy(), np.float32([[1.5, 2.0]]))
    assert [means[n].numpy().dtype for n in first] == [a.dtype for a in first.values()]
    np.testing.assert_array_equal(layout.params_in(differences), np.float32([-0.5, 1.0]))


@pytest.mark.parametrize("array", [np.zeros(3, np.float32), np.zeros(2)])
def test_a_half_difference_has_the_models_shapes_and_dtypes(array):
    layout = Layout.of(ArrayRecord({"w": Array(np.ones(2, np.float32))}))

    with pytest.raises(InvalidUpdate, match="send float32 and"):
        layout.params_in(ArrayRecord({"w": Array(array)}))
