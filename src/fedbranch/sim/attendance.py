"""Which simulated clients take part in a round: they join and leave at given rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from fedbranch.data import ClientData
from fedbranch.server.server import Server

__all__ = ["Attendance"]


class Attendance:
    """Lets clients join and leave a server, each in its round.

    Parameters
    ----------
    clients
        Client id -> data, which says when the client joins and leaves.
    """

    def __init__(self, clients: Mapping[str, ClientData]) -> None:
        self._clients = clients
        self._joining: dict[int, list[str]] = defaultdict(list)  # round -> client ids
        self._leaving: dict[int, list[str]] = defaultdict(list)
        for client_id, client in clients.items():
            self._joining[client.joins].append(client_id)
            if client.leaves is not None:
                self._leaving[client.leaves].append(client_id)
        self._present: list[str] | None = None  # in the round that was asked for last

    def update(self, this_round: int, server: Server, home: Mapping[str, int]) -> list[str]:
        """Let clients leave and join; a client that stays costs nothing.

        Parameters
        ----------
        this_round
            The round that begins. Rounds are asked for in turn.
        server
            Clients join it and are removed from it.
        home
            Client id -> the node at which it joins, if not the root.

        Returns
        -------
        list
            Ids of the clients that are present.
        """
        if self._present is None:  # at the start, or after a resume in the middle of a run
            present = [i for i, client in self._clients.items() if client.takes_part(this_round)]
            gone = sorted(set(server.tree.client_ids) - set(present))
            new = [client_id for client_id in present if client_id not in server.tree]
            self._present = present
        else:
            gone, new = self._leaving.get(this_round, []), self._joining.get(this_round, [])
            if gone or new:
                self._present = sorted(set(self._present) - set(gone) | set(new))
        server.remove(gone)
        newcomers_at: dict[int, list[str]] = defaultdict(list)
        for client_id in new:
            newcomers_at[home.get(client_id, server.tree.root.id)].append(client_id)
        for node_id, newcomers in newcomers_at.items():
            server.join(newcomers, node_id)
        return self._present
