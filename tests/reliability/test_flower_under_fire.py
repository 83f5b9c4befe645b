"""Federations with failing clients, a killed server, or nodes that answer all at once."""

import hashlib
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Error, Message

import fedbranch as fb
from fakes import fingerprint
from fedbranch.flower import ClusteredStrategy
from fedbranch.flower.testing import FakeGrid
from fedbranch.runs import RunFolder
from reliability import quadratic_app
from reliability.quadratic_app import (
    RULE,
    client_id,
    found_groups,
    initial_arrays,
    make_app,
    make_nodes,
    start,
    true_groups,
)

# Clients that fail


class Unreliable:
    """Replies that partly arrive: in each round some nodes are silent, fail, or are late."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.late: list[tuple[int, Message]] = []
        self.counts = dict.fromkeys(("silent", "error", "late", "whole"), 0)

    def fate(self, this_round: str, node_id: int) -> str:
        draw = np.random.default_rng([self.seed, int(this_round), node_id]).random()
        for fate, until in [("silent", 0.30), ("error", 0.40), ("late", 0.45)]:
            if draw < until:
                return fate
        return "whole"

    def __call__(self, message: Message, reply: Message) -> list[Message]:
        this_round = message.metadata.group_id
        arrived = [old for since, old in self.late if since < int(this_round)]
        self.late = [(since, old) for since, old in self.late if since >= int(this_round)]
        fate = self.fate(this_round, message.metadata.dst_node_id)
        self.counts[fate] += 1
        if fate == "error":
            arrived.append(Message(Error(code=2, reason="out of memory"), reply_to=message))
        elif fate == "late":
            self.late.append((int(this_round), reply))
        elif fate == "whole":
            arrived.append(reply)
        return arrived


def coverages(result, rule, num_clients=20):
    """Return, for each split, the numbers of clients that took part and that the rule needs."""
    sizes = {0: num_clients}
    found = []
    for entry in result.history:
        record = entry.record
        for decision in record.splits:
            num_members = sizes[decision.node_id]
            needed = max(min(3, num_members), math.ceil(rule.coverage * num_members - 1e-9))
            found.append((sum(map(len, decision.groups)), needed))
        sizes = dict(record.cluster_sizes)
    return found


def play_unreliable(seed, rule, *, num_clients=20, num_groups=2, num_rounds=40):
    unreliable = Unreliable(seed)
    grid = FakeGrid(make_app(num_groups), make_nodes(num_clients), on_reply=unreliable)
    return start(grid, rule=rule, num_rounds=num_rounds, timeout=0.02), unreliable


RULES = {"the default rule": fb.AutoRule(), "thresholds": RULE}


@pytest.mark.reliability
def test_clients_that_keep_failing_are_still_grouped_right(measured):
    num_right, num_runs, shares, counts = 0, 0, [], {}
    for rule in RULES.values():
        for seed in range(3):
            result, unreliable = play_unreliable(seed, rule)

            assert found_groups(result) == true_groups(20, 2)
            found = coverages(result, rule)
            assert found
            assert all(answered >= needed for answered, needed in found)
            shares += [answered / needed for answered, needed in found]
            num_right += found_groups(result) == true_groups(20, 2)
            num_runs += 1
            for fate, count in unreliable.counts.items():
                counts[fate] = counts.get(fate, 0) + count
    total = sum(counts.values())
    measured(
        "unreliable-clients",
        f"true clusters in {num_right} of {num_runs} runs (default rule and thresholds), no "
        f"exception; each of {len(shares)} splits by at least {min(shares):.2f} times the answers "
        f"that the rule needs; of {total} replies {counts['silent'] / total:.0%} did not come, "
        f"{counts['error'] / total:.0%} were errors, {counts['late'] / total:.0%} late",
    )


# A server that is killed

SCRIPT = Path(quadratic_app.__file__)
NUM_ROUNDS, SECONDS_PER_CLIENT = 40, 0.003


def serve(folder, *, until=None):
    """Run a federation's server in a process of its own; kill it once ``until()`` is true."""
    process = subprocess.Popen(
        [sys.executable, SCRIPT, folder, str(NUM_ROUNDS), str(SECONDS_PER_CLIENT)],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "RAY_DISABLE_DOCKER_CPU_WARNING": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    if until is not None:
        while process.poll() is None and not until():
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def num_rounds_done(folder):
    history = folder / "history.jsonl"
    return history.read_bytes().count(b"\n") if history.exists() else 0


def outcome(folder):
    """Return the saved server's clusters, positions and nodes, and digests of state and history."""
    run = RunFolder(folder)
    server = fb.Server.load(run.path / "state")
    tree = server.tree
    history = json.dumps([entry.to_json() for entry in run.history()], sort_keys=True)
    return {
        "clusters": server.clusters,
        "positions": {i: tree.position(i) for i in tree.client_ids},
        "nodes": [(node.id, node.parent_id, node.split_in_round) for node in tree],
        "state": fingerprint(server),
        "history": hashlib.sha256(history.encode()).hexdigest(),
    }


@pytest.mark.reliability
def test_a_server_that_is_killed_comes_to_the_same_tree(tmp_path, measured):
    num_kills = 6
    rng = random.Random(0)
    status, errors = serve(tmp_path / "whole")
    assert status == 0, errors[-3000:]
    expected = outcome(tmp_path / "whole")
    assert len([ids for ids in expected["clusters"].values() if ids]) == 3

    killed_after = []
    for target in sorted(rng.sample(range(NUM_ROUNDS - 1), num_kills)):
        pause_s = rng.uniform(0, 9 * 2 * SECONDS_PER_CLIENT)

        def has_come_so_far(target=target):
            return num_rounds_done(tmp_path / "cut") >= target

        def has_come_so_far_and_waited(pause_s=pause_s, until=has_come_so_far):
            if not until():
                return False
            time.sleep(pause_s)
            return True

        status, errors = serve(tmp_path / "cut", until=has_come_so_far_and_waited)
        assert status == -signal.SIGKILL, errors[-3000:]
        killed_after.append(num_rounds_done(tmp_path / "cut"))
    status, errors = serve(tmp_path / "cut")
    assert status == 0, errors[-3000:]
    found = outcome(tmp_path / "cut")

    for what in ("clusters", "positions", "nodes"):
        assert found[what] == expected[what]
    same = "same" if found == expected else "other"
    measured(
        "kills-flower",
        f"killed {len(killed_after)} times, after rounds {', '.join(map(str, killed_after))} of "
        f"{NUM_ROUNDS}: same tree and assignments as undisturbed; {same} SHA-256 of the state and "
        "the history",
    )


# Clients that answer all at once


class ThreadedGrid(FakeGrid):
    """A grid in which each node answers in a thread of its own, in any order."""

    def __init__(self, *args, num_threads: int, **settings) -> None:
        super().__init__(*args, **settings)
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(num_threads)
        self.num_answers = {"train": 0, "evaluate": 0}
        self.waited_s = 0.0  # from the first message to the last answer of an exchange

    def push_messages(self, messages):
        messages = list(messages)
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"message-{next(self._numbers)}"
        began = time.monotonic()
        num_missing = len(messages)

        def answer(message):
            nonlocal num_missing
            time.sleep(random.random() * 0.02)
            reply = self._answer(message)
            with self.lock:
                self._replies.append(reply)
                self.num_answers[message.metadata.message_type] += 1
                num_missing -= 1
                if num_missing == 0:
                    self.waited_s += time.monotonic() - began

        for message in messages:
            self.pool.submit(answer, message)
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids):
        with self.lock:
            return super().pull_messages(message_ids)


class Timed(ClusteredStrategy):
    """A strategy that notes the time of each round, without waiting for the nodes."""

    def __init__(self, grid, **settings) -> None:
        super().__init__(**settings)
        self.timed_grid, self.marks = grid, []

    def configure_train(self, *args, **settings):
        self.marks.append((time.monotonic(), self.timed_grid.waited_s))
        return super().configure_train(*args, **settings)

    @property
    def server_s(self):
        marks = [*self.marks, (time.monotonic(), self.timed_grid.waited_s)]
        return [b - a - (d - c) for (a, c), (b, d) in itertools.pairwise(marks)]


@pytest.mark.reliability
def test_no_update_of_200_threads_is_lost(measured):
    num_clients, num_rounds = 200, 20
    grid = ThreadedGrid(make_app(2), make_nodes(num_clients), num_threads=num_clients)
    strategy = Timed(grid, rule=RULE)
    result = strategy.start(grid, initial_arrays(), num_rounds=num_rounds, timeout=60)
    server_s = strategy.server_s
    grid.pool.shutdown()

    one_by_one = start(
        FakeGrid(make_app(2), make_nodes(num_clients)), num_rounds=num_rounds, timeout=60
    )

    records = [entry.record for entry in result.history]
    assert not any(record.refused for record in records)
    num_used = sum(len(record.metrics) for record in records)
    assert num_used == grid.num_answers["train"] >= num_clients * (num_rounds - 1)
    for record in records:  # each update is the right client's, and of this round
        for of_client, metrics in record.metrics.items():
            assert metrics["in-round"] == record.round, of_client
    assert result.history == one_by_one.history
    for node in result.tree:
        assert node.params.tobytes() == one_by_one.tree[node.id].params.tobytes()
    assert found_groups(result) == true_groups(num_clients, 2)
    measured(
        "threads",
        f"{num_used} of {grid.num_answers['train']} updates used, same bytes as one after another; "
        f"the server's own time per round: median {1e3 * np.median(server_s):.0f} ms, "
        f"p95 {1e3 * np.quantile(server_s, 0.95):.0f} ms",
    )


def test_answers_of_threads_in_any_order_are_those_of_one_after_another():
    grid = ThreadedGrid(make_app(2), make_nodes(12), num_threads=12)
    result = start(grid, num_rounds=12, timeout=60)
    grid.pool.shutdown()

    one_by_one = start(FakeGrid(make_app(2), make_nodes(12)), num_rounds=12)

    assert result.history == one_by_one.history
    assert found_groups(result) == true_groups(12, 2)


def test_late_and_failing_clients_do_not_end_a_federation():
    result, unreliable = play_unreliable(0, fb.AutoRule(), num_clients=12, num_rounds=15)

    assert len(result.history) == 15
    assert min(unreliable.counts.values()) > 0
    reasons = {r for entry in result.history for r in entry.record.refused.values()}
    assert any("error 2" in reason for reason in reasons)
    assert client_id(0) in result.assignments
