"""The contract between a simulation and the engine that trains and measures its clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fedbranch.data import PartName
from fedbranch.protocol.tasks import Task, Trial, Update, UpdateBatch
from fedbranch.tree import Node

__all__ = ["Engine"]


class Engine(Protocol):
    """Trains and measures all clients of a simulation.

    :func:`fedbranch.testing.check_engine` checks the contract below.

    An engine is made for one run. Its constructor takes these, as that of
    :class:`fedbranch.sim.engines.reference.Reference` does:

    ===========  ================================================================================
    ``model``    A module to work in. The engine may overwrite its parameters and buffers.
    ``initial``  The initial model θ0, on the device of the run. All parameters and buffers that
                 the server sends are displacements from it.
    ``clients``  Client id -> data. The engine reads the arrays and never writes to them, even
                 if the model writes into its inputs.
    ``training`` How every client trains, and what is measured.
    ``seed``     The seed of the run. A client's halves follow from it and the client's id.
    ===========  ================================================================================

    If an engine cannot work with these, its constructor raises an error that says why.
    A simulation calls one method at a time, from one thread.

    Attributes
    ----------
    name
        Short and fixed. A run folder records it, and a run is resumed with the same engine.

    Notes
    -----
    *Results.* The functions of :mod:`fedbranch.training.client` are the reference. An engine
    returns for every client what they return for this client alone, except for rounding. Our
    engines meet these bounds, for small models in float32 and up to 20 steps:

    ==================  ======================================================================
    update              The distance to the reference's update is at most 3e-5 of its length.
    half difference     The same, relative to the larger of its length and the update's.
    signal              No number differs by more than 1e-5.
    buffers             No number differs by more than 1e-4.
    losses and metrics  Differ by at most 1e-4 of their value.
    all else            Equal: ids, numbers of examples, bases, and which optional parts a
                        reply has.
    ==================  ======================================================================

    *Randomness.* All of it follows from the arguments ``seed`` and ``seeds``: the order of
    examples and dropout are hashes of them (:mod:`fedbranch.training.hashed_random`). So a
    result does not depend on the other clients of the call, on their order, or on earlier
    calls, except for rounding. The same call on the same machine returns the same bytes.
    Torch's and NumPy's global generators are left as they were.

    *Models.* Tasks with the same ``base`` have the same parameters and buffers, and so have
    nodes. Trials have no such name; equal memory addresses mean equal models
    (:func:`fedbranch.sim.engines.model_source.memory_key`). Nothing that a call was given
    changes while it runs.

    *Failures.* If a client's model or data raise an error, the call raises
    :class:`fedbranch.ClientFailed` with the client's id and the shapes and types of its
    examples. Results that are not finite are no failure: they are returned, and the server
    refuses them.
    """

    name: str

    def updates(
        self, tasks: Mapping[str, Task], seeds: Mapping[str, int]
    ) -> UpdateBatch | Mapping[str, Update]:
        """Train every client that has a task.

        Parameters
        ----------
        tasks
            Client id -> task. All ids are clients of this engine.
        seeds
            Client id -> the client's seed in this round, for the same ids.

        Returns
        -------
        UpdateBatch or Mapping
            The replies of exactly these clients, in any order. Each equals what
            :func:`fedbranch.training.client.local_update` returns for the task, the client's
            training examples and its seed, with
            ``halves_seed=fedbranch.training.half_split.halves_seed(seed, client_id)``.

            A client trains on halves if its task has ``halves`` and it has enough examples.
            Otherwise its reply has no half difference. In a batch this is a row of zeros, or
            no matrix at all if no client trained on halves. There are signals exactly if
            ``training.send_gradient``.

            The arrays are NumPy's, or those of any Array API library on any device.
        """
        ...

    def losses(self, trials: Mapping[str, Sequence[Trial]]) -> dict[str, tuple[float, ...]]:
        """Measure clients' losses under models that the server wants to try.

        Parameters
        ----------
        trials
            Client id -> its trials, at least one.

        Returns
        -------
        dict
            Client id -> one loss for each of its trials, in the same order, as
            :func:`fedbranch.training.client.trial_losses` measures them. A client that lacks
            the examples of any of its trials is left out.
        """
        ...

    def measure(self, at: Mapping[str, Node], part: PartName) -> dict[str, dict[str, float]]:
        """Measure clients on a part of their data, each under the model of a node.

        Parameters
        ----------
        at
            Client id -> tree node.
        part
            Which of the client's examples.

        Returns
        -------
        dict
            Client id -> ``"loss"`` and every metric of the training, as
            :func:`fedbranch.training.client.evaluate` measures them. A client without such
            examples is left out.
        """
        ...

    def close(self) -> None:
        """End all processes that the engine started, even in the middle of their work.

        It may be called again, and after an error or an interruption. A closed engine still
        answers: if it needs processes, it starts them again.
        """
        ...
