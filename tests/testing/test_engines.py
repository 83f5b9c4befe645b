"""The check of engines: ours pass, and broken ones are caught."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from fedbranch.sim.engines.reference import Reference
from fedbranch.sim.engines.stacked.engine import StackedEngine
from fedbranch.sim.engines.workers import Workers
from fedbranch.testing import check_engine

ONLY_MLP = ["signal", "dropout", "buffers", "writes inputs"]


@pytest.mark.parametrize(
    "make_engine",
    [Reference, StackedEngine, partial(Workers, num_workers=2)],
    ids=["reference", "vectorised", "workers"],
)
def test_our_engines_keep_their_contract(make_engine):
    check_engine(make_engine)


class Nameless(Reference):
    name = ""


class OtherSeeds(Reference):
    def updates(self, tasks, seeds):
        return super().updates(tasks, {i: seed + 1 for i, seed in seeds.items()})


class FixedSeeds(Reference):
    """Right for the seeds of the check, whatever the engine is given."""

    def updates(self, tasks, seeds):
        return super().updates(tasks, {i: 7 + int(i[1:]) for i in seeds})


class WithoutHalves(Reference):
    def updates(self, tasks, seeds):
        return super().updates({i: replace(t, halves=None) for i, t in tasks.items()}, seeds)


class OtherHalves(Reference):
    def __init__(self, *args, seed):
        super().__init__(*args, seed=seed + 1)


class Forgetful(Reference):
    def updates(self, tasks, seeds):
        replies = super().updates(tasks, seeds)
        replies.popitem()
        return replies


class Renaming(Reference):
    def updates(self, tasks, seeds):
        replies = super().updates(tasks, seeds)
        return {i: replace(reply, base="0.0") for i, reply in replies.items()}


class Drifting(Reference):
    """Is off by less than the bounds, and by more at each call."""

    num_calls = 0

    def updates(self, tasks, seeds):
        self.num_calls += 1
        off = np.float32(1 + 1e-6 * self.num_calls)
        replies = super().updates(tasks, seeds)
        return {i: replace(reply, vector=off * reply.vector) for i, reply in replies.items()}


class Mixing(Reference):
    """Is right for ten clients only."""

    def updates(self, tasks, seeds):
        off = np.float32(1 + 1e-3 * (10 - len(tasks)))
        replies = super().updates(tasks, seeds)
        return {i: replace(reply, vector=off * reply.vector) for i, reply in replies.items()}


class Global(Reference):
    def updates(self, tasks, seeds):
        torch.rand(1)
        return super().updates(tasks, seeds)


class GlobalNumpy(Reference):
    def measure(self, at, part):
        np.random.rand()  # noqa: NPY002 -- the state that an engine must not change
        return super().measure(at, part)


class Writing(Reference):
    def losses(self, trials):
        self._clients["c5"].train.x[0] += 1
        return super().losses(trials)


class Guessing(Reference):
    """Returns losses also for clients that lack the examples."""

    def losses(self, trials):
        return {i: (1.0,) * len(own) for i, own in trials.items()} | super().losses(trials)


class Reordering(Reference):
    def losses(self, trials):
        return {i: losses[::-1] for i, losses in super().losses(trials).items()}


class OnlyLoss(Reference):
    def measure(self, at, part):
        return {i: {"loss": own["loss"]} for i, own in super().measure(at, part).items()}


class OnTestExamples(Reference):
    def measure(self, at, part):
        return super().measure(at, "test" if part == "held_out" else part)


class Finite(Reference):
    def updates(self, tasks, seeds):
        replies = super().updates(tasks, seeds)
        return {i: replace(r, vector=np.nan_to_num(r.vector)) for i, r in replies.items()}


class Unnamed(Reference):
    def updates(self, tasks, seeds):
        try:
            return super().updates(tasks, seeds)
        except Exception as error:
            raise ValueError("a client failed") from error


class Stale(Reference):
    """After an error, returns the replies of another call."""

    failed = False

    def updates(self, tasks, seeds):
        if self.failed:
            seeds = {i: seed + 1 for i, seed in seeds.items()}
        try:
            return super().updates(tasks, seeds)
        except Exception:
            self.failed = True
            raise


class ClosedForGood(Reference):
    is_closed = False

    def close(self):
        if self.is_closed:
            raise RuntimeError("already closed")
        self.is_closed = True


@pytest.mark.parametrize(
    ("make_engine", "clause"),
    [
        (Nameless, "name is short and fixed"),
        (OtherSeeds, "the update equals the reference's within its bound"),
        (FixedSeeds, "all randomness follows from the arguments seed and seeds"),
        (WithoutHalves, "which optional parts a reply has.*half difference is False"),
        (OtherHalves, "the update equals the reference's within its bound.*halves 5"),
        (Forgetful, "exactly the clients that have a task"),
        (Renaming, "bases.*base is '0.0'; the reference has '1.0'"),
        (Drifting, "the same call on the same machine returns the same bytes"),
        (Mixing, "does not depend on the other clients of the call"),
        (Global, "the global generators.*torch changed"),
        (GlobalNumpy, "the global generators.*NumPy changed"),
        (Writing, "nothing that an engine was given changes.*train examples of c5"),
        (Guessing, "a client that lacks the examples of any of its trials is left out"),
        (Reordering, "losses and metrics differ by at most"),
        (OnlyLoss, "the loss and every metric of the training"),
        (OnTestExamples, "measure leaves out clients without such examples"),
        (Finite, "results that are not finite are returned"),
        (Unnamed, "raises ClientFailed.*ValueError: a client failed"),
        (Stale, "not even on one that failed"),
        (ClosedForGood, r"close\(\), a second time returns.*already closed"),
    ],
)
def test_a_broken_engine_is_caught(make_engine, clause):
    with pytest.raises(AssertionError, match=f"(?s){make_engine.__name__}.*clause: .*{clause}"):
        check_engine(make_engine, without=ONLY_MLP)


def test_an_error_of_the_constructor_is_the_cause_of_the_message():
    def make_engine(*args, **more):
        raise OSError("no such device")

    with pytest.raises(AssertionError, match="OSError: no such device") as raised:
        check_engine(make_engine)

    assert isinstance(raised.value.__cause__, OSError)


def test_problems_that_do_not_exist_are_named():
    with pytest.raises(ValueError, match=r"without names \['cnn'\]; the problems are \['mlp'"):
        check_engine(Reference, without=["cnn"])


@pytest.mark.parametrize(("kind", "problem"), [("signal", "signal"), ("buffers", "buffers")])
def test_signals_and_buffers_are_compared(kind, problem):
    class Off(Reference):
        def updates(self, tasks, seeds):
            name = {"signal": "signal", "buffers": "buffers"}[kind]
            replies = super().updates(tasks, seeds)
            return {i: replace(r, **{name: getattr(r, name) + 0.01}) for i, r in replies.items()}

    others = [name for name in ["mlp", *ONLY_MLP] if name != problem]
    with pytest.raises(AssertionError, match=f"the {kind} equals the reference's"):
        check_engine(Off, without=others)
