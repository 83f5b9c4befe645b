"""How fast replies are taken in: updates per second beside Flower's own FedAvg.

    python benchmarks/ingest.py [--clients 1000] [--repeats 5] [--out FILE]

1000 replies of 100,000 float32 parameters lie in memory as Flower messages. FedAvg averages them
(``aggregate_train``). Ours reads each, checks it, adds it to exact sums, makes a sketch of 1024
numbers of it, and makes the round of all, in two threads. First equality is checked; then both
take turns, beside a plain copy of the same bytes; the best turn of each counts.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import threading
import time
from pathlib import Path

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from threadpoolctl import threadpool_limits

import fedbranch as fb
from fedbranch.flower.arrays import Layout
from fedbranch.flower.replies import arrays_in, reported_in
from fedbranch.flower.testing import FakeGrid
from fedbranch.messages import UpdateBatch

SHAPES = {"w1": (776, 128), "b1": (128,), "w2": (128, 4), "b2": (32,)}  # 100,000 numbers
SKETCH = 1024
NUM_THREADS, ROWS_AT_ONCE = 2, 32
MUST_REACH = 5.0  # times FedAvg's updates/s
ARRAYS, WEIGHT = "arrays", "num-examples"


def initial_model() -> dict[str, np.ndarray]:
    """Give a model of 100,000 parameters."""
    rng = np.random.default_rng(0)
    return {n: (0.05 * rng.standard_normal(s)).astype(np.float32) for n, s in SHAPES.items()}


def made_replies(model: dict[str, np.ndarray], num_clients: int) -> list[Message]:
    """Give replies as they come: the model after some training."""
    FakeGrid(ClientApp(), [])  # or Flower lets nobody write messages
    rng = np.random.default_rng(1)
    replies = []
    for client in range(num_clients):
        trained = {
            name: array + (1e-3 * rng.standard_normal(array.shape)).astype(np.float32)
            for name, array in model.items()
        }
        content = RecordDict(
            {
                ARRAYS: ArrayRecord({name: Array(array) for name, array in trained.items()}),
                "metrics": MetricRecord(
                    {WEIGHT: int(rng.integers(50, 150)), "train_loss": float(rng.random())}
                ),
            }
        )
        message = Message(RecordDict(), dst_node_id=client + 1, message_type="train")
        replies.append(Message(content, reply_to=message))
    return replies


def theirs(replies: list[Message]) -> dict[str, np.ndarray]:
    """Average the replies as Flower does."""
    arrays, _ = FedAvg().aggregate_train(1, replies)
    assert arrays is not None
    return {name: array.numpy() for name, array in arrays.items()}


class Ours:
    """A server that finds clusters by sketches, and takes replies in by two threads."""

    def __init__(self, model: dict[str, np.ndarray], num_clients: int) -> None:
        record = ArrayRecord({name: Array(array) for name, array in model.items()})
        self.layout = Layout.of(record)
        self.model = model
        self.ids = [f"node-{number}" for number in range(num_clients)]
        shape = (ROWS_AT_ONCE, self.layout.num_params)
        self.memory = [np.zeros(shape, np.float32) for _ in range(NUM_THREADS)]

    def take_in(self, replies: list[Message]) -> fb.Server:
        """Make a round of the replies, on a new server."""
        server = fb.Server(
            self.layout.num_params, rule=fb.NeverSplit(), sketch=SKETCH, keep_updates=False
        )
        server.plan(self.ids)
        intake = server.intake()
        pairs = list(zip(self.ids, replies, strict=True))
        batches = [pairs[at : at + ROWS_AT_ONCE] for at in range(0, len(pairs), ROWS_AT_ONCE)]

        def work(number: int) -> None:
            for batch in batches[number::NUM_THREADS]:
                intake.add_batch(self.read(batch, self.memory[number], server))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        record = server.step(intake)
        assert not record.refused, record.refused
        return server

    def read(
        self, pairs: list[tuple[str, Message]], memory: np.ndarray, server: fb.Server
    ) -> UpdateBatch:
        """Read replies with what the strategy reads them with."""
        vectors = memory[: len(pairs)]
        no_buffers = np.zeros(0, np.float32)
        reported = []
        for (_, reply), row in zip(pairs, vectors, strict=True):
            reported.append(
                reported_in(reply, WEIGHT, server.max_examples, self.layout.most_reply_bytes)
            )
            self.layout.write_update(self.model, arrays_in(reply, ARRAYS), row, no_buffers)
        return UpdateBatch(
            client_ids=[client_id for client_id, _ in pairs],
            vectors=vectors,
            num_examples=[one.num_examples for one in reported],
            bases=[server.tree.root.base] * len(pairs),
            metrics=[one.scalars for one in reported],
        )


def copied(replies: list[Message], into: np.ndarray) -> None:
    """Copy all arrays of the replies, and do nothing else."""
    for reply in replies:
        start = 0
        for array in reply.content.array_records[ARRAYS].values():
            numbers = np.frombuffer(array.data, np.uint8)
            into[start : start + len(numbers)] = numbers
            start += len(numbers)


def measure(num_clients: int = 1000, repeats: int = 5) -> dict:
    """Check equality, then let all take turns.

    Returns
    -------
    dict
        Updates per second of both and their ratio, and the bytes of replies per second beside a
        plain copy of them.
    """
    model = initial_model()
    replies = made_replies(model, num_clients)
    ours = Ours(model, num_clients)
    num_bytes = sum(len(array.data) for array in replies[0].content.array_records[ARRAYS].values())
    into = np.empty(num_bytes, np.uint8)
    with threadpool_limits(limits=1):  # the threads are ours, and a core has one
        mean = theirs(replies)
        server = ours.take_in(replies)
        found = ours.layout.arrays_at(server.tree.root.params, server.tree.root.buffers)
        difference = max(
            float(np.linalg.norm(found[name] - mean[name]) / np.linalg.norm(mean[name]))
            for name in model
        )
        if difference > 1e-6:
            raise SystemExit(f"the means differ by {difference:.2g} of their length")
        seconds: dict[str, list[float]] = {"FedAvg": [], "fedbranch": [], "copy": []}
        for _ in range(repeats):
            for name, run in [
                ("FedAvg", lambda: theirs(replies)),
                ("fedbranch", lambda: ours.take_in(replies)),
                ("copy", lambda: copied(replies, into)),
            ]:
                began = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - began)
    best = {name: min(turns) for name, turns in seconds.items()}
    ratio = best["FedAvg"] / best["fedbranch"]
    return {
        "case": f"{num_clients} replies of {sum(a.size for a in model.values()):,} parameters",
        "sketch": SKETCH,
        "threads": NUM_THREADS,
        "difference": difference,
        "updates/s": {name: round(num_clients / s, 1) for name, s in best.items()},
        "us per update": {name: round(1e6 * s / num_clients, 1) for name, s in best.items()},
        "GB/s": {name: round(num_clients * num_bytes / s / 1e9, 2) for name, s in best.items()},
        "all turns": {name: [round(s, 4) for s in turns] for name, turns in seconds.items()},
        "ratio": round(ratio, 3),
        "must reach": {"ratio at least": MUST_REACH},
    }


def main() -> None:
    """Measure, print a table, write one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.clients, arguments.repeats)
    print(f"{result['case']}, sketches of {SKETCH}, {NUM_THREADS} threads")
    print(f"{'':12}{'updates/s':>12}{'us/update':>12}{'GB/s':>8}")
    for name in ("FedAvg", "fedbranch", "copy"):
        print(
            f"{name:12}{result['updates/s'][name]:12,.0f}{result['us per update'][name]:12.0f}"
            f"{result['GB/s'][name]:8.2f}"
        )
    print(f"ratio {result['ratio']:.2f}, must reach {MUST_REACH:g}")
    if arguments.out:
        document = {
            "command": "python benchmarks/ingest.py",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": {name: importlib.metadata.version(name) for name in ("flwr", "numpy")},
            "results": [result],
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    if result["ratio"] < MUST_REACH:
        sys.exit(f"the ratio is below {MUST_REACH:g}")


if __name__ == "__main__":
    main()
