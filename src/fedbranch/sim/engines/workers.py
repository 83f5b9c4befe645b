"""The engine for the CPU: clients spread over processes with one thread each.

Two models that train with one thread each are faster than one model with two threads. A
client's result does not depend on the other clients, so the number of workers changes no bit.
The processes are forked: they share the model and all data with their parent, without copies.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import nn

from fedbranch.core.parallel import num_cores
from fedbranch.data import ClientData, PartName
from fedbranch.errors import ClientFailed
from fedbranch.protocol.tasks import Task, Trial, TrialRows, Update
from fedbranch.sim.engines.model_source import memory_key
from fedbranch.sim.engines.stacked.layout import cpu_layout
from fedbranch.sim.engines.worker_process import STOP_SIGNALS, ClientWork, Job, serve
from fedbranch.training.example_tensors import example_tensors
from fedbranch.training.local_training import LocalTraining
from fedbranch.training.model_state import ModelState
from fedbranch.tree import Node
from fedbranch.types import Vector

__all__ = ["CannotFork", "Workers"]

CLIENTS_PER_MEASURING_JOB = 8
MAX_OPEN_JOBS = 2  # of one worker: while it does one job, the next one already waits in its pipe
SIGTERM_DELAY_S = 1.0


class CannotFork(Exception):
    """Worker processes are not possible here; the message says why."""


class Workers:
    """Trains clients in several processes; see :class:`fedbranch.sim.engines.engine.Engine`.

    Parameters
    ----------
    model, initial, clients, training, seed
        As for every engine; on the CPU.
    num_workers
        Number of processes; by default one for each core. It changes no bit of the result.

    Raises
    ------
    CannotFork
        If processes cannot be forked safely here.
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
        some_x, some_y = (part[:4].clone() for part in example_tensors(largest, model))
        own = cpu_layout(model, training, some_x, some_y)
        self._work = ClientWork(own, initial, clients, training, seed)
        self._num_workers = min(num_workers or num_cores(), len(clients))
        self._workers: list[_Worker] = []

    def updates(self, tasks: Mapping[str, Task], seeds: Mapping[str, int]) -> dict[str, Update]:
        """Train every client that has a task."""
        models = {task.base: (task.params, task.buffers) for task in tasks.values()}
        # The longest first, so that no worker starts a long job when the others are done.
        ordered = sorted(tasks, key=lambda i: -len(self._clients[i].train.x))
        jobs = [
            Job("train", "train", tasks[i].base, [(i, seeds[i])], tasks[i].halves) for i in ordered
        ]
        results = self._done(jobs, models)
        updates: dict[str, Update] = {}
        for part in results:
            updates.update(part)
        return {client_id: updates[client_id] for client_id in tasks}

    def losses(self, trials: Mapping[str, Sequence[Trial]]) -> dict[str, tuple[float, ...]]:
        """Measure clients' losses under models that the server wants to try."""
        models: dict[str, tuple[Vector, Vector]] = {}
        members: dict[tuple[str, TrialRows, int | None], dict[str, None]] = {}
        keys: dict[str, list[tuple[str, TrialRows, int | None]]] = {}
        for client_id, own in trials.items():
            for trial in own:
                base = f"trial-{memory_key(trial)}"
                models[base] = (trial.params, trial.buffers)
                key = (base, trial.on, trial.halves)
                members.setdefault(key, {})[client_id] = None
                keys.setdefault(client_id, []).append(key)
        jobs = [
            Job(
                "try",
                on,
                base,
                [(i, 0) for i in ids[start : start + CLIENTS_PER_MEASURING_JOB]],
                halves,
            )
            for (base, on, halves), asked in members.items()
            for ids in [list(asked)]
            for start in range(0, len(ids), CLIENTS_PER_MEASURING_JOB)
        ]
        found = {
            (client_id, job.base, job.part, job.halves): loss
            for job, results in zip(jobs, self._done(jobs, models), strict=True)
            for client_id, loss in results.items()
        }
        answers = {i: [found[i, *key] for key in own] for i, own in keys.items()}
        return {i: tuple(losses) for i, losses in answers.items() if None not in losses}

    def measure(self, at: Mapping[str, Node], part: PartName) -> dict[str, dict[str, float]]:
        """Measure clients on a part of their data, each under the model of a node."""
        models: dict[str, tuple[Vector, Vector]] = {}
        members: dict[str, list[str]] = {}
        for client_id, node in at.items():
            if getattr(self._clients[client_id], part) is not None:
                models[node.base] = (node.params, node.buffers)
                members.setdefault(node.base, []).append(client_id)
        jobs = [
            Job(
                "measure",
                part,
                base,
                [(i, 0) for i in ids[start : start + CLIENTS_PER_MEASURING_JOB]],
            )
            for base, ids in members.items()
            for start in range(0, len(ids), CLIENTS_PER_MEASURING_JOB)
        ]
        measured: dict[str, dict[str, float]] = {}
        for results in self._done(jobs, models):
            measured.update(results)
        return measured

    def _done(
        self, jobs: Sequence[Job], models: Mapping[str, tuple[Vector, Vector]]
    ) -> list[dict[str, Any]]:
        """Let the workers do all jobs; return the results in the order of the jobs."""
        try:
            return self._results(jobs, models)
        except BaseException:
            # Other jobs are still under way. The next call would take their results for its own.
            self.close()
            raise

    def _results(
        self, jobs: Sequence[Job], models: Mapping[str, tuple[Vector, Vector]]
    ) -> list[dict[str, Any]]:
        if not self._workers:
            self._start_workers()
        for worker in self._workers:
            worker.send("forget", None)  # the last call's models are not needed any more
            worker.known_bases.clear()
        waiting = list(enumerate(jobs))[::-1]
        results: dict[int, dict[str, Any]] = {}
        for _ in range(MAX_OPEN_JOBS):
            for worker in self._workers:
                if waiting and worker.can_take(waiting[-1][1]):
                    worker.assign(*waiting.pop(), models)
        while len(results) < len(jobs):
            for connection in wait([w.connection for w in self._workers if w.num_open]):
                worker = next(w for w in self._workers if w.connection is connection)
                number, result = worker.receive()
                results[number] = result
                while waiting and worker.can_take(waiting[-1][1]):
                    worker.assign(*waiting.pop(), models)
        return [results[number] for number in range(len(jobs))]

    def _start_workers(self) -> None:
        context = multiprocessing.get_context("fork")
        for _ in range(self._num_workers):
            ours, theirs = context.Pipe()
            # A forked process has a copy of all open ends of pipes. While any copy is open, the
            # process at the other end does not notice that this one is gone.
            others = [worker.connection for worker in self._workers]
            # The kernel ends a child with the thread that forked it. Only the main thread is sure
            # to live as long as this process.
            ends_with_parent = threading.current_thread() is threading.main_thread()
            process = context.Process(
                target=serve,
                args=(theirs, [ours, *others], self._work, ends_with_parent),
                daemon=True,
            )
            # Listed before it starts, so that close() finds it after an interruption at any time.
            self._workers.append(_Worker(process, ours))
            # Blocked until the worker has set its own handlers: before, it has its parent's, and
            # would print a traceback on the terminal.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            try:
                with warnings.catch_warnings():
                    # Python warns that other threads may hold locks. The worker needs none of
                    # them: it talks through its pipe and computes with one thread.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
            finally:
                theirs.close()
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """End the processes, even in the middle of their work."""
        try:
            self._end_workers()
        except BaseException:  # a second Ctrl-C must not leave half of the processes behind
            self._end_workers()
            raise

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.connection.close()
            if worker.process.pid is not None:
                worker.process.kill()  # it has nothing to clean up
        for worker in self._workers:
            if worker.process.pid is not None:
                worker.process.join()
        self._workers.clear()


@dataclass
class _Worker:
    """A worker process, as its parent sees it."""

    process: multiprocessing.process.BaseProcess
    connection: Connection
    known_bases: set[str] = field(default_factory=set)  # it has the parameters of these bases
    num_open: int = 0

    def send(self, kind: str, content: object) -> None:
        try:
            self.connection.send((kind, content))
        except (BrokenPipeError, ConnectionResetError):
            raise self._failure() from None

    def can_take(self, job: Job) -> bool:
        """Return whether a job can be sent to it without waiting for it.

        Parameters are sent to idle workers only. A busy worker may be sending a result; it
        would not read our message, and we would not read its result.
        """
        return self.num_open == 0 or (
            self.num_open < MAX_OPEN_JOBS and job.base in self.known_bases
        )

    def assign(self, number: int, job: Job, models: Mapping[str, tuple[Vector, Vector]]) -> None:
        if job.base not in self.known_bases:
            self.send("model", (job.base, *models[job.base]))
            self.known_bases.add(job.base)
        self.send("job", (number, job))
        self.num_open += 1

    def receive(self) -> tuple[int, dict[str, Any]]:
        try:
            number, result, error = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._failure() from None
        self.num_open -= 1
        if error is not None:
            raise error
        return number, result

    def _failure(self) -> ClientFailed:
        self.process.join(timeout=5)
        if self.process.exitcode == -signal.SIGTERM:
            # A signal to a whole group of processes reaches this one, too, in a moment. Then it
            # ends for that reason, and not because a client failed.
            time.sleep(SIGTERM_DELAY_S)
        return ClientFailed(
            f"a worker process ended with exit code {self.process.exitcode} while it was training; "
            "-9 often means that the memory was used up: ask for fewer with num_workers, or take "
            "engine='reference'"
        )
