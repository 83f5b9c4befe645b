"""Clients that share a secret: between a server in hidden coordinates and plain models.

The engines know nothing of it. Models that the server sends are revealed, each of them once;
replies are hidden, all rows together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from array_api_compat import array_namespace, device, is_array_api_obj
from numpy.typing import NDArray
from torch import nn

from fedbranch.core.exact_sum.raw_updates import Differences
from fedbranch.core.geometry import to_numpy
from fedbranch.data import PartName
from fedbranch.protocol.tasks import Task, Trial, Update, UpdateBatch
from fedbranch.sim.engines.choice import Engine
from fedbranch.sim.engines.reference import memory_of
from fedbranch.training.model_state import ModelState
from fedbranch.tree import Node
from fedbranch.types import Array, Vector

if TYPE_CHECKING:  # it needs cryptography, which only those who want privacy have
    from fedbranch.privacy import Privacy

__all__ = ["Hiding", "Revealing", "check_is_privacy"]

SomePlace = TypeVar("SomePlace", Task, Trial, Node)


def check_is_privacy(privacy: object) -> None:
    """Refuse what was given as privacy and is none.

    Raises
    ------
    TypeError
        Saying what to pass.
    """
    if privacy is None:
        return
    from fedbranch.privacy import Privacy  # here, since it needs cryptography

    if not isinstance(privacy, Privacy):
        raise TypeError(
            f"privacy is a {type(privacy).__name__}; pass Privacy(Secret.new('name of the run')), "
            "both from fedbranch.privacy, or None"
        )


class Hiding:
    """What the members of a federation do to the numbers of one model.

    Parameters
    ----------
    privacy
        What they agreed on.
    model
        The plain model.

    Attributes
    ----------
    num_params, num_buffers
        Of the hidden model: those of the server.
    num_signal
        How many numbers of a reply the server compares; None if all.

    Notes
    -----
    Whole numbers among the buffers, which may count a client's data, are hidden too, but apart
    from the statistics: a number that grows to thousands would leave these without their last
    digits, and a variance of nearly zero might come back negative. What a rotation rounds off
    the counters themselves is gone when they are loaded into the model, which rounds them; so
    they stay exact up to about 100,000. A rotation has nothing to mix where there is one
    counter alone: such as the batches that a single BatchNorm has seen, which say no more than
    the number of examples, and that the server is told.
    """

    def __init__(self, privacy: Privacy, model: nn.Module) -> None:
        state = ModelState.of(model)
        self.num_params, self.num_buffers = state.params.numel(), state.buffers.numel()
        self.num_signal = privacy.sketch
        self._is_counter = _are_counters(model)
        num_counters = int(self._is_counter.sum())
        self._transform = privacy.transform_of(
            num_params=self.num_params,
            num_buffers=self.num_buffers - num_counters,
            num_counters=num_counters,
        )
        if self._transform is not None:
            self.num_params = self._transform.params.num_hidden
            self.num_buffers = (
                self._transform.buffers.num_hidden + self._transform.counters.num_hidden
            )
        self._sketch = privacy.sketch_of(self.num_params)

    def revealed(self, params: Vector, buffers: Vector) -> tuple[Vector, Vector]:
        """Give the plain model for a hidden one; both are displacements."""
        transform = self._transform
        if transform is None:
            return params, buffers
        num_hidden = transform.buffers.num_hidden
        plain = np.empty(self._is_counter.shape, buffers.dtype)
        plain[~self._is_counter] = transform.buffers.reveal(buffers[:num_hidden])
        plain[self._is_counter] = transform.counters.reveal(buffers[num_hidden:])
        return transform.params.reveal(params), plain

    def hidden_params(self, vectors: Array) -> Array:
        """Hide vectors of parameters: (..., plain length) to (..., num_params)."""
        if self._transform is None:
            return vectors
        return _mapped(self._transform.params.hide, vectors)

    def _hidden_buffers(self, vectors: Array) -> Array:
        transform = self._transform
        if transform is None:
            return vectors

        def hide(plain: NDArray[Any]) -> NDArray[Any]:
            if plain.shape[-1:] != self._is_counter.shape:
                raise ValueError(
                    f"buffers have shape {plain.shape}; the last axis must be "
                    f"{self._is_counter.size} long"
                )
            statistics = transform.buffers.hide(plain[..., ~self._is_counter])
            counters = transform.counters.hide(plain[..., self._is_counter])
            return np.concatenate([statistics, counters], axis=-1)

        return _mapped(hide, vectors)

    def hidden(self, update: Update) -> Update:
        """Hide what a client sends."""
        vector, buffers, signal, half_difference = self._columns(
            update.vector, update.buffers, update.signal, update.half_difference
        )
        return replace(
            update,
            vector=vector,
            buffers=buffers,
            signal=signal,
            half_difference=half_difference,
        )

    def hidden_batch(self, batch: UpdateBatch) -> UpdateBatch:
        """Hide what many clients send. The numbers stay with their library and device."""
        assert not isinstance(batch.vectors, Differences), "no engine makes such"
        vectors, buffers, signals, half_differences = self._columns(
            batch.vectors, batch.buffers, batch.signals, batch.half_differences
        )
        return replace(
            batch,
            vectors=vectors,
            buffers=buffers,
            signals=signals,
            half_differences=half_differences,
        )

    def _columns(
        self, vectors: Array, buffers: Array | None, signals: Array | None, halves: Array | None
    ) -> tuple[Array, Array | None, Array | None, Array | None]:
        vectors = self.hidden_params(vectors)
        signals = None if signals is None else self.hidden_params(signals)
        halves = None if halves is None else self.hidden_params(halves)
        buffers = None if buffers is None else self._hidden_buffers(buffers)
        if self._sketch is not None:
            signals = _mapped(self._sketch.of, vectors if signals is None else signals)
            # It belongs to what is compared.
            halves = None if halves is None else _mapped(self._sketch.of, halves)
        return vectors, buffers, signals, halves


class Revealing:
    """An engine for hidden models around one for plain models.

    Its replies are still plain: as clients have them before they send them.
    """

    def __init__(self, engine: Engine, hiding: Hiding) -> None:
        self.name = engine.name
        self._engine = engine
        self._hiding = hiding

    def updates(
        self, tasks: Mapping[str, Task], seeds: Mapping[str, int]
    ) -> UpdateBatch | Mapping[str, Update]:
        """Let every client with a task train."""
        revealed = self._revealed(list(tasks.values()))
        return self._engine.updates({i: revealed[id(task)] for i, task in tasks.items()}, seeds)

    def losses(self, trials: Mapping[str, Sequence[Trial]]) -> dict[str, tuple[float, ...]]:
        """Measure clients' losses under models that the server wants to try."""
        revealed = self._revealed([trial for own in trials.values() for trial in own])
        return self._engine.losses(
            {i: tuple(revealed[id(trial)] for trial in own) for i, own in trials.items()}
        )

    def measure(self, at: Mapping[str, Node], part: PartName) -> dict[str, dict[str, float]]:
        """Measure clients on their data, each under the model of a node."""
        revealed = self._revealed(list(at.values()))
        return self._engine.measure({i: revealed[id(node)] for i, node in at.items()}, part)

    def close(self) -> None:
        """End everything that runs beside this process."""
        self._engine.close()

    def _revealed(self, places: Sequence[SomePlace]) -> dict[int, SomePlace]:
        """Give for each place, by its identity, one with a plain model."""
        models: dict[tuple[int, int], tuple[Vector, Vector]] = {}
        found: dict[int, SomePlace] = {}
        for place in places:
            if id(place) in found:
                continue
            memory = memory_of(place)
            if memory not in models:
                models[memory] = self._hiding.revealed(place.params, place.buffers)
            params, buffers = models[memory]
            found[id(place)] = replace(place, params=params, buffers=buffers)
        return found


def _are_counters(model: nn.Module) -> NDArray[np.bool_]:
    """Say of each number among a model's buffers whether it is whole."""
    kinds = [
        np.full(
            buffer.numel() * (2 if buffer.is_complex() else 1),
            not (buffer.is_floating_point() or buffer.is_complex()),
        )
        for buffer in model.buffers()
    ]
    return np.concatenate(kinds) if kinds else np.zeros(0, dtype=bool)


def _mapped(function: Callable[[NDArray[Any]], NDArray[Any]], vectors: Array) -> Array:
    """Apply what is written for NumPy to arrays of any library."""
    if not is_array_api_obj(vectors):
        raise TypeError(f"a vector is a {type(vectors).__name__}; only arrays can be hidden")
    with np.errstate(over="ignore", invalid="ignore"):  # the server refuses what is not finite
        mapped = function(to_numpy(vectors))
    there: Array = array_namespace(vectors).asarray(mapped, device=device(vectors))
    return there
