"""Clients that share a secret: the server has hidden coordinates, the clients plain models.

The engines work with plain models only. Models that the server sends are revealed, each of
them once. Replies are hidden, all rows of a batch at once.
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
from fedbranch.sim.engines.engine import Engine
from fedbranch.sim.engines.model_source import memory_key
from fedbranch.training.model_state import ModelState
from fedbranch.tree import Node
from fedbranch.types import Array, Vector

if TYPE_CHECKING:  # it needs cryptography, an optional dependency
    from fedbranch.privacy import Privacy

__all__ = ["Hiding", "Revealing", "check_is_privacy"]

Source = TypeVar("Source", Task, Trial, Node)


def check_is_privacy(privacy: object) -> None:
    """Refuse an argument ``privacy`` of another type.

    Raises
    ------
    TypeError
        With the type, and what to pass.
    """
    if privacy is None:
        return
    from fedbranch.privacy import Privacy  # here: it needs cryptography, an optional dependency

    if not isinstance(privacy, Privacy):
        raise TypeError(
            f"privacy is a {type(privacy).__name__}; pass Privacy(Secret.new('name of the run')), "
            "both from fedbranch.privacy, or None"
        )


class Hiding:
    """Hides and reveals the numbers of one model, as the members of a federation agreed.

    Parameters
    ----------
    privacy
        What the members agreed on.
    model
        The plain model.

    Attributes
    ----------
    num_params, num_buffers
        Numbers of parameters and buffers of the hidden model, which the server has.
    num_signal
        How many numbers of a reply the server compares; None for all.

    Notes
    -----
    Whole numbers among the buffers may count a client's data, so they are hidden, too. They
    are mixed with each other, but not with the statistics. A counter that grows to thousands
    would take the last digits of the statistics, and a variance near zero might come back
    negative. A rotation rounds the counters, and loading them into the model rounds them to
    whole numbers again; so they stay exact up to about 100,000.

    A single counter has nothing to be mixed with. An example is the number of batches that the
    only BatchNorm has seen. It says no more than the number of examples, which the server is
    told anyway.
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
        """Return the plain model of a hidden one; both are displacements."""
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
        """Hide the reply of one client."""
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
        """Hide the replies of many clients; their arrays keep their library and device."""
        assert not isinstance(batch.vectors, Differences), (
            "no engine returns updates as differences"
        )
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
            # The half difference is one of compared vectors, so it is sketched, too.
            halves = None if halves is None else _mapped(self._sketch.of, halves)
        return vectors, buffers, signals, halves


class Revealing:
    """An engine that takes hidden models, around an engine for plain models.

    Its replies are plain, as clients have them before they send them.
    """

    def __init__(self, engine: Engine, hiding: Hiding) -> None:
        self.name = engine.name
        self._engine = engine
        self._hiding = hiding

    def updates(
        self, tasks: Mapping[str, Task], seeds: Mapping[str, int]
    ) -> UpdateBatch | Mapping[str, Update]:
        """Train every client that has a task."""
        revealed = self._revealed(list(tasks.values()))
        return self._engine.updates({i: revealed[id(task)] for i, task in tasks.items()}, seeds)

    def losses(self, trials: Mapping[str, Sequence[Trial]]) -> dict[str, tuple[float, ...]]:
        """Measure clients' losses under models that the server wants to try."""
        revealed = self._revealed([trial for own in trials.values() for trial in own])
        return self._engine.losses(
            {i: tuple(revealed[id(trial)] for trial in own) for i, own in trials.items()}
        )

    def measure(self, at: Mapping[str, Node], part: PartName) -> dict[str, dict[str, float]]:
        """Measure clients on a part of their data, each under the model of a node."""
        revealed = self._revealed(list(at.values()))
        return self._engine.measure({i: revealed[id(node)] for i, node in at.items()}, part)

    def close(self) -> None:
        """End all processes that the engine started."""
        self._engine.close()

    def _revealed(self, sources: Sequence[Source]) -> dict[int, Source]:
        """Return for each source, by its identity, a copy with the plain model."""
        models: dict[tuple[int, int], tuple[Vector, Vector]] = {}
        found: dict[int, Source] = {}
        for source in sources:
            if id(source) in found:
                continue
            memory = memory_key(source)
            if memory not in models:
                models[memory] = self._hiding.revealed(source.params, source.buffers)
            params, buffers = models[memory]
            found[id(source)] = replace(source, params=params, buffers=buffers)
        return found


def _are_counters(model: nn.Module) -> NDArray[np.bool_]:
    """Return for each number among a model's buffers whether it is a whole number."""
    kinds = [
        np.full(
            buffer.numel() * (2 if buffer.is_complex() else 1),
            not (buffer.is_floating_point() or buffer.is_complex()),
        )
        for buffer in model.buffers()
    ]
    return np.concatenate(kinds) if kinds else np.zeros(0, dtype=bool)


def _mapped(function: Callable[[NDArray[Any]], NDArray[Any]], vectors: Array) -> Array:
    """Apply a function of NumPy arrays to arrays of any library."""
    if not is_array_api_obj(vectors):
        raise TypeError(f"a vector is a {type(vectors).__name__}; only arrays can be hidden")
    with np.errstate(over="ignore", invalid="ignore"):  # the server refuses what is not finite
        mapped = function(to_numpy(vectors))
    there: Array = array_namespace(vectors).asarray(mapped, device=device(vectors))
    return there
