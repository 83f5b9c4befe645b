"""Clustered federated learning around your own model and data.

Six hospitals train a classifier together. Half of them code the outcome the other way
round. It is not known which, and no data may leave a hospital.
"""

import numpy as np
import torch

import fedbranch as fb


def hospital(seed: int, is_reversed: bool) -> fb.ClientData:
    """Make one hospital's patients: replace this by your own arrays, tensors or Dataset."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(200, 5)).astype(np.float32)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).astype(np.int64)
    y = 1 - y if is_reversed else y
    return fb.ClientData(train=(x[:150], y[:150]), test=(x[150:], y[150:]))


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
clients = {f"hospital-{i}": hospital(seed=i, is_reversed=i % 2 == 1) for i in range(6)}

run = fb.simulate(model, clients, rounds=30)

for leaf, client_ids in run.clusters.items():
    accuracy = run.cluster_means[leaf]["accuracy"]
    print(f"cluster {leaf}: {', '.join(client_ids)}: accuracy {accuracy:.2f}")
for entry in run.history:
    for split in entry.record.splits:
        print(f"round {split.round}: {split.reason}")
