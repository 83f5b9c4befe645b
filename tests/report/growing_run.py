"""A real run folder that grows by one round at a time: clients that are points, in two groups."""

import numpy as np

import fedbranch as fb
from fedbranch.runs import Round, RunFolder

RULE = fb.Thresholds(eps_mean=0.05, eps_max=0.1, gamma_max=0.5)


class GrowingRun:
    """Clients whose best parameters are one of two points; they split after a few rounds."""

    def __init__(self, path, *, ids=("a0", "b0", "a1", "b1", "a2", "b2"), rounds=30):
        rng = np.random.default_rng(0)
        self.targets = {
            client_id: np.float32([1 + 2 * (i % 2), 3, 1 - 2 * (i % 2), 0])
            + rng.normal(0, 0.05, 4).astype(np.float32)
            for i, client_id in enumerate(ids)
        }
        self.server = fb.Server(4, rule=RULE)
        self.folder = RunFolder.create(
            path,
            {
                "method": "cfl",
                "seed": 0,
                "rounds": rounds,
                "clients": [
                    {"id": client_id, "group": str(i % 2), "num_train": 10 + i, "num_test": 5}
                    for i, client_id in enumerate(ids)
                ],
            },
        )

    def play(self, num_rounds=1):
        for _ in range(num_rounds):
            tasks = self.server.plan(self.targets)
            record = self.server.step(
                {
                    client_id: fb.Update(
                        0.5 * (self.targets[client_id] - task.params), 10, base=task.base
                    )
                    for client_id, task in tasks.items()
                }
            )
            self.folder.append(Round(record=record, evaluation=self.evaluation()))
            self.folder.save_server(self.server)

    def evaluation(self):
        distances = {
            client_id: float(np.linalg.norm(target - self.server.tree[node].params))
            for client_id, target in self.targets.items()
            for node in [self.server.tree.position(client_id)]
        }
        return {
            client_id: {"accuracy": 1 / (1 + distance), "loss": distance}
            for client_id, distance in distances.items()
        }

    def finish(self):
        self.folder.finish({"rounds": len(self.folder.history())})
