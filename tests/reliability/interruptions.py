"""Commands that are stopped by a signal, watched from outside."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

COMMAND = [sys.executable, "-m", "fedbranch"]
MAX_SECONDS_TO_STOP = 30  # 10 are promised; a busy machine may take longer

# Worker processes train the clients, which are split in round 7 of 24.
CONFIG = """
rounds = 24
checkpoint_every = 3
engine = "workers"
baselines = []
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


@dataclass(frozen=True)
class Stopped:
    """The end of a command."""

    code: int
    errors: str
    seconds: float  # from the signal to the end
    num_workers: int
    left_running: list[int]


def start(command: list[str], cwd: Path) -> subprocess.Popen[str]:
    """Start a command on two cores, in a process group of its own, so that all can be signalled."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells may have it ignored
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])

    return subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=prepare,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def stop(
    process: subprocess.Popen[str], *signals: signal.Signals, whole_group: bool = False
) -> Stopped:
    """Send signals to a command, one after the other, and wait for its end."""
    worker_ids = children(process.pid)
    begun = time.monotonic()
    for number in signals:
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if whole_group else os.kill)(process.pid, number)
        time.sleep(0.02)
    try:
        _, errors = process.communicate(timeout=MAX_SECONDS_TO_STOP)
        seconds = time.monotonic() - begun
        wait_until(lambda: not any(map(is_running, worker_ids)), or_go_on_after=5)
        left = [pid for pid in worker_ids if is_running(pid)] + in_session(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):  # no failed test leaves processes behind
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return Stopped(process.returncode, errors, seconds, len(worker_ids), left)


def wait_for_rounds(process: subprocess.Popen[str], folder: Path, num_rounds: int) -> None:
    """Wait until a run has written ``num_rounds`` rounds."""
    wait_until(lambda: num_lines(folder / "history.jsonl") >= num_rounds or has_ended(process))
    assert not has_ended(process), process.communicate()


def wait_until_it_can_be_stopped(process: subprocess.Popen[str]) -> None:
    """Wait until a command handles SIGTERM; until then it has not begun."""

    def catches_it() -> bool:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    wait_until(lambda: has_ended(process) or catches_it())
    assert not has_ended(process), process.communicate()


def has_ended(process: subprocess.Popen[str]) -> bool:
    return process.poll() is not None


def wait_until(condition, *, or_go_on_after: float | None = None) -> None:
    deadline = time.monotonic() + (120 if or_go_on_after is None else or_go_on_after)
    while not condition():
        if time.monotonic() > deadline:
            assert or_go_on_after is not None, "it takes too long"
            return
        time.sleep(0.002)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_running(pid: int) -> bool:
    state = _stat(pid)
    return state is not None and state[0] not in "ZX"


def in_session(leader: int) -> list[int]:
    """Return all running processes of a leader's session, also after the leader has ended."""
    ids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [i for i in ids if i != leader and (s := _stat(i)) is not None
            and int(s[3]) == leader and s[0] not in "ZX"]  # fmt: skip


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def folder_digest(folder: Path, *, except_for: str | None = None) -> str:
    """Return the SHA-256 of a run folder's files, without the one named ``except_for``."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != except_for:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
