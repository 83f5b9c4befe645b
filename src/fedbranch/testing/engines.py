"""The check of an engine: it computes what one client computes alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
import torch

from fedbranch.core.geometry import to_numpy
from fedbranch.data import PartName
from fedbranch.errors import ClientFailed
from fedbranch.protocol.tasks import Task, Update, UpdateBatch
from fedbranch.sim.engines.engine import Engine
from fedbranch.testing.contract import Contract, shortened
from fedbranch.testing.engine_problems import SEED, Problem, problems
from fedbranch.types import Array

__all__ = ["check_engine"]

UPDATE_BOUND = 3e-5  # distance to the reference's update, as a share of its length
SIGNAL_BOUND = 1e-5  # difference of two numbers
BUFFERS_BOUND = 1e-4  # difference of two numbers
LOSS_BOUND = 1e-4  # difference of two losses or metrics, as a share of the reference's

BAD_LABEL = 17
INDEPENDENCE_REMEDY = "compute each client from its own task, data and seed only, in a fixed order"


def check_engine(make_engine: Callable[..., Engine], *, without: Collection[str] = ()) -> None:
    """Check that an engine keeps the contract of :class:`fedbranch.sim.engines.engine.Engine`.

    Parameters
    ----------
    make_engine
        Called as ``make_engine(model, initial, clients, training, seed=...)``: the engine's
        class, or a function that adds arguments of its own.
    without
        Names of problems that the engine does not claim to solve, of ``"mlp"``, ``"signal"``,
        ``"dropout"``, ``"buffers"``, ``"writes inputs"``.

    Raises
    ------
    AssertionError
        With the first clause of the contract that does not hold.

    Examples
    --------
    >>> from fedbranch.sim.engines.reference import Reference
    >>> check_engine(Reference, without=["dropout", "buffers", "writes inputs"])
    """
    all_problems = problems()
    unknown = set(without) - all_problems.keys()
    if unknown:
        raise ValueError(f"without names {sorted(unknown)}; the problems are {list(all_problems)}")
    for name, problem in all_problems.items():
        if name not in without:
            _Check(make_engine, problem, name).run()


class _Check:
    """One problem, and the engine that is to solve it."""

    def __init__(self, make_engine: Callable[..., Engine], problem: Problem, name: str) -> None:
        self._make_engine = make_engine
        self._problem = problem
        shown = getattr(make_engine, "__name__", None) or shortened(make_engine)
        self._contract = Contract(
            "fedbranch.sim.engines.engine.Engine", f"{shown}, on the problem {name!r},"
        )

    def run(self) -> None:
        with self._engine() as engine:
            self._check_name(engine)
            with self._leaving_the_world_alone():
                replies = self._updates(engine, self._problem.tasks, self._problem.seeds)
                self._check_updates(replies)
                self._check_repetition(engine, replies)
                self._check_order(engine)
                self._check_losses(engine)
                for part in ("train", "test", "validation", "held_out"):
                    self._check_measures(engine, part)
            self._check_closing(engine, replies)
        self._check_diverging()
        self._check_failures()

    @contextmanager
    def _engine(self, problem: Problem | None = None) -> Iterator[Engine]:
        problem = self._problem if problem is None else problem
        with self._contract.answering("make_engine(model, initial, clients, training, seed=...)"):
            engine = self._make_engine(
                copy.deepcopy(problem.model),
                problem.initial,
                problem.clients,
                problem.training,
                seed=SEED,
            )
        try:
            yield engine
        except BaseException:
            with suppress(Exception):  # or it would hide the error under way
                engine.close()
            raise
        with self._contract.answering("close()"):
            engine.close()

    def _check_name(self, engine: Engine) -> None:
        name = getattr(engine, "name", None)
        if not isinstance(name, str) or not name:
            raise self._contract.broken(
                "name is short and fixed", f"name is {name!r}", "set name to a string"
            )

    # Updates

    def _updates(
        self, engine: Engine, tasks: Mapping[str, Task], seeds: Mapping[str, int]
    ) -> dict[str, Update]:
        with self._contract.answering("updates(tasks, seeds)"):
            replies = engine.updates(tasks, seeds)
        if not isinstance(replies, UpdateBatch | Mapping):
            raise self._contract.broken(
                "updates returns an UpdateBatch or a mapping from client id to Update",
                f"a {type(replies).__name__}",
                "return one of the two",
            )
        own = _one_by_one(replies) if isinstance(replies, UpdateBatch) else dict(replies)
        if sorted(own) != sorted(tasks):
            raise self._contract.broken(
                "updates returns the replies of exactly the clients that have a task",
                f"tasks for {sorted(tasks)}, replies of {sorted(own)}",
                "train every client that has a task, and no other",
            )
        return own

    def _check_updates(self, replies: Mapping[str, Update]) -> None:
        for client_id, reply in replies.items():
            self._check_update(client_id, reply)

    def _check_update(self, client_id: str, reply: Update) -> None:
        """Compare a reply with what the client computes alone."""
        problem = self._problem
        task, rows = problem.tasks[client_id], len(problem.clients[client_id].train.x)
        expected = problem.expected_update(client_id)
        where = f"client {client_id!r} with {rows} examples, halves {task.halves}"
        for name, found, right in [
            ("base", reply.base, expected.base),
            ("number of examples", reply.num_examples, expected.num_examples),
            ("names of metrics", sorted(reply.metrics), sorted(expected.metrics)),
            ("signal", reply.signal is not None, expected.signal is not None),
            (
                "half difference",
                reply.half_difference is not None,
                expected.half_difference is not None,
            ),
        ]:
            if found != right:
                raise self._contract.broken(
                    "ids, numbers of examples, bases, and which optional parts a reply has are "
                    "equal to the reference's",
                    f"{where}: {name} is {found!r}; the reference has {right!r}",
                    "return what fedbranch.training.client.local_update returns",
                )
        length = float(np.linalg.norm(expected.vector))
        self._near("update", where, reply.vector, expected.vector, UPDATE_BOUND * length)
        if expected.half_difference is not None:
            scale = max(length, float(np.linalg.norm(expected.half_difference)))
            self._near(
                "half difference",
                where,
                reply.half_difference,
                expected.half_difference,
                UPDATE_BOUND * scale,
            )
        self._near("signal", where, reply.signal, expected.signal, SIGNAL_BOUND, largest=True)
        self._near("buffers", where, reply.buffers, expected.buffers, BUFFERS_BOUND, largest=True)
        self._same_metrics("updates", where, reply.metrics, expected.metrics)

    def _near(
        self,
        what: str,
        where: str,
        found: Array | None,
        expected: Array | None,
        bound: float,
        *,
        largest: bool = False,
    ) -> None:
        """Compare two vectors by their distance, or by the largest difference of two numbers."""
        if expected is None or (found is None and not len(expected)):
            return
        own, right = np.zeros(0) if found is None else to_numpy(found), to_numpy(expected)
        off = np.inf
        if own.shape == right.shape:
            difference = own.astype(np.float64) - right
            if largest:
                off = float(np.abs(difference).max(initial=0.0))
            else:
                off = float(np.linalg.norm(difference))
        if not off <= bound:
            kind = "a number of it differs" if largest else "its distance is"
            raise self._contract.broken(
                f"the {what} equals the reference's within its bound",
                f"{where}: {kind} by {off:.3g}, the bound is {bound:.3g}; shapes {own.shape} and "
                f"{right.shape}, it begins {shortened(own[:4])}, the reference {right[:4]}",
                "train as fedbranch.training.client.local_update does: same batches, same dropout, "
                "same start",
            )

    def _same_metrics(
        self, call: str, where: str, found: Mapping[str, float], expected: Mapping[str, float]
    ) -> None:
        for name, right in expected.items():
            if not abs(found[name] - right) <= LOSS_BOUND * abs(right) + 1e-12:
                raise self._contract.broken(
                    f"losses and metrics differ by at most {LOSS_BOUND:g} of their value",
                    f"{call}, {where}: {name} is {found[name]!r}; the reference has {right!r}",
                    "average over examples as fedbranch.training.client does",
                )

    def _check_repetition(self, engine: Engine, replies: Mapping[str, Update]) -> None:
        """Check same seed, same bytes; and another seed, other bytes."""
        problem = self._problem
        again = self._updates(engine, problem.tasks, problem.seeds)
        with self._engine() as other:
            anew = self._updates(other, problem.tasks, problem.seeds)
        for client_id, reply in replies.items():
            for what, same in [("the same call", again), ("another engine", anew)]:
                if not _same_bytes(reply, same[client_id]):
                    raise self._contract.broken(
                        "the same call on the same machine returns the same bytes",
                        f"client {client_id!r}: {what} with the same seed returned another reply",
                        f"take randomness from the seeds only; {INDEPENDENCE_REMEDY}",
                    )
        largest = max(problem.clients, key=lambda i: len(problem.clients[i].train.x))
        seeds = {**problem.seeds, largest: problem.seeds[largest] + 1}
        other_seed = self._updates(engine, problem.tasks, seeds)
        if _same_bytes(other_seed[largest], replies[largest]):
            raise self._contract.broken(
                "all randomness follows from the arguments seed and seeds",
                f"client {largest!r} returned the same reply for seeds {problem.seeds[largest]} "
                f"and {seeds[largest]}",
                "derive the order of examples and dropout from seeds[client_id]",
            )

    def _check_order(self, engine: Engine) -> None:
        """Check that neither the other clients nor their order change a result."""
        problem = self._problem
        ids = list(problem.tasks)
        for some in (ids[::-1], ids[1::2], ids[:1]):
            replies = self._updates(
                engine, {i: problem.tasks[i] for i in some}, {i: problem.seeds[i] for i in some}
            )
            try:
                self._check_updates(replies)
            except AssertionError as error:
                raise self._contract.broken(
                    "a result does not depend on the other clients of the call, on their order, "
                    "or on earlier calls",
                    f"for tasks in the order {some}: {error}",
                    INDEPENDENCE_REMEDY,
                ) from error

    # Losses and measures

    def _check_losses(self, engine: Engine) -> None:
        problem = self._problem
        with self._contract.answering("losses(trials)"):
            losses = engine.losses(problem.trials)
        expected = {i: problem.expected_losses(i) for i in problem.trials}
        able = sorted(i for i, own in expected.items() if own is not None)
        if sorted(losses) != able:
            raise self._contract.broken(
                "a client that lacks the examples of any of its trials is left out, and no other",
                f"losses of {sorted(losses)}; clients {able} have the examples",
                "leave a client out if fedbranch.training.client.trial_losses returns None",
            )
        for client_id in able:
            own, right = losses[client_id], expected[client_id]
            assert right is not None
            trials = problem.trials[client_id]
            if len(own) != len(trials):
                raise self._contract.broken(
                    "losses has one loss for each trial",
                    f"client {client_id!r} has {len(trials)} trials and {len(own)} losses",
                    "return the losses in the order of the trials",
                )
            for number, trial in enumerate(trials):
                self._same_metrics(
                    "losses",
                    f"client {client_id!r}, trial {number} on {trial.on}",
                    {"loss": own[number]},
                    {"loss": right[number]},
                )

    def _check_measures(self, engine: Engine, part: PartName) -> None:
        problem = self._problem
        with self._contract.answering(f"measure(at, {part!r})"):
            measured = engine.measure(problem.nodes, part)
        expected = {i: problem.expected_measures(i, part) for i in problem.nodes}
        able = {i: own for i, own in expected.items() if own is not None}
        if sorted(measured) != sorted(able):
            raise self._contract.broken(
                "measure leaves out clients without such examples, and no others",
                f"part {part!r}: measured {sorted(measured)}; clients {sorted(able)} have examples",
                "measure every client whose part is not None",
            )
        for client_id, right in able.items():
            if sorted(measured[client_id]) != sorted(right):
                raise self._contract.broken(
                    "measure returns the loss and every metric of the training",
                    f"client {client_id!r}: {sorted(measured[client_id])}, not {sorted(right)}",
                    "return what fedbranch.training.client.evaluate returns",
                )
            where = f"client {client_id!r} on its {part} examples"
            self._same_metrics("measure", where, measured[client_id], right)

    # Side effects

    @contextmanager
    def _leaving_the_world_alone(self) -> Iterator[None]:
        """Check that neither the arguments nor global random states change."""
        before = self._problem.digests()
        torch_state, numpy_state = torch.get_rng_state(), _numpy_state()
        yield
        after = self._problem.digests()
        changed = sorted(name for name, digest in before.items() if after[name] != digest)
        if changed:
            raise self._contract.broken(
                "nothing that an engine was given changes, even if the model writes into its "
                "inputs",
                f"changed: {changed}",
                "copy examples, parameters and buffers before a model sees them",
            )
        same_torch = torch.equal(torch_state, torch.get_rng_state())
        if not same_torch or numpy_state != _numpy_state():
            raise self._contract.broken(
                "the global generators of torch and NumPy are left as they were",
                f"the state of {'NumPy' if same_torch else 'torch'} changed",
                "use generators of your own, or torch.random.fork_rng()",
            )

    def _check_closing(self, engine: Engine, replies: Mapping[str, Update]) -> None:
        with self._contract.answering("close(), a second time"):
            engine.close()
            engine.close()
        client_id = next(iter(replies))
        again = self._updates(
            engine,
            {client_id: self._problem.tasks[client_id]},
            {client_id: self._problem.seeds[client_id]},
        )
        self._check_updates(again)

    # Failures

    def _check_diverging(self) -> None:
        """Check that results that are not finite are returned."""
        problem = self._problem.diverging()
        with self._engine(problem) as engine:
            replies = self._updates(engine, problem.tasks, problem.seeds)
        client_id = problem.failing_id
        if np.isfinite(to_numpy(replies[client_id].vector)).all():
            raise self._contract.broken(
                "results that are not finite are returned, for the server to refuse",
                f"client {client_id!r} has an input that is infinite, and a finite update",
                "return the update as it is",
            )

    def _check_failures(self) -> None:
        """Check that a client that cannot be trained is named."""
        problem = self._problem.with_bad_label(BAD_LABEL)
        client_id = problem.failing_id
        shape = problem.clients[client_id].train.x.shape
        with self._engine(problem) as engine:
            calls: dict[str, Callable[[], object]] = {
                "updates": partial(engine.updates, problem.tasks, problem.seeds),
                "measure": partial(engine.measure, problem.nodes, "train"),
            }
            for what, call in calls.items():
                found = "no error"
                try:
                    call()
                except ClientFailed as error:
                    found = f"ClientFailed: {error}"
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"
                named = found.startswith("ClientFailed") and repr(client_id) in found
                if not named or str(shape) not in found:
                    raise self._contract.broken(
                        "if a client's model or data raise an error, the call raises ClientFailed "
                        "with the client's id and the shapes of its examples",
                        f"{what}, where client {client_id!r} with inputs of shape {shape} has the "
                        f"label {BAD_LABEL}: {found}",
                        "wrap the work on a client in "
                        "fedbranch.sim.engines.reference.naming_client",
                    )
            others = {i: task for i, task in problem.tasks.items() if i != client_id}
            replies = self._updates(engine, others, {i: problem.seeds[i] for i in others})
        try:
            self._check_updates(replies)
        except AssertionError as error:
            raise self._contract.broken(
                "a result does not depend on earlier calls, not even on one that failed",
                f"after a call that raised, with the other clients: {error}",
                "drop all results of the call that fails",
            ) from error


def _numpy_state() -> str:
    return repr(np.random.get_state(legacy=False)["state"])  # noqa: NPY002 -- the state that an engine must not change


def _one_by_one(batch: UpdateBatch) -> dict[str, Update]:
    """Split a batch; a row of zeros is no half difference."""
    vectors = to_numpy(batch.vectors)
    buffers, signals, half_differences = (
        [None] * len(batch) if column is None else to_numpy(column)
        for column in (batch.buffers, batch.signals, batch.half_differences)
    )
    replies = {}
    for row, client_id in enumerate(batch.client_ids):
        half = half_differences[row]
        replies[client_id] = Update(
            vector=vectors[row],
            num_examples=batch.num_examples[row],
            metrics=batch.metrics[row],
            buffers=buffers[row],
            base=batch.bases[row],
            signal=signals[row],
            half_difference=None if half is None or not half.any() else half,
        )
    return replies


def _same_bytes(one: Update, other: Update) -> bool:
    if one.metrics != other.metrics:
        return False
    for name in ("vector", "buffers", "signal", "half_difference"):
        a, b = getattr(one, name), getattr(other, name)
        if (a is None) != (b is None):
            return False
        if a is not None and to_numpy(a).tobytes() != to_numpy(b).tobytes():
            return False
    return True
