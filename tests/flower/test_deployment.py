"""A real deployment, in which things go wrong: separate processes, TLS, keys, a database."""

import os
import signal
import subprocess
import threading
import tomllib
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from fedbranch.flower import client_id_of_key
from fedbranch.flower.testing import FakeGrid, FakeNode
from fedbranch.runs import RunFolder
from flower.deployment import (
    BIN,
    Deployment,
    environment_for,
    free_port,
    running_with,
    wait_for,
)
from swapped_digits import client_app, server_app, task

APP = Path(__file__).parents[2] / "examples" / "flower_app"
NUM_GROUPS, NUM_FIRST, NUM_ALL = 2, 6, 8
SETTINGS = {
    "num_groups": NUM_GROUPS,
    "fraction_evaluate": 0.0,
    "min_nodes": 4,
    "round_timeout": 25.0,
}

pytestmark = pytest.mark.deployment


def undisturbed(public_keys, num_rounds):
    """The same app with the same keys in one process, where nothing goes wrong."""
    config = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config |= {name.replace("_", "-"): value for name, value in SETTINGS.items()}
    nodes = [
        FakeNode(
            node_id=1000 - i,
            config={"partition-id": i, "num-partitions": NUM_ALL},
            public_key=key,
        )
        for i, key in enumerate(public_keys)
    ]
    grid = FakeGrid(client_app.app, nodes, run_config=config)
    arrays = ArrayRecord({n: Array(a) for n, a in task.initial_model().items()})
    return server_app.make_strategy(config).start(grid, arrays, num_rounds=num_rounds)


def test_the_example_runs_by_its_readmes_command(tmp_path):
    """In Flower's simulation, with the local SuperLink that `flwr run` starts and leaves behind."""
    readme = (APP / "README.md").read_text()
    federation = "num-supernodes=20 client-resources-num-cpus=1 init-args-num-cpus=2"
    assert f"--federation-config '{federation}'" in readme
    environment = {
        **environment_for(tmp_path),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    try:
        done = subprocess.run(
            [BIN / "flwr", "run", APP, "--stream", "--federation-config", federation,
             "--run-config", f"checkpoint-dir='{tmp_path / 'run'}'"],
            env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    finally:
        for pid in running_with(str(tmp_path)):
            os.kill(pid, signal.SIGTERM)

    assert done.returncode == 0, done.stdout + done.stderr
    tree = RunFolder(tmp_path / "run").tree()
    assert sorted(tree.members(leaf.id) for leaf in tree.leaves) == [
        [f"partition-{i:04d}" for i in range(group, 20, 4)] for group in range(4)
    ]


def rounds_so_far(folder):
    return RunFolder(folder).history() if (folder / "run.json").exists() else []


def test_clusters_survive_what_happens_to_a_federation(tmp_path):
    run_folder = tmp_path / "run"
    with Deployment(tmp_path) as deployment:
        try:
            play(deployment, run_folder)
        except Exception:
            print(deployment.logs())
            raise
        keys = [deployment.public_key(i) for i in range(NUM_ALL)]
    ids = [client_id_of_key(key) for key in keys]
    run = RunFolder(run_folder)
    history, tree = run.history(), run.tree()

    # Every node is in its true group, and the newcomers were routed there.
    assert run.is_complete
    clusters = {frozenset(tree.members(leaf.id)) for leaf in tree.leaves}
    assert clusters == {frozenset(ids[group::NUM_GROUPS]) for group in range(NUM_GROUPS)}
    routed = {move.client_id for entry in history for move in entry.record.routed}
    assert routed == set(ids[NUM_FIRST:])
    assert run.names == {client_id: f"hospital-{i}" for i, client_id in enumerate(ids)}

    # The killed node was missed, came back under its own name and went on.
    took_part = [ids[0] in entry.record.metrics for entry in history]
    assert took_part[0]
    assert not all(took_part[tree.root.split_in_round :])  # it was killed after the split
    assert took_part[-1]
    assert [entry.record.round for entry in history] == list(range(1, len(history) + 1))

    # Up to the split nothing had happened: the same bytes as where nothing ever happens.
    split_in = tree.root.split_in_round
    twin = undisturbed(keys[:NUM_FIRST], split_in)
    assert [entry.record for entry in history[:split_in]] == [e.record for e in twin.history]
    np.testing.assert_array_equal(tree.root.params, twin.tree.root.params)
    for ours, theirs in zip(tree.root.child_ids, twin.tree.root.child_ids, strict=True):
        cached, expected = tree[ours].cached_updates, twin.tree[theirs].cached_updates
        assert cached.keys() == expected.keys()
        for client_id, update in cached.items():
            np.testing.assert_array_equal(update, expected[client_id])


def play(deployment, run_folder):
    deployment.start_superlink()
    for partition in range(NUM_ALL):
        deployment.register(partition)
    for partition in range(NUM_FIRST):
        deployment.start_node(partition, NUM_ALL)
    wait_for(lambda: are_connected(deployment, range(NUM_FIRST)), 120, "the SuperNodes")
    settings = {**SETTINGS, "checkpoint_dir": str(run_folder)}
    first = deployment.run(APP, **settings, num_server_rounds=60)

    def last_record():
        history = rounds_so_far(run_folder)
        return history[-1].record if history else None

    wait_for(
        lambda: any(e.record.splits for e in rounds_so_far(run_folder)), 240, "the first split"
    )
    deployment.kill_node(0)
    back = threading.Thread(target=deployment.start_node_until_it_is_let_in, args=(0, NUM_ALL))
    back.start()
    for partition in range(NUM_FIRST, NUM_ALL):
        deployment.start_node(partition, NUM_ALL)
    wait_for(
        lambda: sum(len(e.record.routed) for e in rounds_so_far(run_folder)) == 2,
        200,
        "the newcomers to be routed",
    )

    deployment.kill_server_app()
    done = len(rounds_so_far(run_folder))
    deployment.flwr("stop", first)  # or its messages stay in the queues for a minute
    back.join()
    assert are_connected(deployment, range(NUM_ALL))
    second = deployment.run(APP, **settings, num_server_rounds=done + 3, resume=True)
    wait_for(lambda: last_record().round == done + 3, 200, "the resumed run to end")
    wait_for(lambda: deployment.status(second).startswith("finished"), 60, "its status")
    assert deployment.status(second) == "finished:completed"


def are_connected(deployment, partitions):
    return all(deployment.is_connected(partition) for partition in partitions)
