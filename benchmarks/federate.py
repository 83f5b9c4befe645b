"""What clusters cost in a Flower federation: time per round beside Flower's own FedAvg.

    python benchmarks/federate.py [--repeats 3] [--out FILE]

20 nodes on Flower's simulation engine with two workers, the same client app, training and
evaluation in every round, on handwritten digits with four groups of swapped labels. First
equality is checked: with a rule that never splits the result must be FedAvg's. Then all take
turns; the best turn of each counts. Ours finds clusters on the way and then has their models to
care for. Once more it also saves its whole state after every round, which FedAvg cannot.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

# flwr reads its setting when it is imported; both would call home otherwise.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy
from flwr.simulation import run_simulation

import fedbranch as fb
from fedbranch.data.sources import digits
from fedbranch.flower import ClusteredStrategy

NUM_NODES, NUM_GROUPS = 20, 4
MOST = 1.10  # times FedAvg's time
HIDDEN = {"F1": 32, "F2": 14_000}  # 2,410 and 1,050,010 parameters
ROUNDS = {"F1": 30, "F2": 10}
RULE = fb.Thresholds(eps_mean=0.4, eps_max=0.8, gamma_max=0.5, min_cluster_size=2)

client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train a network with one hidden layer, in NumPy: five passes of gradient descent."""
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    x, y = examples(context.node_config["partition-id"])
    for _ in range(5):
        for rows in np.array_split(np.arange(len(x)), 3):
            step(model, x[rows], y[rows])
    content = RecordDict(
        {
            "arrays": ArrayRecord({name: Array(array) for name, array in model.items()}),
            "metrics": MetricRecord({"num-examples": len(x)}),
        }
    )
    return Message(content, reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the accuracy."""
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    x, y = examples(context.node_config["partition-id"])
    accuracy = float((outputs(model, x)[1].argmax(axis=1) == y).mean())
    metrics = MetricRecord({"accuracy": accuracy, "num-examples": len(x)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


_DATA: list[tuple[np.ndarray, np.ndarray]] = []  # read once in each worker


def examples(partition: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a client's digits; group g has swapped the labels 2g and 2g + 1."""
    if not _DATA:
        x, y = digits()
        rows = np.random.default_rng(0).permutation(len(x))
        _DATA.extend(
            (x[mine].reshape(len(mine), -1), y[mine])
            for mine in (rows[i::NUM_NODES] for i in range(NUM_NODES))
        )
    x, y = _DATA[partition]
    a = 2 * (partition % NUM_GROUPS)
    return x, np.where(y == a, a + 1, np.where(y == a + 1, a, y))


def initial_model(num_hidden: int) -> dict[str, np.ndarray]:
    """Make a network with one hidden layer."""
    rng = np.random.default_rng(0)
    return {
        "w1": (rng.standard_normal((64, num_hidden)) / 8).astype(np.float32),
        "b1": np.zeros(num_hidden, np.float32),
        "w2": (rng.standard_normal((num_hidden, 10)) / num_hidden**0.5).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }


def outputs(model: dict[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute the hidden layer's values and the outputs."""
    hidden = np.maximum(x @ model["w1"] + model["b1"], 0)
    return hidden, hidden @ model["w2"] + model["b2"]


def step(model: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray, rate: float = 0.1) -> None:
    """Go one step of gradient descent on the cross-entropy, in place."""
    hidden, scores = outputs(model, x)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    slope = powers / powers.sum(axis=1, keepdims=True)
    slope[np.arange(len(y)), y] -= 1
    slope /= np.float32(len(y))
    below = (slope @ model["w2"].T) * (hidden > 0)
    model["w2"] -= rate * (hidden.T @ slope)
    model["b2"] -= rate * slope.sum(axis=0)
    model["w1"] -= rate * (x.T @ below)
    model["b1"] -= rate * below.sum(axis=0)


def measure(grid: Grid, workload: str, repeats: int) -> dict:
    """Check equality, then let both take turns."""
    model = initial_model(HIDDEN[workload])

    def seconds_per_round(strategy: Strategy, num_rounds: int) -> tuple[float, object]:
        arrays = ArrayRecord({name: Array(array.copy()) for name, array in model.items()})
        began = time.perf_counter()
        result = strategy.start(grid, arrays, num_rounds, evaluate_config=ConfigRecord())
        return (time.perf_counter() - began) / num_rounds, result

    def fedavg() -> FedAvg:
        return FedAvg(min_train_nodes=NUM_NODES, min_available_nodes=NUM_NODES)

    def clustered(rule: fb.Rule = RULE, folder: Path | None = None) -> ClusteredStrategy:
        return ClusteredStrategy(min_available_nodes=NUM_NODES, rule=rule, checkpoint_dir=folder)

    # The first rounds also start the workers.
    _, theirs = seconds_per_round(fedavg(), 2)
    _, ours = seconds_per_round(clustered(fb.NeverSplit()), 2)
    difference = max(
        float(np.abs(ours.arrays[name].numpy() - theirs.arrays[name].numpy()).max())
        for name in model
    )
    if difference > 1e-5:
        raise SystemExit(f"{workload}: the models differ by {difference} after two rounds")
    times: dict[str, list[float]] = {"FedAvg": [], "fedbranch": [], "fedbranch, saving": []}
    for _ in range(repeats):
        seconds, _ = seconds_per_round(fedavg(), ROUNDS[workload])
        times["FedAvg"].append(seconds)
        seconds, ours = seconds_per_round(clustered(), ROUNDS[workload])
        times["fedbranch"].append(seconds)
        with tempfile.TemporaryDirectory() as folder:
            saving = clustered(folder=Path(folder) / "run")
            seconds, _ = seconds_per_round(saving, ROUNDS[workload])
        times["fedbranch, saving"].append(seconds)
    best = {name: min(seconds) for name, seconds in times.items()}
    return {
        "workload": workload,
        "parameters": sum(array.size for array in model.values()),
        "nodes": NUM_NODES,
        "rounds": ROUNDS[workload],
        "clusters at the end": len(ours.clusters),
        "difference after two rounds": difference,
        "seconds per round": {name: round(seconds, 4) for name, seconds in best.items()},
        "all turns": {name: [round(s, 4) for s in seconds] for name, seconds in times.items()},
        "ratio": round(best["fedbranch"] / best["FedAvg"], 4),
        "ratio, saving": round(best["fedbranch, saving"] / best["FedAvg"], 4),
        "must reach": {"ratio at most": MOST},
    }


def main() -> None:
    """Measure, print one table, write one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(HIDDEN), default=list(HIDDEN))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:  # noqa: ARG001 -- Flower's signature
        results.extend(measure(grid, name, arguments.repeats) for name in arguments.only)

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=NUM_NODES,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2, "_node_ip_address": "127.0.0.1"},
        },
    )
    print(
        f"{'':4}{'parameters':>12}{'clusters':>10}{'FedAvg':>10}{'ours':>10}{'overhead':>10}"
        f"{'saving':>10}{'overhead':>10}"
    )
    for result in results:
        seconds = result["seconds per round"]
        print(
            f"{result['workload']:4}{result['parameters']:12,}{result['clusters at the end']:10}"
            f"{seconds['FedAvg']:9.3f}s{seconds['fedbranch']:9.3f}s{result['ratio'] - 1:+10.1%}"
            f"{seconds['fedbranch, saving']:9.3f}s{result['ratio, saving'] - 1:+10.1%}"
        )
    if arguments.out:
        document = {
            "command": "python benchmarks/federate.py",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": {
                name: importlib.metadata.version(name) for name in ("flwr", "ray", "numpy")
            },
            "results": results,
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    if any(result["ratio"] > MOST for result in results):
        sys.exit(f"the overhead is above {MOST - 1:.0%}")


if __name__ == "__main__":
    # Ray sends what lives in __main__ by value, with every message.
    import federate

    federate.main()
