"""A running federation: its server, and which of Flower's nodes are connected as clients."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from flwr.serverapp import Grid

from fedbranch.errors import FederationStalled
from fedbranch.flower.arrays import Layout
from fedbranch.flower.logs import log
from fedbranch.flower.node_ids import Roster, identify
from fedbranch.flower.row_memory import RowMemory
from fedbranch.server.server import Server

__all__ = ["Federation", "Keys"]

SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_LOGS = 0.5, 10.0


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The names under which a message carries the weight, the model and the configuration."""

    weight: str
    arrays: str
    config: str


@dataclass
class Federation:
    """The server of a federation and its connected nodes.

    Attributes
    ----------
    server
        The server that plans and decides; it knows clients, not nodes.
    layout
        The layout of the model's arrays.
    keys
        The names in messages.
    timeout_s
        The time that an exchange may take.
    roster
        The nodes that were connected at the last look.
    memory
        The memory for updates, which is used again in every round.
    """

    server: Server
    layout: Layout
    keys: Keys
    timeout_s: float
    roster: Roster = field(default_factory=Roster)
    memory: RowMemory = field(default_factory=RowMemory)

    def gather(self, grid: Grid, num_needed: int) -> list[str]:
        """Wait for enough nodes, and return the ids of the connected clients, sorted.

        Raises
        ------
        FederationStalled
            If too few nodes connect within the timeout.
        """
        began = last_log = time.monotonic()
        while True:
            self.roster = identify(grid.get_nodes(), self.roster)
            num_there = len(self.roster.node_ids)
            if num_there >= num_needed:
                break
            now = time.monotonic()
            if now - began > self.timeout_s:
                raise FederationStalled(
                    f"{num_there} nodes are connected and {num_needed} are needed; no others "
                    f"connected within {self.timeout_s:g} s. Start more nodes, or ask for fewer "
                    "with min_available_nodes, min_train_nodes and min_evaluate_nodes"
                )
            if now - last_log > SECONDS_BETWEEN_LOGS:
                log.info("\twaiting for nodes: %d of %d are connected", num_there, num_needed)
                last_log = now
            time.sleep(min(SECONDS_BETWEEN_LOOKS, self.timeout_s))
        for client_id, reason in self.roster.refused.items():
            log.warning("\t%s is not asked: %s", client_id, reason)
        return sorted(self.roster.node_ids)

    def wait_for_any(self, grid: Grid, client_ids: Collection[str], limit_s: float) -> list[str]:
        """Wait until one of these clients connects; return those that are connected, sorted.

        After ``limit_s`` seconds the list may be empty.
        """
        until = time.monotonic() + limit_s
        while True:
            self.roster = identify(grid.get_nodes(), self.roster)
            present = sorted(set(client_ids) & self.roster.node_ids.keys())
            if present or time.monotonic() >= until:
                return present
            time.sleep(min(SECONDS_BETWEEN_LOOKS, limit_s))

    def still_there(self, grid: Grid) -> set[int]:
        """Return the ids of nodes that have been connected without a break since the last look.

        A node that was started again does not remember what it was asked before.
        """
        now = identify(grid.get_nodes()).sessions
        return {
            node_id for node_id, since in self.roster.sessions.items() if now.get(node_id) == since
        }
