"""What becomes of replies that passed all checks: two receivers behind one interface.

One keeps updates, with sketches beside them if clusters are found by these. The other adds updates
up as they come, and keeps a sketch of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.exact_sum.raw_updates import Differences
from fedbranch.core.projection import Projection
from fedbranch.protocol.tasks import UpdateBatch
from fedbranch.server.replies.checks import check_claims, is_sane
from fedbranch.server.replies.kept import Kept
from fedbranch.server.replies.reply import Reply, ReplyRows
from fedbranch.server.replies.running_sums import AtLeaf, RunningSums
from fedbranch.server.replies.situation import Situation
from fedbranch.server.replies.stack import (
    block_lengths,
    kept_with_sketches,
    only_sketches,
    stack_for_sums,
    stack_to_keep,
)
from fedbranch.server.replies.store import LeafStore
from fedbranch.server.replies.summed import Shape, Summed

__all__ = ["RawClaims", "Receiver", "SummingReceiver", "receiver_for"]


class Receiver(Protocol):
    """Receives replies, from any number of threads, and makes the stores of the leaves."""

    def receive(
        self, node_id: int, client_ids: Sequence[str], replies: Mapping[str, Reply]
    ) -> tuple[dict[str, Reply], dict[str, str]]:
        """Receive replies of clients at one node.

        Returns
        -------
        tuple
            Client id -> reply as the server has it from now on, and client id -> why its reply
            is too long.
        """
        ...

    def store(
        self, leaf_id: int, before: LeafStore | None, replies: Mapping[str, Reply]
    ) -> LeafStore | None:
        """Return what a leaf has now: what it had before, and these replies of this round."""
        ...


def receiver_for(situation: Situation) -> Receiver:
    """Choose the receiver that the server's options ask for."""
    if situation.options.keep_updates or situation.projection is None:
        return KeepingReceiver(situation.projection)
    return SummingReceiver(situation, situation.projection)


class KeepingReceiver:
    """Keeps updates. See :class:`Receiver`."""

    def __init__(self, projection: Projection | None) -> None:
        self._projection = projection

    def receive(
        self,
        node_id: int,  # noqa: ARG002 -- all nodes are alike here
        client_ids: Sequence[str],
        replies: Mapping[str, Reply],
    ) -> tuple[dict[str, Reply], dict[str, str]]:
        """Receive replies of clients at one node; none is too long here."""
        if self._projection is None:
            return {client_id: replies[client_id] for client_id in client_ids}, {}
        return kept_with_sketches(stack_to_keep(client_ids, replies), self._projection), {}

    def store(
        self,
        leaf_id: int,  # noqa: ARG002 -- all leaves are alike here
        before: LeafStore | None,
        replies: Mapping[str, Reply],
    ) -> LeafStore | None:
        """Return what a leaf has now."""
        if before is None and not replies:
            return None
        return (before if isinstance(before, Kept) else Kept()).plus(replies)


class RawClaims(NamedTuple):
    """Replies whose updates may be added straight from their messages.

    Attributes
    ----------
    leaf_id
        The leaf of all of them.
    of_rows
        Row of the batch -> weight and metrics.
    buffers, lengths_of_buffers
        A row for each reply of the batch.
    """

    leaf_id: int
    of_rows: dict[int, tuple[float, dict[str, float | None]]]
    buffers: NDArray[np.float32]
    lengths_of_buffers: NDArray[np.float64]


class SummingReceiver:
    """Adds updates up. See :class:`Receiver`."""

    def __init__(self, situation: Situation, projection: Projection) -> None:
        self._situation = situation
        self._projection = projection
        expected = situation.expected
        shape = Shape(
            expected.num_params,
            expected.num_buffers,
            expected.num_compared if expected.compares_signal else None,
            projection,
        )
        at_leaves = {
            leaf_id: AtLeaf(
                usual=leaf.memory.usual,
                held=leaf.store if isinstance(leaf.store, Summed) else None,
            )
            for leaf_id, leaf in situation.leaves.items()
        }
        self._sums = RunningSums(shape, situation.options, at_leaves)

    def receive(
        self, node_id: int, client_ids: Sequence[str], replies: Mapping[str, Reply]
    ) -> tuple[dict[str, Reply], dict[str, str]]:
        """Receive replies of clients at one node."""
        stack = stack_for_sums(client_ids, replies)
        if not self._situation.tree[node_id].is_leaf:
            return only_sketches(stack, self._projection), {}
        were_aside = [i in self._situation.set_aside for i in stack.client_ids]
        too_long = self._sums.too_long(node_id, stack, were_aside)
        if too_long:
            others = [i for i in client_ids if i not in too_long]
            if not others:
                return {}, too_long
            stack = stack_for_sums(others, replies)
        return self._sums.add(node_id, stack), too_long

    def store(
        self,
        leaf_id: int,
        before: LeafStore | None,
        replies: Mapping[str, Reply],
    ) -> LeafStore | None:
        """Return what a leaf has now."""
        return self._sums.store(leaf_id, before if isinstance(before, Summed) else None, replies)

    # Updates that are added straight from their messages

    def raw_claims(
        self, batch: UpdateBatch, updates: Differences, found: Sequence[int | None]
    ) -> RawClaims | None:
        """Find the replies of a batch that have nothing unusual; None if it has none such.

        The checks one by one say what is wrong with the others, if anything is.

        Parameters
        ----------
        batch, updates
            The replies, and their updates in their messages.
        found
            The node of each client, if it is known.
        """
        situation, expected = self._situation, self._situation.expected
        if (
            not len(batch)
            or expected.compares_signal
            or batch.half_differences is not None
            or updates.shape[1] != expected.num_params
        ):
            return None
        leaf_id, buffers = found[0], self._plain_buffers(batch)
        if leaf_id is None or buffers is None or not situation.tree[leaf_id].is_leaf:
            return None
        lengths = block_lengths(buffers)
        is_good = is_sane(lengths)
        claims = {}
        for row, (client_id, node_id) in enumerate(zip(batch.client_ids, found, strict=True)):
            if (
                node_id == leaf_id
                and is_good[row]
                and client_id not in batch.refused
                and client_id not in situation.set_aside
            ):
                with suppress(Exception):  # the checks one by one say why
                    situation.check_base(client_id, batch.bases[row], leaf_id)
                    claims[row] = check_claims(
                        batch.num_examples[row], batch.metrics[row], expected.max_examples
                    )
        return RawClaims(leaf_id, claims, buffers, lengths)

    def _plain_buffers(self, batch: UpdateBatch) -> NDArray[np.float32] | None:
        """Return the buffers of a batch, if they have the right shape and type."""
        buffers = batch.buffers
        shape = (len(batch), self._situation.expected.num_buffers)
        if buffers is None and not shape[1]:
            return np.zeros(shape, np.float32)
        if isinstance(buffers, np.ndarray) and buffers.shape == shape:
            return buffers if buffers.dtype == np.float32 else None
        return None

    def likely_held(self, batch: UpdateBatch, claims: RawClaims) -> list[int]:
        """Return the rows that would be held back whole, if all of them could be used."""
        weights = {row: weight for row, (weight, _) in claims.of_rows.items()}
        return self._sums.likely_held(claims.leaf_id, batch.client_ids, weights)

    def receive_raw(
        self,
        batch: UpdateBatch,
        updates: Differences,
        claims: RawClaims,
        rows: Sequence[int],
    ) -> dict[int, Reply]:
        """Add the updates of some rows straight from their messages: row -> reply.

        The rows that are missing in the result have not been added.
        """
        found = self._sums.add_raw(
            claims.leaf_id,
            batch.client_ids,
            updates,
            claims.buffers,
            claims.lengths_of_buffers,
            {row: claims.of_rows[row][0] for row in rows},
        )
        lengths = (found.lengths, found.lengths, claims.lengths_of_buffers)
        columns = ReplyRows(sketch=found.sketches, lengths=np.stack(lengths, axis=1))
        replies = {}
        for row in np.flatnonzero(found.is_added).tolist():
            weight, metrics = claims.of_rows[row]
            replies[row] = Reply(rows=columns, row=row, weight=weight, metrics=metrics)
        return replies
