"""Updates drawn at random, and the ways in which they come in."""

import random
import threading

import numpy as np

from fedbranch import NeverSplit, Server, Update

DIM, SIZE = 300, 64


SETTINGS = {
    "kept": {"sketch": None},
    "sketched and kept": {"sketch": SIZE},
    "summed": {"sketch": SIZE, "keep_updates": False},
    "summed, with buffers": {"sketch": SIZE, "keep_updates": False, "num_buffers": 3},
    "summed, with signals": {
        "sketch": 32,
        "keep_updates": False,
        "compare": "signal",
        "num_signal": 50,
    },
    "summed, all alike": {"sketch": SIZE, "keep_updates": False, "weighting": "equal"},
    "summed, no guard": {"sketch": SIZE, "keep_updates": False, "guard": None},
}


def state_of(server):
    """Return all that is saved of a server, as bytes."""
    state, files = server.to_state()
    tensors = {
        (name, key): (array.dtype.str, array.shape, array.tobytes())
        for name, tensors in files.items()
        for key, array in dict(tensors).items()
    }
    return repr(_sorted(state)), tensors


def _sorted(state):
    if isinstance(state, dict):
        return {key: _sorted(state[key]) for key in sorted(state)}
    return state


def updates_of(num, seed=0, dim=DIM, num_buffers=0, num_signal=None, bases=None):
    rng = np.random.default_rng(seed)
    return {
        f"c{i:03}": Update(
            (10 ** rng.uniform(-1, 1) * rng.normal(size=dim)).astype(np.float32),
            num_examples=int(rng.integers(1, 300)),
            buffers=rng.normal(size=num_buffers).astype(np.float32) if num_buffers else None,
            signal=rng.normal(size=num_signal).astype(np.float32) if num_signal else None,
            half_difference=(0.1 * rng.normal(size=num_signal or dim)).astype(np.float32),
        )
        for i in range(num)
    }


def similar_updates(num, seed, size=1.0):
    rng = np.random.default_rng(seed)
    common = rng.normal(size=DIM)
    return {
        f"c{i:03}": Update(
            (size * (common + 0.5 * rng.normal(size=DIM))).astype(np.float32), num_examples=1
        )
        for i in range(num)
    }


def filled(server, updates, seed=None, num_threads=1):
    """Return an intake that took the replies in a random order, from several threads."""
    intake = server.intake()
    pairs = list(updates.items())
    if seed is not None:
        random.Random(seed).shuffle(pairs)

    def add(own):
        for client_id, update in own:
            intake.add(client_id, update)

    threads = [
        threading.Thread(target=add, args=(pairs[number::num_threads],))
        for number in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return intake


def planted(num_clients, num_groups, dim, noise, seed):
    """Plant groups; return client ids, their groups, and a function that draws a round's updates."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(num_groups, dim)) / np.sqrt(dim)
    centres -= centres.mean(axis=0)
    group = np.arange(num_clients) % num_groups
    ids = [f"c{i:03}" for i in range(num_clients)]
    spread = noise * np.linalg.norm(centres, axis=1).mean() / np.sqrt(dim)

    def updates(tasks, number, with_halves):
        answers = {}
        for row, client_id in enumerate(ids):
            if client_id not in tasks:
                continue
            draw = np.random.default_rng((seed, number, row))
            step = 0.5 * (centres[group[row]] - tasks[client_id].params)
            a, b = (step + spread * np.sqrt(2) * draw.normal(size=dim) for _ in range(2))
            answers[client_id] = Update(
                ((a + b) / 2).astype(np.float32),
                num_examples=1,
                half_difference=((a - b) / 2).astype(np.float32) if with_halves else None,
            )
        return answers

    return ids, group, updates


def two_that_answered(**settings):
    server = Server(4, rule=NeverSplit(), **settings)
    server.plan(["a", "b", "c"])
    intake = server.intake()
    for number, client_id in enumerate("abc"):
        update = np.float32([1, number, 0, 1])
        assert intake.add(client_id, Update(update, num_examples=1)) is None
    return server, intake
