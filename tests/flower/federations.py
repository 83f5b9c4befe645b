"""Simulated clients behind a Flower client app, as a user would write one."""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

import fedbranch as fb
from fedbranch.flower import ClusteredStrategy
from fedbranch.flower.testing import FakeGrid, FakeNode
from fedbranch.training.client import evaluate, local_update
from fedbranch.training.model_state import ModelState
from fedbranch.training.seeds import stream_seed

SEED = 3
RULE = fb.Thresholds(eps_mean=0.3, eps_max=0.5, gamma_max=0.5, min_cluster_size=3)
TRAINING = fb.LocalTraining(optimizer=fb.sgd(0.3), epochs=2, batch_size=10)


def make_clients(num_clients=6, *, num_kinds=2, **of_last):
    """Points left and right of a line; every second client names the sides the other way.

    All name them alike if there is one kind of clients only.
    """
    clients = {}
    for i in range(num_clients):
        rng = np.random.default_rng(i)
        x = rng.normal(size=(60 + 3 * i, 3)).astype(np.float32)
        kind = i % num_kinds
        y = ((x[:, 0] > 0) ^ (kind == 1)).astype(np.int64)
        more = of_last if i == num_clients - 1 else {}
        clients[f"partition-{i:04d}"] = fb.ClientData(
            (x[:-20], y[:-20]), (x[-20:], y[-20:]), group=str(kind), **more
        )
    return clients


def make_model(seed=0, *, has_buffers=False):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        normalise = [nn.BatchNorm1d(8)] if has_buffers else []
        return nn.Sequential(nn.Linear(3, 8), *normalise, nn.ReLU(), nn.Linear(8, 2))


def make_client_app(clients, model, mods=()):
    """A client app that trains as the simulator's reference client does."""
    app = ClientApp(mods=list(mods))
    names = sorted(clients)

    def load(message: Message, context: Context):
        client_id = names[context.node_config["partition-id"]]
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return client_id, message.content["config"]["server-round"]

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client_id, number = load(message, context)
        sent = ModelState.of(model)
        task = fb.Task(
            node_id=0,
            params=np.zeros(sent.params.numel(), np.float32),
            buffers=np.zeros(sent.buffers.numel(), np.float32),
            base="",
            purpose="train",
        )
        update = local_update(
            model,
            sent,
            task,
            clients[client_id].train,
            TRAINING,
            seed=stream_seed(SEED, number, client_id),
        )
        metrics = {"num-examples": int(update.num_examples), "loss": update.metrics["loss"]}
        content = RecordDict(
            {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
        )
        return Message(content, reply_to=message)

    @app.evaluate()
    def measure(message: Message, context: Context) -> Message:
        client_id, _ = load(message, context)
        test = clients[client_id].test
        metrics = MetricRecord({"num-examples": len(test.x), **evaluate(model, test, TRAINING)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def make_grid(clients=None, model=None, **settings):
    clients = make_clients() if clients is None else clients
    model = make_model() if model is None else model
    nodes = [FakeNode.simulated(i, len(clients)) for i in range(len(clients))]
    return FakeGrid(make_client_app(clients, model), nodes, **settings)


class Killed(Exception):
    pass


def kill_after(number):
    """Settings for a start that ends in the middle of a round."""

    def evaluate(this_round, arrays):
        if this_round == number:
            raise Killed

    return {"evaluate_fn": evaluate}


def contents_of(folder):
    """Every file in a folder, with its bytes."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def start(
    grid,
    *,
    num_rounds=30,
    model=None,
    timeout=5,
    start_with=None,
    strategy_class=ClusteredStrategy,
    **settings,
):
    """Run the strategy over a grid."""
    strategy = strategy_class(**{"rule": RULE, "seed": SEED, **settings})
    arrays = ArrayRecord((make_model() if model is None else model).state_dict())
    return strategy.start(
        grid, arrays, num_rounds=num_rounds, timeout=timeout, **(start_with or {})
    )


def simulate(clients, model, **settings):
    """Run the simulator over the same clients."""
    return fb.simulate(
        model,
        clients,
        **{
            "rule": RULE,
            "rounds": 30,
            "training": TRAINING,
            "seed": SEED,
            "engine": "reference",
            **settings,
        },
    )
