"""A small experiment, and the command line in a process of its own."""

import subprocess
import sys

CONFIG = """
rounds = 16
checkpoint_every = 3
baselines = ["fedavg"]
[data]
num_clients = 6
num_groups = 2
structure = "label-permutation"
[training]
learning_rate = 0.5
epochs = 5
batch_size = 120
[rule]
eps_mean = 0.6
eps_max = 0.7
gamma_max = 0.5
"""
COMMAND = [sys.executable, "-m", "fedbranch"]


def fedbranch_command(*arguments, cwd, check=0):
    result = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=300
    )
    assert result.returncode == check, result.stderr
    return result


def folder_bytes(path):
    """All files of a run but the page about it, which has the folder's name in it."""
    return {
        p.relative_to(path): p.read_bytes()
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.name != "report.html"
    }
