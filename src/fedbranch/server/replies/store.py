"""What a leaf has of the replies at its present parameters: two stores behind one interface.

:class:`fedbranch.server.replies.kept.Kept` has every update.
:class:`fedbranch.server.replies.summed.Summed` has exact sums of them, and a sketch of each.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedbranch.server.options import ServerOptions
from fedbranch.server.replies.held import HeldReplies
from fedbranch.storage.checkpoint import Tensors
from fedbranch.types import JSON, Array, Vector

__all__ = ["Averages", "LeafStore", "Steps"]


class Steps(NamedTuple):
    """By how much a leaf's parameters and buffers move; None where there are no buffers."""

    params: Vector
    buffers: Vector | None


class Averages(Protocol):
    """The averages over a store's replies.

    Attributes
    ----------
    compared
        Of what is compared, in full.
    whole
        What is compared, in full, a row for each reply; None where that was not kept.
    lengths
        Shape (num_replies,): the length of what is compared of each reply, in full.
    """

    compared: Vector
    whole: Array | None
    lengths: NDArray[np.float64]

    def steps(self) -> Steps:
        """Return the averages of the updates and of the buffers."""
        ...


class LeafStore(Protocol):
    """The replies of a leaf. A change makes a new store; the old one stays as it was."""

    @property
    def replies(self) -> HeldReplies:
        """Client id -> reply, without those that the guard has set aside."""
        ...

    @property
    def can_measure(self) -> bool:
        """True if models can be made for clients to measure how a split would pay.

        Sums cannot be taken apart by groups.
        """
        ...

    def averages(self, options: ServerOptions) -> Averages:
        """Average the replies, of which there is at least one."""
        ...

    def without(self, client_ids: Collection[str]) -> LeafStore:
        """Drop the replies of some clients."""
        ...

    def at_the_end_of(self, this_round: int) -> LeafStore:
        """Hold the replies beyond this round."""
        ...

    def to_state(self, name: str) -> tuple[JSON, dict[str, Tensors]]:
        """Describe the store as JSON, and as files whose names begin with ``name``."""
        ...
