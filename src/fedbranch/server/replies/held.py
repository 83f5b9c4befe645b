"""The replies that a leaf holds at its present parameters, and how checkpoints keep them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbranch.core.geometry import to_numpy
from fedbranch.server.replies.reply import Reply, ReplyRows, stacked
from fedbranch.storage.checkpoint import LastingTensors, Tensors
from fedbranch.types import JSON

__all__ = ["HeldReplies"]


class HeldReplies(Mapping[str, Reply]):
    """Client id -> reply. Adding or dropping some makes a new object.

    Replies that were held when a round ended never change. So a checkpoint writes those of each
    round to a file of their own, once.
    """

    def __init__(
        self,
        replies: Mapping[str, Reply] | None = None,
        since: Mapping[str, int] | None = None,
        written: Mapping[int, tuple[list[str], LastingTensors]] | None = None,
    ) -> None:
        self._replies = dict(replies or {})
        self._since = dict(since or {})  # client id -> the round of its reply, once it is over
        # Round -> clients whose replies of that round are held, and the tensors of these.
        self._written = dict(written or {})

    def __getitem__(self, client_id: str) -> Reply:
        return self._replies[client_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._replies)

    def __len__(self) -> int:
        return len(self._replies)

    def __contains__(self, client_id: object) -> bool:
        return client_id in self._replies

    def plus(self, replies: Mapping[str, Reply]) -> HeldReplies:
        """Return these and more; of two of one client the new one."""
        return HeldReplies({**self._replies, **replies}, self._since, self._written)

    def without(self, client_ids: Collection[str]) -> HeldReplies:
        """Return these without those of some clients."""
        gone = self._replies.keys() & set(client_ids)
        if not gone:
            return self
        return HeldReplies(
            {i: reply for i, reply in self._replies.items() if i not in gone},
            {i: number for i, number in self._since.items() if i not in gone},
            self._written,
        )

    def at_the_end_of(self, this_round: int) -> HeldReplies:
        """Return these, of which the new ones came in this round."""
        since = dict.fromkeys(self._replies, this_round) | self._since
        return HeldReplies(self._replies, since, self._written)

    def in_order(self) -> tuple[tuple[str, ...], list[Reply]]:
        """Return the client ids, sorted, and the replies in that order."""
        client_ids = tuple(sorted(self._replies))
        return client_ids, [self._replies[client_id] for client_id in client_ids]

    # Files

    def to_state(self, name: str) -> tuple[JSON, dict[str, Tensors]]:
        """Describe the replies as JSON, and as files whose names begin with ``name``."""
        self._written = dict(self._by_round())
        state: JSON = {
            str(number): {
                i: {
                    "weight": self[i].weight,
                    "metrics": self[i].metrics,
                    "has_halves": self[i].has_half,
                }
                for i in sorted(client_ids)
            }
            for number, (client_ids, _) in self._written.items()
        }
        files: dict[str, Tensors] = {
            f"{name}-{number}": tensors for number, (_, tensors) in self._written.items()
        }
        return state, files

    def _by_round(self) -> Iterator[tuple[int, tuple[list[str], LastingTensors]]]:
        """Yield the rounds from which replies are held, with their clients and tensors."""
        held: dict[int, list[str]] = {}
        for client_id in sorted(self._replies):
            held.setdefault(self._since[client_id], []).append(client_id)
        for number, client_ids in sorted(held.items()):
            written = self._written.get(number)
            if written is not None and written[0] == client_ids:
                yield number, written
                continue
            replies = [self._replies[client_id] for client_id in client_ids]
            yield number, (client_ids, LastingTensors(partial(_to_tensors, replies)))

    @classmethod
    def from_state(cls, state: JSON, files: Mapping[str, Tensors], name: str) -> HeldReplies:
        """Rebuild replies from what :meth:`to_state` returned.

        Raises
        ------
        ValueError, KeyError, TypeError, AttributeError
            If that cannot be.
        """
        replies: dict[str, Reply] = {}
        since: dict[str, int] = {}
        written: dict[int, tuple[list[str], LastingTensors]] = {}
        for key, of_round in state.items():
            tensors = files[f"{name}-{int(key)}"]
            found = _from_tensors(of_round, tensors)
            if since.keys() & found.keys():
                raise ValueError("a client's reply is held twice")
            replies |= found
            since |= dict.fromkeys(found, int(key))
            same = LastingTensors(partial(dict, tensors), read=tensors)
            written[int(key)] = sorted(found), same
        return cls(replies, since, written)


def _to_tensors(replies: list[Reply]) -> Tensors:
    """Return the numbers of replies, at least one, with a row each in the order given."""
    rows = replies[0].rows  # all replies of a server have the same columns, but for halves
    nothing = np.zeros((len(replies), 0), np.float32)
    tensors: dict[str, NDArray[Any]] = {"vector": nothing, "buffers": nothing}
    if rows.update is not None:
        tensors["vector"] = to_numpy(stacked(replies, "update"))
        tensors["buffers"] = to_numpy(stacked(replies, "buffers"))
    if rows.sketch is not None or rows.signal is not None:
        tensors["compared"] = to_numpy(stacked(replies, "compared"))
    halved = [row for row, reply in enumerate(replies) if reply.has_half]
    if halved:
        some = [replies[row] for row in halved]
        tensors["half_difference"] = np.zeros_like(tensors.get("compared", tensors["vector"]))
        tensors["half_difference"][halved] = to_numpy(stacked(some, "half_compared"))
        if rows.sketch is not None and all(reply.rows.half is not None for reply in some):
            halves = to_numpy(stacked(some, "half"))
            tensors["whole_half_difference"] = np.zeros((len(replies), halves.shape[1]), np.float32)
            tensors["whole_half_difference"][halved] = halves
    if rows.sketch is not None:
        tensors["lengths"] = to_numpy(stacked(replies, "lengths"))
        if rows.signal is not None:
            tensors["signal"] = to_numpy(stacked(replies, "signal"))
    return tensors


def _from_tensors(state: JSON, tensors: Tensors) -> dict[str, Reply]:
    if {len(tensor) for tensor in tensors.values()} != {len(state)}:
        raise ValueError(f"the tensors of {len(state)} replies have other numbers of rows")
    is_kept = bool(tensors["vector"].shape[1])
    rows = ReplyRows(
        update=tensors["vector"] if is_kept else None,
        buffers=tensors["buffers"] if is_kept else None,
    )
    if "lengths" in tensors:
        rows = replace(
            rows,
            sketch=tensors["compared"],
            signal=tensors.get("signal"),
            half=tensors.get("whole_half_difference"),
            half_sketch=tensors.get("half_difference"),
            lengths=tensors["lengths"],
        )
    else:
        rows = replace(rows, signal=tensors.get("compared"), half=tensors.get("half_difference"))
    return {
        client_id: Reply(
            rows=rows,
            row=row,
            weight=entry["weight"],
            metrics=entry["metrics"],
            has_half=entry["has_halves"] and rows.half_compared is not None,
        )
        for row, (client_id, entry) in enumerate(sorted(state.items()))
    }
