"""How fast replies are taken in: updates per second beside Flower's own FedAvg.

    python benchmarks/ingest.py [--clients 1000] [--repeats 9] [--out FILE]

1000 replies of 100,000 float32 parameters lie in memory as Flower messages. FedAvg averages them
(``aggregate_train``). Ours does with them what ``ClusteredStrategy(sketch=1024,
keep_updates=False)`` does: finds the client of each, reads and checks it, adds it to exact sums,
makes a sketch of 1024 numbers of it, and makes the round of all. Time depends on the number of
arrays, so a model of 4 arrays, a small convolutional network (12) and a residual one (43) are
measured. First equality is checked. Then both take turns, beside a plain copy of the same bytes;
the best turn of each counts.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

import fedbranch as fb
from fedbranch.flower.arrays import Layout
from fedbranch.flower.asking import Asked, ask_to_train
from fedbranch.flower.federation import Federation, Keys
from fedbranch.flower.receiving import receive_updates
from fedbranch.flower.testing import FakeGrid, FakeNode

SKETCH = 1024
MUST_REACH = 5.0  # times FedAvg's updates/s
KEYS = Keys(weight="num-examples", arrays="arrays", config="config")


def residual_network(widths: tuple[int, ...], blocks_each: int) -> list[tuple[int, ...]]:
    """Return the shapes in a residual network with group norms, for ten classes of images."""
    before = widths[0]
    shapes: list[tuple[int, ...]] = [(before, 3, 3, 3), (before,), (before,)]
    for width in widths:
        for _ in range(blocks_each):
            shapes += [(width, before, 3, 3), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            if width != before:
                shapes.append((width, before, 1, 1))
            before = width
    return [*shapes, (10, before), (10,)]


# Number of arrays -> their shapes: 100,000 numbers, or nearly as many.
SHAPES: dict[int, list[tuple[int, ...]]] = {
    4: [(776, 128), (128,), (128, 4), (32,)],
    12: [
        *[(16, 3, 3, 3), (16,), (32, 16, 3, 3), (32,), (64, 32, 3, 3), (64,)],
        *[(576, 120), (120,), (120, 48), (48,), (48, 10), (10,)],
    ],
    43: residual_network((12, 24, 48), blocks_each=2),
}


def initial_model(num_arrays: int = 4) -> dict[str, np.ndarray]:
    """Make a model of about 100,000 parameters."""
    rng = np.random.default_rng(0)
    return {
        f"array-{number}": (0.05 * rng.standard_normal(shape)).astype(np.float32)
        for number, shape in enumerate(SHAPES[num_arrays])
    }


def trained_elsewhere(message: Message, _: object) -> Message:
    """Answer as a client does: with the model after some training."""
    rng = np.random.default_rng(message.metadata.dst_node_id)
    arrays = {
        name: array.numpy() + (1e-3 * rng.standard_normal(array.shape)).astype(np.float32)
        for name, array in message.content.array_records[KEYS.arrays].items()
    }
    metrics = {KEYS.weight: int(rng.integers(50, 150)), "train_loss": float(rng.random())}
    content = {
        KEYS.arrays: ArrayRecord({name: Array(array) for name, array in arrays.items()}),
        "metrics": MetricRecord(metrics),
    }
    return Message(RecordDict(content), reply_to=message)


class Ours:
    """A federation that finds clusters by sketches, and keeps no updates."""

    def __init__(self, model: dict[str, np.ndarray], num_clients: int) -> None:
        self.layout = Layout.of(ArrayRecord({name: Array(array) for name, array in model.items()}))
        self.grid = FakeGrid(
            trained_elsewhere, [FakeNode.simulated(n, num_clients) for n in range(num_clients)]
        )
        federation, tasks = self.federation()
        self.asked: list[Asked] = ask_to_train(federation, tasks, this_round=1)
        self.grid.push_messages([one.message for one in self.asked])
        self.replies = self.grid.pull_messages([one.id for one in self.asked])

    def federation(self) -> tuple[Federation, dict[str, fb.Task]]:
        """Begin with a new server that has asked its clients to train."""
        server = fb.Server(
            self.layout.num_params, rule=fb.NeverSplit(), sketch=SKETCH, keep_updates=False
        )
        federation = Federation(server, self.layout, KEYS, timeout_s=3600.0)
        return federation, server.plan(federation.gather(self.grid, 1))

    def take_in(self, federation: Federation) -> fb.Server:
        """Make a round of the replies."""
        received = receive_updates(federation, self.asked, self.replies)
        record = federation.server.step(received.intake)
        assert not record.refused, record.refused
        return federation.server


def theirs(replies: list[Message]) -> dict[str, np.ndarray]:
    """Average the replies as Flower does."""
    arrays, _ = FedAvg().aggregate_train(1, replies)
    assert arrays is not None
    return {name: array.numpy() for name, array in arrays.items()}


def copied(replies: list[Message], into: np.ndarray) -> None:
    """Copy all arrays of the replies, and do nothing else."""
    for reply in replies:
        start = 0
        for array in reply.content.array_records[KEYS.arrays].values():
            numbers = np.frombuffer(array.data, np.uint8)
            into[start : start + len(numbers)] = numbers
            start += len(numbers)


def measure(num_arrays: int = 4, num_clients: int = 1000, repeats: int = 9) -> dict:
    """Check equality, then let all take turns.

    Returns
    -------
    dict
        Updates per second of both and their ratio, and the bytes of replies per second beside a
        plain copy of them.
    """
    model = initial_model(num_arrays)
    ours = Ours(model, num_clients)
    replies = ours.replies
    num_bytes = sum(
        len(array.data) for array in replies[0].content.array_records[KEYS.arrays].values()
    )
    into = np.empty(num_bytes, np.uint8)
    mean = theirs(replies)
    server = ours.take_in(ours.federation()[0])
    found = ours.layout.arrays_at(server.tree.root.params, server.tree.root.buffers)
    difference = max(
        float(np.linalg.norm(found[name] - mean[name]) / np.linalg.norm(mean[name]))
        for name in model
    )
    if difference > 1e-6:
        raise SystemExit(f"the means differ by {difference:.2g} of their length")
    seconds: dict[str, list[float]] = {"FedAvg": [], "fedbranch": [], "copy": []}
    for _ in range(repeats):
        federation, _ = ours.federation()
        for name, run in [
            ("FedAvg", lambda: theirs(replies)),
            ("fedbranch", lambda begun=federation: ours.take_in(begun)),
            ("copy", lambda: copied(replies, into)),
        ]:
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    best = {name: min(turns) for name, turns in seconds.items()}
    ratio = best["FedAvg"] / best["fedbranch"]
    return {
        "case": f"{num_clients} replies of {sum(a.size for a in model.values()):,} parameters in "
        f"{num_arrays} arrays",
        "sketch": SKETCH,
        "threads": min(4, os.cpu_count() or 1),
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
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = [measure(n, arguments.clients, arguments.repeats) for n in SHAPES]
    for result in results:
        print(f"{result['case']}, sketches of {SKETCH}, {result['threads']} threads")
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
            "results": results,
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    if any(result["ratio"] < MUST_REACH for result in results):
        sys.exit(f"a ratio is below {MUST_REACH:g}")


if __name__ == "__main__":
    main()
