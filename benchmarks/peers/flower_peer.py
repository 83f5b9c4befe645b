"""Time rounds of FedAvg on Flower's simulation engine.

Usage: ``python flower_peer.py WORKLOAD_DIR RESULT.json``, in an environment with torch and
``flwr[simulation]``. The file format is in ``workload.py``.

Flower hands each client's training to one of two Ray workers as a message. The client
app does what a careful user would write: a worker reads the data and builds the model once,
and trains without a ``DataLoader`` on one torch thread.
"""

import functools
import importlib.metadata
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

# flwr reads its setting when it is imported; both would call home otherwise.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from workload import (
    NUM_WORKERS,
    Workload,
    build_model,
    load_workload,
    set_parameters,
    train,
    write_result,
)

client_app = ClientApp()


@functools.cache
def _worker_state(folder: str) -> tuple[Workload, nn.Module]:
    """Load data and model, once per worker process."""
    torch.set_num_threads(1)
    workload = load_workload(Path(folder))
    return workload, build_model(workload)


@client_app.query()
def warm_up(message: Message, context: Context) -> Message:  # noqa: ARG001 -- Flower's signature
    """Load the data, and train a throw-away step for torch's own start-up."""
    workload, model = _worker_state(message.content["config"]["folder"])
    x, y = workload.clients[0]
    train(model, x[: workload.batch_size], y[: workload.batch_size], workload)
    return Message(RecordDict(), reply_to=message)


@client_app.train()
def train_client(message: Message, context: Context) -> Message:
    """Train the global model on the data of one client."""
    workload, model = _worker_state(message.content["config"]["folder"])
    x, y = workload.clients[context.node_config["partition-id"]]
    set_parameters(model, _tensors(message.content["arrays"]))
    train(model, x, y, workload)
    content = RecordDict(
        {"arrays": _arrays(model.parameters()), "metrics": MetricRecord({"num-examples": len(x)})}
    )
    return Message(content, reply_to=message)


def _arrays(tensors: Iterable[torch.Tensor]) -> ArrayRecord:
    return ArrayRecord([tensor.detach().numpy() for tensor in tensors])


def _tensors(arrays: ArrayRecord) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in arrays.to_numpy_ndarrays()]


class TimedFedAvg(FedAvg):
    """FedAvg that notes the wall time from the start of a round to its new global model."""

    def __init__(self, num_clients: int) -> None:
        super().__init__(
            fraction_evaluate=0.0, min_train_nodes=num_clients, min_available_nodes=num_clients
        )
        self.seconds_per_round: list[float] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Start the clock and sample clients as FedAvg does."""
        self._start_s = time.perf_counter()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average as FedAvg does and stop the clock."""
        replies = list(replies)
        errors = [reply.error.reason for reply in replies if reply.has_error()]
        if errors:
            # FedAvg would average the others, and the round would look fast.
            raise RuntimeError(f"{len(errors)} clients failed in round {server_round}: {errors[0]}")
        aggregated = super().aggregate_train(server_round, replies)
        self.seconds_per_round.append(time.perf_counter() - self._start_s)
        return aggregated


def _start_workers(grid: Grid, config: ConfigRecord, num_clients: int) -> None:
    """Wait until all clients are known and each Ray worker has answered a query."""
    while len(node_ids := list(grid.get_node_ids())) < num_clients:
        time.sleep(0.1)
    # A worker is busy for seconds with its first query, so that two reach both workers; a
    # few more do no harm.
    queries = [
        Message(RecordDict({"config": config}), dst_node_id=node_id, message_type="query")
        for node_id in node_ids[: 4 * NUM_WORKERS]
    ]
    for reply in grid.send_and_receive(queries, timeout=120):
        if reply.has_error():
            raise RuntimeError(f"a Ray worker could not start: {reply.error.reason}")


def run(folder: Path, result_path: Path) -> None:
    """Run the workload on Flower and write the result."""
    workload = load_workload(folder)
    config = ConfigRecord({"folder": str(folder.resolve())})
    strategy = TimedFedAvg(workload.num_clients)
    model = build_model(workload)
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:  # noqa: ARG001 -- Flower's signature
        _start_workers(grid, config, workload.num_clients)
        result = strategy.start(
            grid=grid,
            initial_arrays=_arrays(workload.initial),
            num_rounds=workload.rounds,
            train_config=config,
        )
        set_parameters(model, _tensors(result.arrays))

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=workload.num_clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": NUM_WORKERS, "_node_ip_address": "127.0.0.1"},
        },
    )
    write_result(
        result_path,
        peer="flower",
        versions={name: importlib.metadata.version(name) for name in ("flwr", "ray", "torch")},
        seconds_per_round=strategy.seconds_per_round,
        model=model,
        workload=workload,
    )


if __name__ == "__main__":
    # Ray pickles what lives in __main__ by value, with every message: the client app has to
    # come from an importable module for the cache of a worker to last.
    import flower_peer

    flower_peer.run(Path(sys.argv[1]), Path(sys.argv[2]))
