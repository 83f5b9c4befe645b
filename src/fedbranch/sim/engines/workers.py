"""The engine for the CPU: clients spread over processes with one thread each.

Two models with one thread each are faster than one with two, and a client's result does
not depend on who else is training, so the number of workers changes no bit. The processes
are forked: they share the model and all data with their parent, without copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from fedbranch.core.parallel import num_cores
from fedbranch.data import ClientData, PartName
from fedbranch.errors import ClientFailed
from fedbranch.protocol.tasks import Task, Trial, TrialRows, Update
from fedbranch.sim.engines.reference import memory_of, naming
from fedbranch.sim.engines.stacked.layout import arranged_for_cpu
from fedbranch.training.client import evaluate, local_update, tensors, trial_losses
from fedbranch.training.half_split import halves_seed
from fedbranch.training.local_training import LocalTraining
from fedbranch.training.model_state import ModelState
from fedbranch.tree import Node
from fedbranch.types import Vector

__all__ = ["CannotFork", "Workers"]

MEASURED_TOGETHER = 8  # clients whose models are measured by one worker in one go
AHEAD = 2  # jobs that a worker has at hand, so that it never waits for the next one
STOPPING = (signal.SIGINT, signal.SIGTERM)
SECONDS_UNTIL_OUR_TURN = 1.0
SET_SIGNAL_AT_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


class CannotFork(Exception):
    """Why there can be no workers here."""


class Workers:
    """Trains clients in several processes; see :class:`fedbranch.sim.engines.choice.Engine`.

    Parameters
    ----------
    model, initial, clients, training
        What to train; on the CPU.
    num_workers
        By default one for each core. It changes no bit of the result.
    seed
        That of the run, from which the clients' halves follow.

    Raises
    ------
    CannotFork
        If this platform does not allow it.
    """

    name = "workers"

    def __init__(
        self,
        model: nn.Module,
        initial: ModelState,
        clients: Mapping[str, ClientData],
        training: LocalTraining,
        num_workers: int | None = None,
        *,
        seed: int = 0,
    ) -> None:
        if sys.platform != "linux":
            raise CannotFork("processes can be forked safely on Linux only")
        if multiprocessing.current_process().daemon:
            raise CannotFork("a daemonic process, such as one of a pool, can have no processes")
        if torch.cuda.is_available():
            raise CannotFork("torch cannot compute gradients in forked processes beside a GPU")
        self._clients = clients
        largest = max((client.train for client in clients.values()), key=lambda part: len(part.x))
        some_x, some_y = (part[:4].clone() for part in tensors(largest, model))
        own = arranged_for_cpu(model, training, some_x, some_y)
        self._work = _Work(own, initial, clients, training, seed)
        self._num_workers = min(num_workers or num_cores(), len(clients))
        self._workers: list[_Worker] = []

    def updates(self, tasks: Mapping[str, Task], seeds: Mapping[str, int]) -> dict[str, Update]:
        """Let every client with a task train."""
        places = {task.base: (task.params, task.buffers) for task in tasks.values()}
        # The longest first, so that nobody is left with a long one at the end.
        ordered = sorted(tasks, key=lambda i: -len(self._clients[i].train.x))
        jobs = [
            _Job("train", "train", tasks[i].base, [(i, seeds[i])], tasks[i].halves) for i in ordered
        ]
        results = self._done(jobs, places)
        updates: dict[str, Update] = {}
        for part in results:
            updates.update(part)
        return {client_id: updates[client_id] for client_id in tasks}

    def losses(self, trials: Mapping[str, Sequence[Trial]]) -> dict[str, tuple[float, ...]]:
        """Measure clients' losses under models that the server wants to try."""
        places: dict[str, tuple[Vector, Vector]] = {}
        members: dict[tuple[str, TrialRows, int | None], dict[str, None]] = {}
        keys: dict[str, list[tuple[str, TrialRows, int | None]]] = {}
        for client_id, own in trials.items():
            for trial in own:
                base = f"trial-{memory_of(trial)}"
                places[base] = (trial.params, trial.buffers)
                key = (base, trial.on, trial.halves)
                members.setdefault(key, {})[client_id] = None
                keys.setdefault(client_id, []).append(key)
        jobs = [
            _Job("try", on, base, [(i, 0) for i in ids[start : start + MEASURED_TOGETHER]], halves)
            for (base, on, halves), asked in members.items()
            for ids in [list(asked)]
            for start in range(0, len(ids), MEASURED_TOGETHER)
        ]
        found = {
            (client_id, job.base, job.part, job.halves): loss
            for job, results in zip(jobs, self._done(jobs, places), strict=True)
            for client_id, loss in results.items()
        }
        answers = {i: [found[i, *key] for key in own] for i, own in keys.items()}
        return {i: tuple(losses) for i, losses in answers.items() if None not in losses}

    def measure(self, at: Mapping[str, Node], part: PartName) -> dict[str, dict[str, float]]:
        """Measure clients on their data, each under the model of a node."""
        places: dict[str, tuple[Vector, Vector]] = {}
        members: dict[str, list[str]] = {}
        for client_id, node in at.items():
            if getattr(self._clients[client_id], part) is not None:
                places[node.base] = (node.params, node.buffers)
                members.setdefault(node.base, []).append(client_id)
        jobs = [
            _Job("measure", part, base, [(i, 0) for i in ids[start : start + MEASURED_TOGETHER]])
            for base, ids in members.items()
            for start in range(0, len(ids), MEASURED_TOGETHER)
        ]
        measured: dict[str, dict[str, float]] = {}
        for results in self._done(jobs, places):
            measured.update(results)
        return measured

    def _done(
        self, jobs: Sequence[_Job], places: Mapping[str, tuple[Vector, Vector]]
    ) -> list[dict[str, Any]]:
        """Let the workers do all jobs; the results come in the order of the jobs."""
        if not self._workers:
            self._hire()
        for worker in self._workers:
            worker.send("places", None)  # those of the last round are of no use any more
            worker.known.clear()
        waiting = list(enumerate(jobs))[::-1]
        results: dict[int, dict[str, Any]] = {}
        for _ in range(AHEAD):
            for worker in self._workers:
                if waiting and worker.can_take(waiting[-1][1]):
                    worker.give(*waiting.pop(), places)
        while len(results) < len(jobs):
            for connection in wait([w.connection for w in self._workers if w.num_open]):
                worker = next(w for w in self._workers if w.connection is connection)
                number, result = worker.receive()
                results[number] = result
                while waiting and worker.can_take(waiting[-1][1]):
                    worker.give(*waiting.pop(), places)
        return [results[number] for number in range(len(jobs))]

    def _hire(self) -> None:
        context = multiprocessing.get_context("fork")
        for _ in range(self._num_workers):
            ours, theirs = context.Pipe()
            # A forked process has a copy of all open ends; as long as one of them is open,
            # nobody at the other end notices that this process is gone.
            others = [worker.connection for worker in self._workers]
            # The kernel ties a child to the thread that forked it; only the main one stays.
            is_tied = threading.current_thread() is threading.main_thread()
            process = context.Process(
                target=_serve, args=(theirs, [ours, *others], self._work, is_tied), daemon=True
            )
            # Listed before it is there: an interruption finds it, whatever moment it picks.
            self._workers.append(_Worker(process, ours))
            # Blocked until the worker knows what to do about them: it would take them for its
            # parent's, and tell of it on the terminal.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
            try:
                with warnings.catch_warnings():
                    # Python warns that other threads may hold locks. Ours needs none of them:
                    # it talks through its pipe and computes with one thread.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
            finally:
                theirs.close()
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """End the processes, also in the middle of their work."""
        try:
            self._dismiss()
        except BaseException:  # who presses Ctrl-C twice must not leave half of them behind
            self._dismiss()
            raise

    def _dismiss(self) -> None:
        for worker in self._workers:
            worker.connection.close()
            if worker.process.pid is not None:
                worker.process.kill()  # it has nothing to clean up
        for worker in self._workers:
            if worker.process.pid is not None:
                worker.process.join()
        self._workers.clear()


class _Job(NamedTuple):
    """What one worker does in one go: train or measure clients at a place."""

    kind: Literal["train", "measure", "try"]
    part: PartName | TrialRows  # which of their examples
    base: str
    clients: list[tuple[str, int]]  # ids and seeds
    halves: int | None = None


@dataclass
class _Worker:
    """A process as its parent sees it."""

    process: multiprocessing.process.BaseProcess
    connection: Connection
    known: set[str] = field(default_factory=set)  # bases whose parameters it has
    num_open: int = 0

    def send(self, kind: str, content: object) -> None:
        try:
            self.connection.send((kind, content))
        except (BrokenPipeError, ConnectionResetError):
            raise self._is_gone() from None

    def can_take(self, job: _Job) -> bool:
        """Say whether it can be given another job without waiting for it.

        Parameters are sent to idle workers only: a busy one may be sending a result, and
        would not read ours while we do not read its.
        """
        return self.num_open == 0 or (self.num_open < AHEAD and job.base in self.known)

    def give(self, number: int, job: _Job, places: Mapping[str, tuple[Vector, Vector]]) -> None:
        if job.base not in self.known:
            self.send("place", (job.base, *places[job.base]))
            self.known.add(job.base)
        self.send("job", (number, job))
        self.num_open += 1

    def receive(self) -> tuple[int, dict[str, Any]]:
        try:
            number, result, error = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._is_gone() from None
        self.num_open -= 1
        if error is not None:
            raise error
        return number, result

    def _is_gone(self) -> ClientFailed:
        self.process.join(timeout=5)
        if self.process.exitcode == -signal.SIGTERM:
            # Whoever stops a whole group of processes is about to stop this one, too: then
            # that is the reason, and no client has failed.
            time.sleep(SECONDS_UNTIL_OUR_TURN)
        return ClientFailed(
            f"a worker process ended with exit code {self.process.exitcode} while it was training; "
            "-9 often means that the memory was used up: ask for fewer with num_workers, or take "
            "engine='reference'"
        )


# In the worker


class _Work:
    """What a worker can do."""

    def __init__(
        self,
        model: nn.Module,
        initial: ModelState,
        clients: Mapping[str, ClientData],
        training: LocalTraining,
        seed: int,
    ) -> None:
        self.model = model
        self.initial = initial
        self.clients = clients
        self.training = training
        self.seed = seed
        self.places: dict[str, tuple[Vector, Vector]] = {}
        self._prepared: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}

    def do(self, job: _Job) -> dict[str, Any]:
        """Give the result for each client of a job."""
        return {client_id: self._result(job, client_id, seed) for client_id, seed in job.clients}

    def _result(
        self, job: _Job, client_id: str, seed: int
    ) -> Update | dict[str, float] | float | None:
        params, buffers = self.places[job.base]
        client = self.clients[client_id]
        own_halves = halves_seed(self.seed, client_id)
        if job.kind == "try":
            trial = Trial(
                params=params, buffers=buffers, on=cast("TrialRows", job.part), halves=job.halves
            )
            with naming(client_id, client.held_out or client.train, "evaluated"):
                losses = trial_losses(
                    self.model,
                    self.initial,
                    [trial],
                    self._tensors(client_id, "train"),
                    None if client.held_out is None else self._tensors(client_id, "held_out"),
                    self.training,
                    halves_seed=own_halves,
                )
            return None if losses is None else losses[0]
        raw = getattr(client, job.part)
        with naming(client_id, raw, "trained" if job.kind == "train" else "evaluated"):
            data = self._tensors(client_id, job.part)
            if job.kind == "train":
                task = Task(
                    node_id=0,
                    params=params,
                    buffers=buffers,
                    base=job.base,
                    purpose="train",
                    halves=job.halves,
                )
                return local_update(
                    self.model,
                    self.initial,
                    task,
                    data,
                    self.training,
                    seed=seed,
                    halves_seed=own_halves,
                )
            self.initial.moved_by(params, buffers).load_into(self.model)
            return evaluate(self.model, data, self.training)

    def _tensors(self, client_id: str, part: str) -> tuple[Tensor, Tensor]:
        """See the arrays as tensors, prepared once."""
        key = (client_id, part)
        if key not in self._prepared:
            self._prepared[key] = tensors(getattr(self.clients[client_id], part), self.model)
        return self._prepared[key]


def _serve(
    connection: Connection, inherited: Sequence[Connection], work: _Work, is_tied: bool
) -> None:
    """Do jobs until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we stop
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    if is_tied:
        _die_with_parent()
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    _keep_memory()
    while True:
        try:
            kind, content = connection.recv()
        except (EOFError, ConnectionResetError):  # the latter if it has not read our results
            return
        if kind == "places":
            work.places.clear()
        elif kind == "place":
            base, params, buffers = content
            work.places[base] = (params, buffers)
        else:
            number, job = content
            result, error = None, None
            try:
                result = work.do(job)
            except Exception as raised:
                error = raised if isinstance(raised, ClientFailed) else ClientFailed(repr(raised))
                error.__cause__ = None  # it may not survive the way to the parent
            try:
                connection.send((number, result, error))
            except (BrokenPipeError, ConnectionResetError):
                return


def _die_with_parent() -> None:
    """Have the kernel end us with our parent, also in the middle of a long job.

    Between jobs the end of the pipe says the same; that is enough where this cannot be had.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SET_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL)


def _keep_memory() -> None:
    """Keep the allocator from giving activations back to the system after every step."""
    try:
        libc = ctypes.CDLL(None)
        trim_threshold, mmap_threshold = -1, -3
        libc.mallopt(trim_threshold, 2**30)
        libc.mallopt(mmap_threshold, 2**30)
    except (OSError, AttributeError):
        pass  # another C library: only slower
