"""What runs in one worker process: jobs for single clients, with one thread.

The process is forked, so it shares the model and all data with its parent. Jobs and the
parameters that they need come through a pipe, and results go back through it.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from fedbranch.data import ClientData, PartName
from fedbranch.errors import ClientFailed
from fedbranch.protocol.tasks import Task, Trial, TrialRows, Update
from fedbranch.sim.engines.reference import naming_client
from fedbranch.training.client import evaluate, local_update, trial_losses
from fedbranch.training.example_tensors import example_tensors
from fedbranch.training.half_split import halves_seed
from fedbranch.training.local_training import LocalTraining
from fedbranch.training.model_state import ModelState
from fedbranch.types import Vector

__all__ = ["STOP_SIGNALS", "ClientWork", "Job", "serve"]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>: the signal that a process gets when its parent ends
MALLOC_TRIM_THRESHOLD, MALLOC_MMAP_THRESHOLD = -1, -3  # M_... of <malloc.h>


class Job(NamedTuple):
    """One message's worth of work: train, measure or try clients at the same parameters."""

    kind: Literal["train", "measure", "try"]
    part: PartName | TrialRows  # which of the clients' examples
    base: str  # names the parameters
    clients: list[tuple[str, int]]  # ids and seeds
    halves: int | None = None


class ClientWork:
    """Does jobs, with what the process shares with its parent.

    Attributes
    ----------
    models
        Base -> parameters and buffers, as displacements from the initial model.
    """

    def __init__(
        self,
        model: nn.Module,
        initial: ModelState,
        clients: Mapping[str, ClientData],
        training: LocalTraining,
        seed: int,
    ) -> None:
        self.models: dict[str, tuple[Vector, Vector]] = {}
        self._model = model
        self._initial = initial
        self._clients = clients
        self._training = training
        self._seed = seed
        self._prepared: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}

    def do(self, job: Job) -> dict[str, Any]:
        """Return the result for each client of a job.

        Client id -> for ``"train"`` its update, for ``"measure"`` its metrics, for ``"try"``
        its loss, or None if it lacks the examples.
        """
        return {client_id: self._result(job, client_id, seed) for client_id, seed in job.clients}

    def _result(
        self, job: Job, client_id: str, seed: int
    ) -> Update | dict[str, float] | float | None:
        if job.kind == "try":
            return self._loss(job, client_id)
        params, buffers = self.models[job.base]
        raw = getattr(self._clients[client_id], job.part)
        with naming_client(client_id, raw, "trained" if job.kind == "train" else "evaluated"):
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
                    self._model,
                    self._initial,
                    task,
                    data,
                    self._training,
                    seed=seed,
                    halves_seed=halves_seed(self._seed, client_id),
                )
            self._initial.moved_by(params, buffers).load_into(self._model)
            return evaluate(self._model, data, self._training)

    def _loss(self, job: Job, client_id: str) -> float | None:
        params, buffers = self.models[job.base]
        client = self._clients[client_id]
        trial = Trial(
            params=params, buffers=buffers, on=cast("TrialRows", job.part), halves=job.halves
        )
        with naming_client(client_id, client.held_out or client.train, "evaluated"):
            losses = trial_losses(
                self._model,
                self._initial,
                [trial],
                self._tensors(client_id, "train"),
                None if client.held_out is None else self._tensors(client_id, "held_out"),
                self._training,
                halves_seed=halves_seed(self._seed, client_id),
            )
        return None if losses is None else losses[0]

    def _tensors(self, client_id: str, part: str) -> tuple[Tensor, Tensor]:
        """Return a client's examples as tensors, which are converted once."""
        key = (client_id, part)
        if key not in self._prepared:
            examples = getattr(self._clients[client_id], part)
            self._prepared[key] = example_tensors(examples, self._model)
        return self._prepared[key]


def serve(
    connection: Connection,
    inherited: Sequence[Connection],
    work: ClientWork,
    ends_with_parent: bool,
) -> None:
    """Work on jobs until the parent closes the pipe or ends.

    Messages are ``("forget", None)``: drop all parameters; ``("model", (base, params,
    buffers))``: remember these; ``("job", (number, job))``. The answer to a job is ``(number,
    result, error)``.

    Parameters
    ----------
    connection
        This process's end of its pipe.
    inherited
        Ends of pipes that came with the fork and belong to the parent; they are closed.
    work
        Does the jobs.
    ends_with_parent
        Ask the kernel to end this process with its parent, even in the middle of a job.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we stop
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if ends_with_parent:
        _end_with_parent()
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    _keep_freed_memory()
    while True:
        try:
            kind, content = connection.recv()
        except (EOFError, ConnectionResetError):  # the latter if it has not read our results
            return
        if kind == "forget":
            work.models.clear()
        elif kind == "model":
            base, params, buffers = content
            work.models[base] = (params, buffers)
        else:
            number, job = content
            result, error = None, None
            try:
                result = work.do(job)
            except Exception as raised:
                error = raised if isinstance(raised, ClientFailed) else ClientFailed(repr(raised))
                error.__cause__ = None  # it may be of a kind that cannot be pickled
            try:
                connection.send((number, result, error))
            except (BrokenPipeError, ConnectionResetError):
                return


def _end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends.

    Where the kernel cannot do it, the process ends after its job, when it finds the pipe closed.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _keep_freed_memory() -> None:
    """Stop the allocator from returning activations to the system after every step."""
    with contextlib.suppress(OSError, AttributeError):  # another C library: only slower
        libc = ctypes.CDLL(None)
        libc.mallopt(MALLOC_TRIM_THRESHOLD, 2**30)
        libc.mallopt(MALLOC_MMAP_THRESHOLD, 2**30)
