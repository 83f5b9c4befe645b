"""The example's clients on Flower's simulation engine, which agree on a secret and hide their model.

A script, as `ray_federation` is one. It writes down the result, and that of the same
clients in a plain run over the grid in memory.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tomllib
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedbranch.flower import (
    AgreementMod,
    ClusteredStrategy,
    agree,
    hidden_arrays,
    reveal,
    transform_mod,
)
from fedbranch.flower.testing import FakeGrid, FakeNode
from fedbranch.privacy import Identity, Member, Roster
from swapped_digits import client_app as example
from swapped_digits import task

NUM_NODES, NUM_ROUNDS = 6, 5
APP = Path(example.__file__).parents[1]
CONFIG = {
    **tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"],
    "num-groups": 2,
}
# Also for the processes that Ray starts; not there when this is only looked at for doctests.
FOLDER = Path(os.environ.get("FEDERATION_FOLDER", "."))


def identity_of(number: int) -> Identity:
    return Identity.from_pem((FOLDER / str(number) / "identity.pem").read_bytes())


def roster() -> Roster:
    return Roster("ray", {identity_of(i).fingerprint for i in range(NUM_NODES)})


def folder_of(context: Context) -> Path:
    return FOLDER / str(context.node_config["partition-id"])


def initial(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(scale=0.01, size=array.shape).astype(np.float32)
        for name, array in task.initial_model().items()
    }


def configured(context: Context) -> Context:
    """Return a context with the configuration of `flwr run`."""
    context = copy.copy(context)
    context.run_config = CONFIG
    return context


def make_client_app(mods: list) -> ClientApp:
    app = ClientApp(mods=mods)
    app.train()(lambda message, context: example.train(message, configured(context)))
    app.evaluate()(lambda message, context: example.evaluate(message, configured(context)))
    return app


agreement = AgreementMod(
    lambda context: identity_of(context.node_config["partition-id"]),
    lambda context: roster(),
    folder_of,
)
client_app = make_client_app([transform_mod(agreement.secret, initial, kind="permutation")])
client_app.query("fedbranch")(agreement)


def start(grid: Grid, arrays: ArrayRecord):
    return ClusteredStrategy(seed=3).start(grid, arrays, num_rounds=NUM_ROUNDS, timeout=60)


def main() -> None:
    for i in range(NUM_NODES):
        (FOLDER / str(i)).mkdir()
        (FOLDER / str(i) / "identity.pem").write_bytes(Identity.new().to_pem())
    found = {}
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        found["agreed"] = agree(grid, min_nodes=NUM_NODES, timeout=120)
        found["hidden"] = start(
            grid,
            hidden_arrays(
                task.initial_model(), "permutation", fingerprint=found["agreed"].fingerprint
            ),
        )

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=NUM_NODES,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2, "_node_ip_address": "127.0.0.1"},
        },
    )
    (memory,) = (FOLDER / "0").glob("fedbranch-agreement-*")
    secret = Member.from_bytes(identity_of(0), roster(), memory.read_bytes()).secret
    theta0 = initial(secret.seed("initial model"))
    nodes = [FakeNode.simulated(i, NUM_NODES) for i in range(NUM_NODES)]
    plain = start(
        FakeGrid(make_client_app([]), nodes),
        ArrayRecord({name: Array(array) for name, array in theta0.items()}),
    )
    hidden = found["hidden"]
    models = {
        client_id: [
            model[name].numpy().tobytes().hex()
            for model in (
                reveal(hidden.arrays_of(client_id), secret, initial, kind="permutation"),
                plain.arrays_of(client_id),
            )
            for name in theta0
        ]
        for client_id in plain.assignments
    }
    report = {
        "num_agreed": len(found["agreed"].members),
        "is_same_secret": found["agreed"].fingerprint == secret.fingerprint,
        "clusters": {"hidden": list(hidden.clusters.values())},
        "models": models,
        "num_refused": sum(len(entry.record.refused) for entry in hidden.history),
    }
    report["clusters"]["plain"] = list(plain.clusters.values())
    (FOLDER / "found.json").write_text(json.dumps(report))


if __name__ == "__main__":
    # Ray sends what lives in __main__ by value, with every message.
    sys.path.insert(0, str(Path(__file__).parent))
    import ray_hidden

    ray_hidden.main()
