"""The choice of an engine, by a fixed rule, so that the same run takes the same engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from torch import nn

from fedbranch.data import ClientData
from fedbranch.sim.engines.engine import Engine
from fedbranch.sim.engines.reference import Reference
from fedbranch.sim.engines.stacked.engine import StackedEngine
from fedbranch.sim.engines.stacked.requirements import CannotStack
from fedbranch.sim.engines.workers import CannotFork, Workers
from fedbranch.training.local_training import LocalTraining
from fedbranch.training.model_state import ModelState, trainable

__all__ = ["EngineChoice", "EngineName", "preferred", "start_engine"]

EngineName: TypeAlias = Literal["auto", "workers", "vectorised", "reference"]

# On the CPU: batch size times parameters. Above it a client's own products are large enough to
# keep a core busy, and stacking gains nothing.
LARGEST_STACKED_WORK = 5e6


@dataclass(frozen=True)
class EngineChoice:
    """The engine of a run, and the reason for this engine."""

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
    """Make the engine that was asked for, or the fastest one for this model and device.

    An engine that cannot work here is replaced: ``"vectorised"`` by ``"workers"``, these by
    ``"reference"``, which can always work. The reason then says why.

    Parameters
    ----------
    asked
        The engine's name; ``"auto"`` for the choice of :func:`preferred`.
    model, initial, clients, training, seed
        As for every :class:`fedbranch.sim.engines.engine.Engine`.
    num_workers
        Number of processes for ``"workers"``; by default one for each core.

    Raises
    ------
    ValueError
        If there is no such engine, or ``num_workers`` is below 1.
    """
    if asked not in get_args(EngineName):
        raise ValueError(f"engine is {asked!r}; it must be one of {get_args(EngineName)}")
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}; it must be at least 1")
    device = initial.params.device.type
    name, reason = (asked, "as asked") if asked != "auto" else preferred(model, training, device)
    if name == "vectorised":
        try:
            stacked = StackedEngine(model, initial, clients, training, seed=seed)
            return stacked, EngineChoice(name, reason)
        except CannotStack as error:
            reason = f"the clients cannot be trained as one stack: {error}"
            name = "workers"
    if name == "workers":
        try:
            if device != "cpu":
                raise CannotFork(f"workers compute on the CPU, this run on {device}")
            workers = Workers(model, initial, clients, training, num_workers, seed=seed)
            return workers, EngineChoice(name, reason)
        except CannotFork as error:
            reason = f"{reason}; {error}" if reason != "as asked" else str(error)
    reference = Reference(model, initial, clients, training, seed=seed)
    return reference, EngineChoice("reference", reason)


def preferred(model: nn.Module, training: LocalTraining, device: str) -> tuple[str, str]:
    """Choose between one stack of models and workers; docs/performance.md has measurements.

    Returns
    -------
    tuple
        The engine's name and the reason for it.
    """
    if device != "cpu":
        return "vectorised", "on a GPU one stack of all clients is fastest"
    if any(param.ndim > 2 for param in trainable(model)) or _has_recurrence(model):
        return "workers", "on the CPU convolutions and recurrence do not gain from stacking"
    work = training.batch_size * sum(param.numel() for param in trainable(model))
    if work > LARGEST_STACKED_WORK:
        return "workers", f"a step of {work:.1e} products is large enough by itself"
    return "vectorised", f"a step of {work:.1e} products is small: overhead would dominate"


def _has_recurrence(model: nn.Module) -> bool:
    return any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules())
