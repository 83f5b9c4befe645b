"""What a cluster has of updates that were added up and not kept.

The sums are exact, so it does not matter in which order, in how many parts and by how many
threads they were made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.exact_sum.total import ExactSum
from fedbranch.core.projection import Projection
from fedbranch.server.guard import Guard
from fedbranch.storage.checkpoint import Tensors
from fedbranch.types import JSON, Vector

__all__ = ["Means", "Part", "Sums", "Whole"]

NAMES = ("vector", "buffers", "signal")
WEIGHT_BITS = 53  # of a float's digits


@dataclass(frozen=True, kw_only=True, eq=False)
class Whole:
    """An update that is not added up yet, because it may count for less than it claims."""

    vector: Vector
    buffers: Vector
    signal: Vector | None = None

    def vectors(self) -> dict[str, Vector]:
        """Give what is there, by name."""
        named = {"vector": self.vector, "buffers": self.buffers}
        return named if self.signal is None else named | {"signal": self.signal}


@dataclass(frozen=True, kw_only=True, eq=False)
class Means:
    """The weighted means of all updates of a cluster; of its signals, if it compares these."""

    vector: Vector
    buffers: Vector
    compared: Vector


class Part:
    """Sums that one thread makes.

    Parameters
    ----------
    num_params, num_buffers, num_signal
        How long the vectors are; no signal is added up if ``num_signal`` is None.
    projection
        Of what is compared.
    """

    def __init__(
        self,
        num_params: int,
        num_buffers: int,
        num_signal: int | None,
        projection: Projection,
    ) -> None:
        self.projection = projection
        of_vector = projection if num_signal is None else None
        self.sums = {
            "vector": ExactSum(num_params, of_vector),
            "buffers": ExactSum(num_buffers),
        }
        if num_signal is not None:
            self.sums["signal"] = ExactSum(num_signal, projection)

    @property
    def compared(self) -> ExactSum:
        """The sum of what is compared, which makes its sketches on the way."""
        return self.sums.get("signal", self.sums["vector"])

    def like(self) -> Part:
        """Give an empty one for the same vectors."""
        num_signal = self.sums["signal"].dim if "signal" in self.sums else None
        return Part(self.sums["vector"].dim, self.sums["buffers"].dim, num_signal, self.projection)

    def add_whole(self, whole: Whole, weight: float) -> None:
        """Add an update that was held back."""
        for name, vector in whole.vectors().items():
            if vector.size:
                self.sums[name].add(vector[None, :], [weight])

    def merge(self, other: Part) -> None:
        """Add what another part holds."""
        for name, theirs in other.sums.items():
            self.sums[name].merge(theirs)


@dataclass
class Sums:
    """All that was added up of one cluster, since its parameters stand still.

    Attributes
    ----------
    part
        The sums.
    weights
        Client id -> what it claims to count for: of all whose update came in, also of those who
        have left since.
    held_back
        Client id -> update that is not in the sums yet.
    """

    part: Part
    weights: dict[str, float] = field(default_factory=dict)
    held_back: dict[str, Whole] = field(default_factory=dict)
    # Exponent of two -> how many weights have it, and their exact sum, in units of their last bit.
    _sizes: dict[int, tuple[int, int]] = field(default_factory=dict, init=False)

    @classmethod
    def merged(cls, all_sums: Iterable[Sums], parts: Iterable[Part]) -> Sums:
        """Put sums of different clients, and parts of them, into one; they stay as they are."""
        there = list(all_sums)
        together = cls(there[0].part.like())
        for sums in there:
            together.part.merge(sums.part)
            together.held_back |= sums.held_back
            for client_id, weight in sums.weights.items():
                together.claim(client_id, weight)
        for part in parts:
            together.part.merge(part)
        return together

    def are_settled(self, weights: Iterable[float], guard: Guard | None) -> bool:
        """Whether updates of these weights surely count for that, whoever else comes."""
        if guard is None or guard.max_share is None:
            return True
        largest: dict[int, float] = {}  # of each size: if it is settled, so are the others
        for weight in weights:
            size = math.frexp(weight)[1]
            largest[size] = max(weight, largest.get(size, 0.0))
        # None is capped if the sum of all, each counted with no more than it, is large enough;
        # and that only grows. Of weights of its own size or more half of it is counted, so that
        # nobody has to look at all of them.
        for size, weight in largest.items():
            half = math.ldexp(0.5, size)
            least = math.fsum(  # whatever came first
                math.ldexp(total, other - WEIGHT_BITS) if other < size else number * half
                for other, (number, total) in self._sizes.items()
            )
            if guard.max_share * least < 1.000001 * weight:  # with room for rounding
                return False
        return True

    def is_settled(self, weight: float, guard: Guard | None) -> bool:
        """Whether one is."""
        return self.are_settled([weight], guard)

    def claim(self, client_id: str, weight: float) -> None:
        """Note that a client's update has come in."""
        self.weights[client_id] = weight
        self._count(weight)

    def _count(self, weight: float) -> None:
        mantissa, size = math.frexp(weight)
        number, total = self._sizes.get(size, (0, 0))
        self._sizes[size] = number + 1, total + int(math.ldexp(mantissa, WEIGHT_BITS))

    def settle(self, weights: Mapping[str, float], guard: Guard | None) -> set[str]:
        """Claim updates that come in together, as far as each then surely counts for its weight.

        Parameters
        ----------
        weights
            Client id -> weight, of updates that will surely be added.

        Returns
        -------
        set
            The clients whose updates were claimed.
        """
        rest, sizes = dict(weights), dict(self._sizes)
        while True:
            for weight in rest.values():
                self._count(weight)
            settled = {i: weight for i, weight in rest.items() if self.is_settled(weight, guard)}
            if len(settled) == len(rest):
                self.weights |= rest
                return set(rest)
            # Who is not settled does not count, and without it others may not be settled either.
            rest, self._sizes = settled, dict(sizes)

    def settled(self, guard: Guard | None) -> list[tuple[Whole, float]]:
        """Take out the updates that need not be held back any longer, with their weights."""
        ids = [i for i in self.held_back if self.is_settled(self.weights[i], guard)]
        return [(self.held_back.pop(i), self.weights[i]) for i in ids]

    def means(self, guard: Guard | None) -> Means:
        """Average everything; nobody gets more than the guard's share of the weight."""
        ids = sorted(self.weights)
        counts = np.array([self.weights[client_id] for client_id in ids])
        counted = counts if guard is None else guard.weights(counts)
        weight_of = dict(zip(ids, counted.tolist(), strict=True))
        part = self.part
        if self.held_back:
            part = part.like()
            part.merge(self.part)
            for client_id, whole in sorted(self.held_back.items()):
                part.add_whole(whole, weight_of[client_id])
        assert all(weight_of[i] == self.weights[i] for i in ids if i not in self.held_back), (
            "an update was added up with a weight that is too large"
        )
        total = float(np.sum(counted))
        means = {
            name: (exact.total() / total).astype(np.float32) for name, exact in part.sums.items()
        }
        return Means(
            vector=means["vector"],
            buffers=means["buffers"],
            compared=means.get("signal", means["vector"]),
        )

    # Files

    def to_state(self) -> tuple[JSON, Tensors]:
        """Describe the sums as JSON and tensors, for a checkpoint."""
        tensors: dict[str, NDArray[Any]] = {}
        for name, exact in self.part.sums.items():
            tensors |= exact.to_tensors(f"sum-{name}-")
        held_back = sorted(self.held_back)
        for number, client_id in enumerate(held_back):
            for name, vector in self.held_back[client_id].vectors().items():
                tensors[f"back-{number}-{name}"] = vector
        state: JSON = {
            "dims": {name: exact.dim for name, exact in self.part.sums.items()},
            "weights": {i: repr(weight) for i, weight in sorted(self.weights.items())},
            "held_back": held_back,
        }
        return state, tensors

    @classmethod
    def from_state(cls, state: JSON, tensors: Tensors, projection: Projection) -> Sums:
        """Rebuild sums from what :meth:`to_state` gave."""
        dims: Mapping[str, int] = state["dims"]
        part = Part(dims["vector"], dims["buffers"], dims.get("signal"), projection)
        for name, exact in part.sums.items():
            part.sums[name] = ExactSum.from_tensors(
                tensors, dims[name], exact.projection, f"sum-{name}-"
            )
        sums = cls(part)
        for client_id, weight in state["weights"].items():
            sums.claim(client_id, float(weight))
        for number, client_id in enumerate(state["held_back"]):
            named = {name: tensors[f"back-{number}-{name}"] for name in NAMES if name in part.sums}
            sums.held_back[client_id] = Whole(**named)
        return sums
