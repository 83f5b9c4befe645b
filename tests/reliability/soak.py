"""Two long runs that note their memory and open files.

    python -m tests.reliability.soak server|simulate ROUNDS FOLDER

prints as JSON the memory and the open files after every hundredth round, and counts of events.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from fedbranch import RoundRecord, Server, Thresholds, Update
from fedbranch.runs import Round, RunFolder

LOOK_EVERY = 100
NUM_PRESENT = 30


class Watch:
    """Notes of a process's memory and open files, and of what happened in its rounds."""

    def __init__(self) -> None:
        self.seen: list[dict[str, int]] = []
        self.events: Counter[str] = Counter()

    def after(self, record: RoundRecord) -> None:
        """Note a round."""
        self.events.update(decision.verdict for decision in record.decisions)
        self.events.update(
            joined=len(record.joined), left=len(record.left), routed=len(record.routed)
        )
        if record.round % LOOK_EVERY == 0:
            self.seen.append(
                {
                    "round": record.round,
                    "memory_bytes": _memory_bytes(),
                    "open_files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208  # only counted
                }
            )

    def print(self) -> None:
        """Print all notes as JSON."""
        print(json.dumps({"seen": self.seen, "events": self.events}))


def _memory_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def serve(rounds: int, folder: Path, watch: Watch) -> None:
    """Drive a server by hand: clients come, go and are routed anew; splits are undone.

    Each client pulls towards the optimum of its group.
    """
    rng = np.random.default_rng(0)
    num_params, num_groups = 200, 4
    centers = 5 * np.linalg.qr(rng.normal(size=(num_params, num_groups)))[0].T
    server = Server(num_params, rule=Thresholds(eps_mean=0.4, eps_max=1.0, gamma_max=0.3))
    run = RunFolder.open(folder, {"method": "cfl", "clients": []}, resume=False)
    present: dict[str, int] = {}  # client id -> group
    num_clients = 0
    for number in range(1, rounds + 1):
        while len(present) < NUM_PRESENT:  # clients that have left are replaced
            present[f"client-{num_clients}"] = num_clients % num_groups
            num_clients += 1
        if number % 3 == 0:
            gone = str(rng.choice(sorted(present)))
            if gone in server.tree:
                server.remove([gone])
            del present[gone]
        if number % 7 == 0:
            server.reroute(rng.choice(server.tree.client_ids, 3, replace=False).tolist())
        if number % 50 == 0 and not server.tree.root.is_leaf:
            server.merge_split(server.tree.root.id)
        asked = sorted(i for i in present if rng.random() < 0.9)
        tasks = server.plan(asked)
        record = server.step(
            {
                client_id: Update(
                    (
                        0.5 * (centers[present[client_id]] - task.params)
                        + 0.01 * rng.normal(size=num_params)
                    ).astype(np.float32),
                    num_examples=10,
                    metrics={"loss": float(rng.random())},
                    base=task.base,
                )
                for client_id, task in tasks.items()
            }
        )
        run.append(Round(record=record))
        if number % 5 == 0:
            run.save_server(server)
        watch.after(record)
    run.close()


def simulate(rounds: int, folder: Path, watch: Watch) -> None:
    """Run the simulator with clients that come and go."""
    import torch

    import fedbranch as fb

    lifetime, num_together = 200, 20
    clients = {}
    for number in range(num_together * (rounds // lifetime + 1)):
        rng = np.random.default_rng(number)
        x = rng.normal(size=(40, 3)).astype(np.float32)
        y = ((x[:, 0] > 0) ^ (number % 2 == 1)).astype(np.int64)
        joins = 1 + max(0, number - num_together) * lifetime // num_together
        clients[f"client-{number}"] = fb.ClientData(
            (x[:20], y[:20]), (x[20:], y[20:]), joins=joins, leaves=joins + lifetime
        )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
    fb.simulate(
        model,
        clients,
        rule=fb.Thresholds(eps_mean=0.3, eps_max=0.5, gamma_max=0.5),
        rounds=rounds,
        training=fb.LocalTraining(optimizer=fb.sgd(0.3), epochs=1, batch_size=10),
        folder=folder,
        on_round=lambda entry: watch.after(entry.record),
    )


def main() -> None:
    """Run the one that the command line names."""
    kind, rounds, folder = sys.argv[1:]
    watch = Watch()
    {"server": serve, "simulate": simulate}[kind](int(rounds), Path(folder), watch)
    watch.print()


if __name__ == "__main__":
    main()
