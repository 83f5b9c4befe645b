"""Servers with many clients, and limits so small that a few clients are many."""

import numpy as np

import fedbranch.population.int_column as int_column
import fedbranch.population.positions as positions
import fedbranch.population.registry as registry
import fedbranch.storage.checkpoint as checkpoint
from fedbranch import NeverSplit, Server, Update

SMALL = {
    int_column: {"MOST_CHANGES": 3, "ROWS_PER_CHANGE": 8},
    registry: {"MOST_NEWEST": 4, "MOST_REMEMBERED": 5, "IDS_AT_ONCE": 6},
    positions: {"MOST_LEFT": 3, "ROWS_PER_LEFT": 4},
}  # fmt: skip


def make_small(patch):
    """Shrink the limits, so that a small population goes through all that a large one does."""
    for module, limits in SMALL.items():
        for name, limit in limits.items():
            patch.setattr(module, name, limit)


def ids_of(number):
    return [f"client-{i:07d}" for i in range(number)]


def crowd(number, rule=None):
    server = Server(3, rule=NeverSplit() if rule is None else rule)
    server.join(ids_of(number))
    server.step({})
    return server


def play(server, asked, seed=0):
    rng = np.random.default_rng(seed)
    server.mark_present(asked)
    tasks = server.plan(asked)
    server.trials(asked)
    vectors = 0.1 * rng.normal(size=(len(asked), 3)).astype(np.float32)
    vectors[:, 0] += np.resize([1, -1], len(asked))
    replies = {
        i: Update(v, num_examples=1) for i, v in zip(asked, vectors, strict=True) if i in tasks
    }
    return server.step(replies)


class Written:
    """Counts the bytes that are written."""

    def __init__(self, monkeypatch):
        self.num_bytes = 0
        replace_file = checkpoint.replace_file

        def counting(path, content):
            self.num_bytes += len(content)
            replace_file(path, content)

        monkeypatch.setattr(checkpoint, "replace_file", counting)

    def by(self, action):
        before = self.num_bytes
        action()
        return self.num_bytes - before
