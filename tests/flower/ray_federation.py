"""The example's clients on Flower's simulation engine, under FedAvg and under our strategy.

A script, because Ray starts processes of its own, and its warnings are not ours to fix. It
writes the result of every client to a JSON file. The example's folder and this one must be
on the path.
"""

from __future__ import annotations

import copy
import json
import sys
import tomllib
from pathlib import Path

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from fedbranch.flower.node_ids import identify
from swapped_digits import client_app as example
from swapped_digits import server_app, task

NUM_NODES = 20
APP = Path(example.__file__).parents[1]
CONFIG = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]

client_app = ClientApp()


def configured(context: Context) -> Context:
    """Return a context with the configuration of `flwr run`."""
    context = copy.copy(context)
    context.run_config = CONFIG
    return context


@client_app.train()
def train(message: Message, context: Context) -> Message:
    reply = example.train(message, configured(context))
    reply.content["metrics"]["partition"] = context.node_config["partition-id"]
    return reply


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return example.evaluate(message, configured(context))


class WatchedFedAvg(FedAvg):
    """Flower's own, with a look at every client's accuracy."""

    accuracies: dict[int, float]

    def aggregate_evaluate(self, server_round: int, replies: list[Message]) -> MetricRecord | None:
        replies = list(replies)
        self.accuracies = {
            reply.metadata.src_node_id: reply.content["metrics"]["accuracy"] for reply in replies
        }
        return super().aggregate_evaluate(server_round, replies)


def main(folder: Path) -> None:
    """Run both strategies, and write down the results."""
    found = {}
    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        arrays = ArrayRecord({n: Array(a) for n, a in task.initial_model().items()})
        fedavg = WatchedFedAvg(min_available_nodes=NUM_NODES)
        fedavg.start(grid, copy.deepcopy(arrays), num_rounds=CONFIG["num-server-rounds"])
        clients = {node_id: i for i, node_id in identify(grid.get_nodes()).node_ids.items()}
        strategy = server_app.make_strategy({**CONFIG, "checkpoint-dir": str(folder / "run")})
        result = strategy.start(grid, arrays, num_rounds=CONFIG["num-server-rounds"])
        found["fedavg"] = {clients[i]: accuracy for i, accuracy in fedavg.accuracies.items()}
        found["clustered"] = {i: m["accuracy"] for i, m in result.history[-1].evaluation.items()}
        found["clusters"] = list(result.clusters.values())
        found["partitions"] = {
            i: m["partition"] for i, m in result.history[-1].record.metrics.items()
        }

    run_simulation(
        server_app=app,
        client_app=client_app,
        num_supernodes=NUM_NODES,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2, "_node_ip_address": "127.0.0.1"},
        },
    )
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    # Ray sends what lives in __main__ by value, with every message.
    import ray_federation

    ray_federation.main(Path(sys.argv[1]))
