"""Messages out, replies in, until all are in or the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from fedbranch.flower.logs import log

__all__ = ["exchange"]

# Between two looks a twentieth of the time waited so far: late by 5 % at most, with few looks.
PATIENCE = 0.05
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
SECONDS_BETWEEN_ROLL_CALLS = 5.0


def exchange(
    grid: Grid,
    messages: Sequence[Message],
    timeout_s: float,
    *,
    still_there: Callable[[], set[int]],
    late: Sequence[Message] = (),
) -> Iterator[Message]:
    """Send messages, and return an iterator over their replies as they come.

    Parameters
    ----------
    grid
        Flower's way to the nodes.
    messages
        The messages to send. Each has its id afterwards.
    timeout_s
        Seconds to wait for the last reply.
    still_there
        Returns the ids of the nodes that can still answer. Others are not waited for.
    late
        Messages sent before. Their replies are not waited for, but passed on if they come.
    """
    _push(grid, messages)
    return _replies(
        grid,
        awaited={m.metadata.message_id: m.metadata.dst_node_id for m in messages},
        welcome={m.metadata.message_id: m.metadata.dst_node_id for m in late},
        still_there=still_there,
        timeout_s=timeout_s,
    )


def _replies(
    grid: Grid,
    *,
    awaited: dict[str, int],  # message id -> node id
    welcome: dict[str, int],
    still_there: Callable[[], set[int]],
    timeout_s: float,
) -> Iterator[Message]:
    began = last_roll_call = time.monotonic()
    puller = _Puller(grid)
    while awaited:
        for reply in puller.pull(awaited.keys() | welcome.keys()):
            message_id = reply.metadata.reply_to_message_id
            for asked in (awaited, welcome):
                # A reply of another node is passed on; that of the right one may still come.
                if asked.get(message_id) == reply.metadata.src_node_id:
                    del asked[message_id]
            yield reply
        now = time.monotonic()
        if now - last_roll_call >= SECONDS_BETWEEN_ROLL_CALLS:
            last_roll_call = now
            there = still_there()
            awaited = {i: node_id for i, node_id in awaited.items() if node_id in there}
        for message_id in puller.broken:
            awaited.pop(message_id, None)
        waited = now - began
        if not awaited or waited >= timeout_s:
            return
        pause = min(max(PATIENCE * waited, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
        time.sleep(min(pause, timeout_s - waited))


def _push(grid: Grid, messages: Sequence[Message]) -> None:
    """Send all at once, or one by one if together they are too large."""
    if messages and not list(grid.push_messages(list(messages))):
        for message in messages:
            list(grid.push_messages([message]))


class _Puller:
    """Fetches replies; one that breaks the grid does not hold up the others."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.broken: set[str] = (
            set()
        )  # ids of messages: their replies cannot be fetched, while others can

    def pull(self, message_ids: Collection[str]) -> list[Message]:
        wanted = set(message_ids) - self.broken
        if not wanted:
            return []
        try:
            return list(self.grid.pull_messages(wanted))
        except Exception as error:
            replies: list[Message] = []
            broken = set()
            for message_id in sorted(wanted):
                try:
                    replies += self.grid.pull_messages([message_id])
                except Exception:
                    broken.add(message_id)
            if broken == wanted:  # then it is the grid, not single replies
                raise
            self.broken |= broken
            log.warning("\t%d replies cannot be fetched: %r", len(broken), error)
            return replies
