"""Clients that are a quadratic bowl each, with halves of their data and losses to measure."""

import numpy as np

from fedbranch import Server, Task, Update
from fedbranch.training.seeds import stream_seed

DIM = 40


class Bowls:
    """Clients with rows of data that are scattered about the centre of their group.

    Training goes half of the way to the mean of the rows; the loss is the mean squared
    distance to them.
    """

    def __init__(self, groups, *, num_rows=40, spread=3.0, apart=1.0, seed=0):
        rng = np.random.default_rng(seed)
        names = sorted(set(groups))
        centres = dict(zip(names, apart * rng.normal(size=(len(names), DIM)), strict=True))
        self.group_of = {f"c{i:02}": group for i, group in enumerate(groups)}
        self.rows = {
            i: centres[g] + spread * rng.normal(size=(num_rows, DIM))
            for i, g in self.group_of.items()
        }
        self.held_out = {
            i: centres[g] + spread * rng.normal(size=(num_rows, DIM))
            for i, g in self.group_of.items()
        }
        self.can_halve, self.can_measure = True, True
        self.cannot_halve = set()
        self.sends_signal = False

    def half(self, client_id, number, which):
        order = np.random.default_rng(stream_seed(number, client_id)).permutation(
            len(self.rows[client_id])
        )
        return self.rows[client_id][
            order[: len(order) // 2] if which == 0 else order[len(order) // 2 :]
        ]

    def update(self, client_id, task: Task):
        def step(rows):
            return (0.5 * (rows.mean(axis=0) - task.params)).astype(np.float32)

        is_whole = task.halves is None or not self.can_halve or client_id in self.cannot_halve
        parts = [self.rows[client_id]]
        if not is_whole:
            parts = [self.half(client_id, task.halves, which) for which in (0, 1)]
        a, b = (step(part) for part in (parts[0], parts[-1]))
        scale = np.float32(100 if self.sends_signal else 1)
        return Update(
            (a + b) / 2,
            num_examples=1,
            metrics={"loss": 1.0},
            signal=scale * (a + b) / 2 if self.sends_signal else None,
            half_difference=None if is_whole else scale * (a - b) / 2,
        )

    def losses(self, client_id, trials):
        found = []
        for trial in trials:
            rows = self.held_out[client_id]
            if trial.on != "held-out":
                rows = self.half(client_id, trial.halves, 0 if trial.on == "first half" else 1)
            found.append(float(((rows - trial.params) ** 2).sum(axis=1).mean()))
        return found

    def run(self, rounds, rule=None, server=None, asked=lambda ids, _: ids):
        server = Server(DIM, rule=rule) if server is None else server
        records = []
        server.join([i for i in self.rows if i not in server.tree])
        for _ in range(rounds):
            ids = asked(sorted(self.rows), server)
            tasks = server.plan(ids)
            trials = server.trials(ids) if self.can_measure else {}
            records.append(
                server.step(
                    {i: self.update(i, task) for i, task in tasks.items()},
                    losses={i: self.losses(i, own) for i, own in trials.items()},
                )
            )
        return server, records

    def found(self, server):
        leaves = {i: server.tree.position(i) for i in self.group_of}
        pairs = set(zip(leaves.values(), self.group_of.values(), strict=True))
        return len(pairs) == len(set(leaves.values())) == len(set(self.group_of.values()))


def verdicts(records):
    return [decision.verdict for record in records for decision in record.decisions]
