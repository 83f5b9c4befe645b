"""Replies with their updates, kept until the leaf's parameters move."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from fedbranch.core.geometry import norms, to_numpy
from fedbranch.server.averaging import aggregated, locked, weights_of
from fedbranch.server.options import ServerOptions
from fedbranch.server.replies.held import HeldReplies
from fedbranch.server.replies.reply import Reply, stacked
from fedbranch.server.replies.store import Steps
from fedbranch.storage.checkpoint import Tensors
from fedbranch.types import JSON, Array, Vector

__all__ = ["Kept"]


@dataclass(frozen=True, eq=False)
class Kept:
    """See :class:`fedbranch.server.replies.store.LeafStore`."""

    replies: HeldReplies = field(default_factory=HeldReplies)
    can_measure: bool = field(default=True, init=False)

    def plus(self, replies: Mapping[str, Reply]) -> Kept:
        """Take more replies."""
        return Kept(self.replies.plus(replies))

    def without(self, client_ids: Collection[str]) -> Kept:
        """Drop the replies of some clients."""
        return Kept(self.replies.without(client_ids))

    def at_the_end_of(self, this_round: int) -> Kept:
        """Hold the replies beyond this round."""
        return Kept(self.replies.at_the_end_of(this_round))

    def averages(self, options: ServerOptions) -> KeptAverages:
        """Average the replies, of which there is at least one."""
        return KeptAverages(self.replies, options)

    def to_state(self, name: str) -> tuple[JSON, dict[str, Tensors]]:
        """Describe the store for a checkpoint."""
        held, files = self.replies.to_state(name)
        return {"held": held}, files


class KeptAverages:
    """See :class:`fedbranch.server.replies.store.Averages`."""

    def __init__(self, replies: HeldReplies, options: ServerOptions) -> None:
        _, self._ordered = replies.in_order()
        self._options = options
        rows = self._ordered[-1].rows
        self._compares_signal = rows.signal is not None
        whole = locked(stacked(self._ordered, "compared_in_full"))
        self.whole: Array | None = whole
        self._weights = weights_of(self._ordered, options, whole)
        if rows.lengths is None:
            self.lengths = to_numpy(norms(whole))
        else:
            self.lengths = np.array(stacked(self._ordered, "lengths")[:, 1])
        self.compared: Vector = aggregated(whole, self._weights, options, lengths=self.lengths)

    def steps(self) -> Steps:
        """Return the averages of the updates and of the buffers."""
        params = self.compared
        if self._compares_signal:
            params = aggregated(stacked(self._ordered, "update"), self._weights, self._options)
        buffers = stacked(self._ordered, "buffers")
        if not buffers.shape[1]:
            return Steps(params, None)
        return Steps(params, aggregated(buffers, self._weights, self._options, clips=False))
