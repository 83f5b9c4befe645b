"""Which engine trains the clients: a fixed rule, so that the same run takes the same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args

from torch import nn

from fedbranch.data import ClientData, PartName
from fedbranch.protocol.tasks import Task, Trial, Update, UpdateBatch
from fedbranch.sim.engines.reference import Reference
from fedbranch.sim.engines.stacked.engine import Vectorised
from fedbranch.sim.engines.stacked.model import CannotStack
from fedbranch.sim.engines.workers import CannotFork, Workers
from fedbranch.training.local_training import LocalTraining
from fedbranch.training.model_state import ModelState, trainable
from fedbranch.tree import Node

__all__ = ["Engine", "EngineChoice", "EngineName", "start_engine"]

EngineName: TypeAlias = Literal["auto", "workers", "vectorised", "reference"]


class Engine(Protocol):
    """Anything that can do the clients' work."""

    name: str

    def updates(
        self, tasks: Mapping[str, Task], seeds: Mapping[str, int]
    ) -> UpdateBatch | Mapping[str, Update]:
        """Let every client with a task train, with its seed; on halves where it says so."""
        ...

    def losses(self, trials: Mapping[str, Sequence[Trial]]) -> dict[str, tuple[float, ...]]:
        """Measure clients' losses under models that the server wants to try.

        Those who lack the examples of any of their trials are left out.
        """
        ...

    def measure(self, at: Mapping[str, Node], part: PartName) -> dict[str, dict[str, float]]:
        """Measure clients on their data, each under the model of a node.

        Those without such data are left out.
        """
        ...

    def close(self) -> None:
        """End everything that runs beside this process."""
        ...


@dataclass(frozen=True)
class EngineChoice:
    """The engine of a run, and why it is this one."""

    name: str
    reason: str


def start_engine(
    asked: EngineName,
    model: nn.Module,
    initial: ModelState,
    clients: Mapping[str, ClientData],
    training: LocalTraining,
    *,
    seed: int = 0,
    num_workers: int | None = None,
) -> tuple[Engine, EngineChoice]:
    """Make the engine that was asked for, or the best one for this model and device.

    Parameters
    ----------
    asked
        ``"auto"``: by the rule of :func:`preferred`. What cannot do the work is replaced by
        what can, and the reason says why.
    model, initial, clients, training
        The work.
    seed
        That of the run, from which the clients' halves follow.
    num_workers
        For the workers; by default one for each core.
    """
    if asked not in get_args(EngineName):
        raise ValueError(f"engine is {asked!r}; it must be one of {get_args(EngineName)}")
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}; it must be at least 1")
    device = initial.params.device.type
    name, reason = (asked, "as asked") if asked != "auto" else preferred(model, training, device)
    if name == "vectorised":
        try:
            stack = Vectorised(model, initial, clients, training, seed=seed)
            return stack, EngineChoice(name, reason)
        except CannotStack as error:
            reason = f"the clients cannot be trained as one stack: {error}"
            name = "workers"
    if name == "workers":
        try:
            if device != "cpu":
                raise CannotFork(f"workers compute on the CPU, this run on {device}")
            engine = Workers(model, initial, clients, training, num_workers, seed=seed)
            return engine, EngineChoice(name, reason)
        except CannotFork as error:
            reason = f"{reason}; {error}" if reason != "as asked" else str(error)
    reference = Reference(model, initial, clients, training, seed=seed)
    return reference, EngineChoice("reference", reason)


def preferred(model: nn.Module, training: LocalTraining, device: str) -> tuple[str, str]:
    """Choose between one stack of models and workers, by measurements on both.

    See docs/performance.md.
    """
    if device != "cpu":
        return "vectorised", "on a GPU one stack of all clients is fastest"
    if any(param.ndim > 2 for param in trainable(model)) or _has_recurrence(model):
        return "workers", "on the CPU convolutions and recurrence do not gain from stacking"
    work = training.batch_size * sum(param.numel() for param in trainable(model))
    if work > LARGEST_STACKED_WORK:
        return "workers", f"a step of {work:.1e} products is large enough by itself"
    return "vectorised", f"a step of {work:.1e} products is small: overhead would dominate"


LARGEST_STACKED_WORK = 5e6


def _has_recurrence(model: nn.Module) -> bool:
    return any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules())
