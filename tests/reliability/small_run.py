"""A small run with splits, a client that joins late and one that leaves, and processes for it."""

from __future__ import annotations

import hashlib
import multiprocessing
import resource
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fedbranch as fb
from fedbranch.errors import FedbranchError
from fedbranch.runs import RunFolder
from fedbranch.storage.checkpoint import (
    LastingTensors,
    has_checkpoint,
    read_checkpoint,
    write_checkpoint,
)

ROUNDS = 24
JOINS, LEAVES = 16, 19
RULE = fb.Thresholds(eps_mean=0.3, eps_max=0.5, gamma_max=0.5)
TRAINING = fb.LocalTraining(optimizer=fb.sgd(0.3), epochs=2, batch_size=10)


def make_clients() -> dict[str, fb.ClientData]:
    """Make points left and right of a line; every second client has the labels exchanged."""
    clients = {}
    for i in range(8):
        rng = np.random.default_rng(i)
        x = rng.normal(size=(60, 3)).astype(np.float32)
        y = ((x[:, 0] > 0) ^ (i % 2 == 1)).astype(np.int64)
        when = {7: {"joins": JOINS}, 6: {"leaves": LEAVES}}.get(i, {})
        clients[f"c{i}"] = fb.ClientData((x[:40], y[:40]), (x[40:], y[40:]), **when)
    return clients


def play(folder: Path, *, resume: bool = False, rounds: int = ROUNDS) -> fb.Run:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    return fb.simulate(
        model,
        make_clients(),
        rule=RULE,
        rounds=rounds,
        training=TRAINING,
        seed=3,
        checkpoint_every=3,
        evaluate_every=4,
        folder=folder,
        resume=resume,
        engine="reference",
        device="cpu",
    )


def digest(folder: Path) -> str:
    """Return one SHA-256 for the names and contents of all files in a folder."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(folder)} {content}\n".encode())
    return total.hexdigest()


def processes():
    """Return a context of processes that have all imports at their start and none of our threads."""
    context = multiprocessing.get_context("forkserver")
    # The full name, which those processes can import wherever the tests were started from.
    context.set_forkserver_preload(["pytest", "safetensors.numpy", "fedbranch.sim", __name__])
    return context


def tensors_of(number):
    return np.full(20_000, number, dtype=np.float32)


def save_again_and_again(folder, acknowledge):
    """Save 1, 2, 3, ... from where the last process was killed, and send each saved number."""
    number = read_checkpoint(folder, "counter")[0]["number"] if has_checkpoint(folder) else 0
    fixed = LastingTensors(lambda: {"x": tensors_of(-1)})
    while True:
        number += 1
        files = {"changing": {"x": tensors_of(number)}, "fixed": fixed}
        write_checkpoint(folder, "counter", {"number": number, "padding": "x" * 50_000}, files)
        acknowledge.send(number)


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_hostile(path, answer):
    """Read a folder in a process of its own; send the errors and the memory that it took."""
    before = peak_bytes()
    refused = []
    run = None
    try:
        run = RunFolder(path)
    except FedbranchError as error:
        refused.append(type(error).__name__)
    for read in (
        lambda: read_checkpoint(path / "state", "server"),
        lambda: run and run.history(),
        lambda: run and run.summary,
        lambda: run and run.names,
    ):
        try:
            read()
        except FedbranchError as error:
            refused.append(type(error).__name__)
    answer.send((refused, peak_bytes() - before))
