"""The drivers of fedbranch as functions that the check of drivers can run."""

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedbranch as fb
from fedbranch.flower import ClusteredStrategy
from fedbranch.flower.half_updates import HALF_KEY, HALVES_KEY, with_halves
from fedbranch.testing import FakeGrid, FakeNode
from fedbranch.training.client import evaluate, local_update
from fedbranch.training.half_split import half_rows, halves_seed, training_seeds
from fedbranch.training.model_state import ModelState
from fedbranch.training.seeds import stream_seed


def simulator(clients, rounds, options, engine="reference"):
    run = fb.simulate(
        clients.model,
        clients.data,
        options=options,
        rounds=rounds,
        training=clients.training,
        seed=clients.seed,
        engine=engine,
    )
    return [entry.record for entry in run.history], run.tree


def stacked_simulator(clients, rounds, options):
    return simulator(clients, rounds, options, engine="vectorised")


def flower(clients, rounds, options):
    grid = FakeGrid(client_app(clients), [])
    strategy = _Strategy(options=options, seed=clients.seed, half_updates=True)
    strategy.clients = clients
    arrays = ArrayRecord(clients.model.state_dict())
    result = strategy.start(grid, arrays, num_rounds=rounds, timeout=5)
    assert not grid.errors
    return [entry.record for entry in result.history], result.tree


class _Strategy(ClusteredStrategy):
    """Begins each round with the nodes whose clients take part in it."""

    clients = None

    def configure_train(self, server_round, arrays, config, grid):
        num_nodes = len(self.clients.ids)
        there = self.clients.present(server_round)
        grid.nodes.clear()
        for number, client_id in enumerate(self.clients.ids):
            if client_id in there:
                grid.connect(FakeNode.simulated(number, num_nodes))
        return super().configure_train(server_round, arrays, config, grid)


def client_app(clients):
    """Train and evaluate as the reference client does, also on halves."""
    app = ClientApp()
    model = clients.model

    def load(message, context):
        client_id = clients.ids[context.node_config["partition-id"]]
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return client_id, message.content["config"]

    def trained(sent, examples, training, seed):
        task = fb.Task(
            node_id=0,
            params=np.zeros(sent.params.numel(), np.float32),
            buffers=np.zeros(sent.buffers.numel(), np.float32),
            base="",
            purpose="train",
        )
        update = local_update(model, sent, task, examples, training, seed=seed)
        return update, {n: a.numpy().copy() for n, a in model.state_dict().items()}

    @app.train()
    def train(message, context):
        client_id, config = load(message, context)
        seed = stream_seed(clients.seed, config["server-round"], client_id)
        examples, sent = clients.data[client_id].train, ModelState.of(model)
        if HALVES_KEY in config:
            rows = half_rows(
                len(examples.x), halves_seed(clients.seed, client_id), config[HALVES_KEY]
            )
            both = [
                trained(sent, taken(examples, own), clients.training.on_a_half, own_seed)
                for own, own_seed in zip(rows, training_seeds(seed), strict=True)
            ]
            records = with_halves(*(after for _, after in both))
            loss = float(np.mean([update.metrics["loss"] for update, _ in both]))
        else:
            update, _ = trained(sent, examples, clients.training, seed)
            records = {"arrays": ArrayRecord(model.state_dict())}
            loss = update.metrics["loss"]
        metrics = MetricRecord({"num-examples": len(examples.x), "loss": loss})
        return Message(RecordDict({**records, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def measure(message, context):
        client_id, config = load(message, context)
        examples = clients.data[client_id].test
        if HALF_KEY in config:
            train = clients.data[client_id].train
            rows = half_rows(len(train.x), halves_seed(clients.seed, client_id), config[HALVES_KEY])
            examples = taken(train, rows[config[HALF_KEY] == "second"])
        metrics = evaluate(model, examples, clients.training)
        record = MetricRecord({"num-examples": len(examples.x), **metrics})
        return Message(RecordDict({"metrics": record}), reply_to=message)

    return app


def taken(examples, rows):
    return type(examples)(*(part[rows] for part in examples))
