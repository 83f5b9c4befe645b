"""A federated loop of your own, in plain NumPy: the server only decides.

Twelve sensors fit a linear model; they are of three makes that scale their readings
differently. Any framework, network or scheduler can stand where the inner loop is.
"""

import numpy as np

import fedbranch as fb

NUM_FEATURES, LEARNING_RATE, LOCAL_STEPS = 4, 0.1, 5
rng = np.random.default_rng(0)
true_weights = 3 * rng.normal(size=(3, NUM_FEATURES))

readings = {}
for i in range(12):
    x = rng.normal(size=(100, NUM_FEATURES))
    readings[f"sensor-{i:02d}"] = (x, x @ true_weights[i % 3] + 0.1 * rng.normal(size=100))

initial = np.zeros(NUM_FEATURES, dtype=np.float32)
server = fb.Server(NUM_FEATURES)

for _ in range(60):
    updates = {}
    for client_id, task in server.plan(readings).items():
        x, y = readings[client_id]
        before = initial + task.params
        weights = before.copy()
        for _ in range(LOCAL_STEPS):
            weights -= LEARNING_RATE * x.T @ (x @ weights - y) / len(y)
        updates[client_id] = fb.Update(weights - before, num_examples=len(y), base=task.base)
    record = server.step(updates)
    for split in record.splits:
        print(f"round {record.round}: {split.reason}")

for leaf, client_ids in server.clusters.items():
    weights = initial + server.tree[leaf].params
    print(f"cluster {leaf}: {', '.join(client_ids)}: weights {np.round(weights, 2)}")
