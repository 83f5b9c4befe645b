"""Clients that share a secret: between a server in hidden coordinates and plain models.

The engines know nothing of it. Models that the server sends are revealed, each of them once;
replies are hidden, all rows together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from fedbranch.core.geometry import Array, to_numpy
from fedbranch.data import PartName
from fedbranch.messages import Task, Trial, Update, UpdateBatch
from fedbranch.sim.engines import Engine
from fedbranch.sim.reference import memory_of
from fedbranch.tree import Node, Vector

if TYPE_CHECKING:  # it needs cryptography, which only those who want privacy have
    from fedbranch.privacy import Privacy

__all__ = ["Hiding", "Revealing"]

SomePlace = TypeVar("SomePlace", Task, Trial, Node)


class Hiding:
    """What the members of a federation do to the numbers of one model.

    Parameters
    ----------
    privacy
        What they agreed on.
    num_params, num_buffers
        Of the plain model.

    Attributes
    ----------
    num_params, num_buffers
        Of the hidden model: those of the server.
    num_signal
        How many numbers of a reply the server compares; None if all.
    """

    def __init__(self, privacy: Privacy, *, num_params: int, num_buffers: int) -> None:
        self.num_params, self.num_buffers = num_params, num_buffers
        self.num_signal = privacy.sketch
        self._transform = privacy.transform_of(num_params=num_params, num_buffers=num_buffers)
        if self._transform is not None:
            self.num_params = self._transform.params.num_hidden
            self.num_buffers = self._transform.buffers.num_hidden
        self._sketch = privacy.sketch_of(self.num_params)

    def revealed(self, params: Vector, buffers: Vector) -> tuple[Vector, Vector]:
        """Give the plain model for a hidden one; both are displacements."""
        if self._transform is None:
            return params, buffers
        return self._transform.params.reveal(params), self._transform.buffers.reveal(buffers)

    def hidden_params(self, vectors: Array) -> Array:
        """Hide vectors of parameters: (..., plain length) to (..., num_params)."""
        if self._transform is None:
            return vectors
        return _mapped(self._transform.params.hide, vectors)

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
        if buffers is not None and self._transform is not None:
            buffers = _mapped(self._transform.buffers.hide, buffers)
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


def _mapped(function: Callable[[NDArray[Any]], NDArray[Any]], vectors: Array) -> Array:
    """Apply what is written for NumPy to arrays of any library."""
    with np.errstate(over="ignore", invalid="ignore"):  # the server refuses what is not finite
        mapped = function(to_numpy(vectors))
    there: Array = array_namespace(vectors).asarray(mapped, device=device(vectors))
    return there
