"""A federation without data: each node pulls towards an optimum of its own, in a Flower app.

    python quadratic_app.py FOLDER NUM_ROUNDS SECONDS

runs one over a grid in memory, with its run folder in FOLDER, and resumes it if there is one. The
training of each client takes SECONDS.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedbranch as fb
from fedbranch.flower import ClusteredStrategy
from fedbranch.flower.testing import FakeGrid, FakeNode

DIM = 20
RULE = fb.Thresholds(eps_mean=0.5, eps_max=1.0, gamma_max=0.5)


def group_of(partition: int, num_groups: int) -> int:
    return partition % num_groups


def optimum_of(partition: int, num_groups: int) -> np.ndarray:
    """Return a client's optimum: near those of its group, far from those of other groups."""
    centers = 5 * np.linalg.qr(np.random.default_rng(0).normal(size=(DIM, DIM)))[0]
    noise = np.random.default_rng(partition).normal(size=DIM)
    return (centers[group_of(partition, num_groups)] + 0.05 * noise).astype(np.float32)


def make_app(num_groups: int, *, seconds: float = 0.0) -> ClientApp:
    """Make clients with risk ½‖θ - optimum‖² that go half of the way in each round."""
    app = ClientApp()

    def read(message: Message, context: Context):
        partition = int(context.node_config["partition-id"])
        return partition, message.content["arrays"]["theta"].numpy()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        partition, theta = read(message, context)
        time.sleep(seconds)
        after = theta + np.float32(0.5) * (optimum_of(partition, num_groups) - theta)
        metrics = {
            "num-examples": 10 + partition,
            "in-round": int(message.content["config"]["server-round"]),
        }
        arrays = ArrayRecord({"theta": Array(after)})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        partition, theta = read(message, context)
        loss = float(np.sum((theta - optimum_of(partition, num_groups)) ** 2) / 2)
        metrics = MetricRecord({"num-examples": 10 + partition, "loss": loss})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def initial_arrays() -> ArrayRecord:
    return ArrayRecord({"theta": Array(np.zeros(DIM, np.float32))})


def make_nodes(num_clients: int) -> list[FakeNode]:
    return [FakeNode.simulated(i, num_clients) for i in range(num_clients)]


def client_id(partition: int) -> str:
    return f"partition-{partition:04d}"


def start(grid: FakeGrid, *, num_rounds: int, timeout: float = 5.0, **settings):
    strategy = ClusteredStrategy(**{"rule": RULE, **settings})
    return strategy.start(grid, initial_arrays(), num_rounds=num_rounds, timeout=timeout)


def found_groups(result) -> list[list[str]]:
    return sorted(ids for ids in result.clusters.values() if ids)


def true_groups(num_clients: int, num_groups: int) -> list[list[str]]:
    return sorted(
        [client_id(i) for i in range(num_clients) if group_of(i, num_groups) == group]
        for group in range(num_groups)
    )


def main() -> None:
    folder, num_rounds, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    grid = FakeGrid(make_app(3, seconds=seconds), make_nodes(9))
    start(grid, num_rounds=num_rounds, checkpoint_dir=folder, resume=True)


if __name__ == "__main__":
    main()
