"""Updates that were added up and not kept: exact sums, and a sketch of each update.

The sums are exact, so neither the order of the replies, nor the number of threads that added
them, nor how many batches they came in changes a bit.

How much a client counts is known only when all replies are in, because no client gets more than
the guard's share of the total weight. But no more than ⌈1 / max_share⌉ clients can be over it, and
they are the heaviest. So the heaviest few updates are held back whole; all others count for what
they claim and are added at once.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.exact_sum.total import ExactSum
from fedbranch.core.projection import Projection
from fedbranch.server.guard import Guard
from fedbranch.server.options import ServerOptions
from fedbranch.server.replies.held import HeldReplies
from fedbranch.server.replies.reply import stacked
from fedbranch.server.replies.store import Steps
from fedbranch.storage.checkpoint import Tensors
from fedbranch.types import JSON, Array, Vector

__all__ = ["Heaviest", "Held", "Shape", "Summed", "Sums", "WholeUpdate"]


class Shape(NamedTuple):
    """How long the vectors are that are added up, and what makes sketches of them.

    Attributes
    ----------
    num_params, num_buffers, num_signal
        Lengths; ``num_signal`` is None if updates are compared.
    projection
        Of what is compared.
    """

    num_params: int
    num_buffers: int
    num_signal: int | None
    projection: Projection


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeUpdate:
    """An update that is not added up yet, because it may count for less than it claims."""

    update: Vector
    buffers: Vector
    signal: Vector | None = None

    def vectors(self) -> dict[str, Vector]:
        """Return the vectors by the names of their sums."""
        named = {"vector": self.update, "buffers": self.buffers}
        return named if self.signal is None else named | {"signal": self.signal}


class Sums:
    """Exact sums of updates, buffers and signals; for one thread at a time."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        of_update = shape.projection if shape.num_signal is None else None
        self.by_name = {
            "vector": ExactSum(shape.num_params, of_update),
            "buffers": ExactSum(shape.num_buffers),
        }
        if shape.num_signal is not None:
            self.by_name["signal"] = ExactSum(shape.num_signal, shape.projection)

    @property
    def compared(self) -> ExactSum:
        """The sum of what is compared, which makes sketches as it adds."""
        return self.by_name.get("signal", self.by_name["vector"])

    def add(self, whole: WholeUpdate, weight: float) -> None:
        """Add one update."""
        for name, vector in whole.vectors().items():
            if vector.size:
                self.by_name[name].add(vector[None, :], [weight])

    def merge(self, other: Sums) -> None:
        """Add what other sums hold."""
        for name, theirs in other.by_name.items():
            self.by_name[name].merge(theirs)

    @classmethod
    def of_all(cls, shape: Shape, parts: Iterable[Sums]) -> Sums:
        """Add up sums; they stay as they are."""
        together = cls(shape)
        for part in parts:
            together.merge(part)
        return together


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """An update that is held back, with the weight that its client claims."""

    client_id: str
    weight: float
    whole: WholeUpdate

    @cached_property
    def tie_break(self) -> int:
        """Decides between equal weights."""
        return _tie_break(self.client_id)

    def __lt__(self, other: Held) -> bool:
        if self.weight != other.weight:
            return self.weight < other.weight
        return self.tie_break < other.tie_break


def _tie_break(client_id: str) -> int:
    # Which of equal weights is held must not depend on the order of the replies. A digest decides
    # and not the id: replies in the order of their ids would displace each other one by one.
    return zlib.crc32(client_id.encode("utf-8", "surrogatepass"))


class Heaviest:
    """The heaviest updates of a leaf, held back whole.

    Parameters
    ----------
    most
        How many are held back at most.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._heap: list[Held] = []  # the lightest is first

    def __iter__(self) -> Iterator[Held]:
        return iter(self._heap)

    def takes(self, client_id: str, weight: float) -> bool:
        """Return whether an update of this weight would be held back now."""
        if len(self._heap) < self.most:
            return True
        if not self._heap or weight < self._heap[0].weight:
            return False  # nearly always
        lightest = self._heap[0]
        return weight > lightest.weight or _tie_break(client_id) > lightest.tie_break

    def hold(self, held: Held) -> Held | None:
        """Hold an update back, and return the one that need not be held any longer."""
        if len(self._heap) < self.most:
            heapq.heappush(self._heap, held)
            return None
        return heapq.heappushpop(self._heap, held)


@dataclass(frozen=True, kw_only=True, eq=False)
class Summed:
    """See :class:`fedbranch.server.replies.store.LeafStore`.

    Attributes
    ----------
    sums
        Of all updates but the heaviest.
    weights
        Client id -> what it claims to count for: of every update that came in, also of clients
        that have left or were set aside since.
    heaviest
        The updates that are not in the sums.
    """

    replies: HeldReplies
    sums: Sums
    weights: Mapping[str, float]
    heaviest: Collection[Held]
    can_measure: bool = field(default=False, init=False)

    def without(self, client_ids: Collection[str]) -> Summed:
        """Drop the replies of some clients; what was added up of them stays in the sums."""
        return replace(self, replies=self.replies.without(client_ids))

    def at_the_end_of(self, this_round: int) -> Summed:
        """Hold the replies beyond this round."""
        return replace(self, replies=self.replies.at_the_end_of(this_round))

    def averages(self, options: ServerOptions) -> SummedAverages:
        """Average all updates that came in."""
        return SummedAverages(self, options.guard)

    # Files

    def to_state(self, name: str) -> tuple[JSON, dict[str, Tensors]]:
        """Describe the store for a checkpoint."""
        held, files = self.replies.to_state(name)
        tensors: dict[str, NDArray[Any]] = {}
        for of, exact in self.sums.by_name.items():
            tensors |= exact.to_tensors(f"sum-{of}-")
        heaviest = sorted(self.heaviest, key=lambda one: one.client_id)
        for number, one in enumerate(heaviest):
            for of, vector in one.whole.vectors().items():
                tensors[f"back-{number}-{of}"] = vector
        sums: JSON = {
            "dims": {of: exact.dim for of, exact in self.sums.by_name.items()},
            "weights": {i: repr(weight) for i, weight in sorted(self.weights.items())},
            "held_back": [one.client_id for one in heaviest],
        }
        return {"held": held, "sums": sums}, {**files, name: tensors}

    @classmethod
    def from_state(
        cls,
        state: JSON,
        files: Mapping[str, Tensors],
        name: str,
        replies: HeldReplies,
        projection: Projection,
    ) -> Summed:
        """Rebuild a store from what :meth:`to_state` returned."""
        tensors, dims = files.get(name, {}), state["sums"]["dims"]
        shape = Shape(dims["vector"], dims["buffers"], dims.get("signal"), projection)
        sums = Sums(shape)
        for of, exact in sums.by_name.items():
            sums.by_name[of] = ExactSum.from_tensors(
                tensors, dims[of], exact.projection, f"sum-{of}-"
            )
        weights = {i: float(weight) for i, weight in state["sums"]["weights"].items()}
        heaviest = []
        for number, client_id in enumerate(state["sums"]["held_back"]):
            back = {of: tensors[f"back-{number}-{of}"] for of in sums.by_name}
            whole = WholeUpdate(
                update=back["vector"], buffers=back["buffers"], signal=back.get("signal")
            )
            heaviest.append(Held(client_id=client_id, weight=weights[client_id], whole=whole))
        return cls(replies=replies, sums=sums, weights=weights, heaviest=heaviest)


class SummedAverages:
    """See :class:`fedbranch.server.replies.store.Averages`."""

    def __init__(self, summed: Summed, guard: Guard | None) -> None:
        self.whole: Array | None = None
        _, ordered = summed.replies.in_order()
        self.lengths: NDArray[np.float64] = np.array(stacked(ordered, "lengths")[:, 1])
        client_ids = sorted(summed.weights)
        claimed = np.array([summed.weights[client_id] for client_id in client_ids])
        counted = claimed if guard is None else guard.weights(claimed)
        weight_of = dict(zip(client_ids, counted.tolist(), strict=True))
        held = {one.client_id for one in summed.heaviest}
        assert all(weight_of[i] == summed.weights[i] for i in client_ids if i not in held), (
            "an update was added up with a weight that is too large"
        )
        sums = summed.sums
        if held:
            sums = Sums.of_all(sums.shape, [sums])
            for one in summed.heaviest:
                sums.add(one.whole, weight_of[one.client_id])
        total = float(np.sum(counted))
        means: dict[str, Vector] = {
            name: (exact.total() / total).astype(np.float32) for name, exact in sums.by_name.items()
        }
        self.compared: Vector = means.get("signal", means["vector"])
        self._steps = Steps(means["vector"], means["buffers"])

    def steps(self) -> Steps:
        """Return the averages of the updates and of the buffers."""
        return self._steps
