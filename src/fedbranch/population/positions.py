"""Positions: the node at which each client stands, and the number of clients at each node.

Questions about all clients, and moves of many, work on arrays. A question about one client costs
the same however many are known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedbranch.population.int_column import IntColumn, RowNumbers, distinct_rows
from fedbranch.population.registry import Registry
from fedbranch.storage.checkpoint import Tensors
from fedbranch.types import JSON

__all__ = ["LARGEST_NODE_ID", "Positions"]

NOWHERE = -1  # the position of a client that has left
# Rows are numbered anew when more clients than this have left, or than this share of all rows.
MOST_LEFT = 4096
ROWS_PER_LEFT = 2
LARGEST_NODE_ID = 2**31 - 1


class Positions:
    """Clients and the nodes at which they stand.

    A client may also count as away, which does not change its position. A client that has left
    has no position.

    Examples
    --------
    >>> positions = Positions()
    >>> positions.place_all(["a", "b", "c"], 0)
    >>> positions.place("b", 7)
    >>> positions.of("b"), positions.num_members(0), positions.members([0])
    (7, 2, ['a', 'c'])
    """

    def __init__(self) -> None:
        self._start_with(Registry(), IntColumn(NOWHERE))

    def _start_with(self, registry: Registry, nodes: IntColumn) -> None:
        self.registry = registry
        self._nodes = registry.add_column(nodes)
        counts = dict(_counted(nodes.numbers))
        self._num_left = counts.pop(NOWHERE, 0)
        self._num_members = counts
        self._num_away: dict[int, int] = {}
        self._is_away = np.zeros(len(registry), dtype=bool)  # of the first rows; others are not
        self._returned: set[int] = set()  # rows of clients that had left and are here again

    def __len__(self) -> int:
        return len(self.registry) - self._num_left

    def __contains__(self, client_id: str) -> bool:
        return self.of(client_id) is not None

    def of(self, client_id: str) -> int | None:
        """Return the node at which a client stands; None if it has no position."""
        row = self.registry.row(client_id)
        if row < 0:
            return None
        node_id = int(self._nodes.numbers[row])
        return None if node_id == NOWHERE else node_id

    def of_all(self, client_ids: Sequence[str]) -> list[int | None]:
        """Return the node of each client; None for clients without a position."""
        rows = self.registry.rows(client_ids)
        at = np.where(rows < 0, np.int32(NOWHERE), self._at(rows)).tolist()
        return [None if node_id == NOWHERE else node_id for node_id in at]

    def missing(self, client_ids: Sequence[str]) -> list[str]:
        """List those of the clients that have no position."""
        rows = self.registry.rows(client_ids)
        is_missing = (rows < 0) | (self._at(rows) == NOWHERE)
        return [client_ids[place] for place in np.flatnonzero(is_missing).tolist()]

    def members(self, node_ids: Collection[int], *, away: bool = True) -> list[str]:
        """List the clients that stand at exactly these nodes, sorted.

        Clients that are away are left out if ``away`` is false.
        """
        if not any(self._num_members.get(node_id) for node_id in node_ids):
            return []
        rows = self._rows_at(node_ids)
        if not away:
            rows = rows[~self._are_away(rows)]
        return sorted(self.registry.ids(rows))

    def among(
        self, client_ids: Sequence[str], node_ids: Iterable[int], *, away: bool = True
    ) -> dict[int, list[str]]:
        """List, for each of these nodes, those of some clients that stand at exactly it, sorted.

        Clients that are away are left out if ``away`` is false.
        """
        rows = self.registry.rows(client_ids)
        numbers = np.where(rows < 0, np.int32(NOWHERE), self._at(rows))
        if not away:
            numbers[self._are_away(rows)] = NOWHERE
        return {
            node_id: sorted(
                client_ids[place] for place in np.flatnonzero(numbers == node_id).tolist()
            )
            for node_id in node_ids
        }

    @property
    def client_ids(self) -> list[str]:
        """All clients with a position, sorted."""
        return sorted(self.registry.ids(np.flatnonzero(self._nodes.numbers != NOWHERE)))

    def num_members(self, node_id: int) -> int:
        """Count the clients that stand at exactly this node."""
        return self._num_members.get(node_id, 0)

    def _at(self, rows: RowNumbers) -> NDArray[np.int32]:
        """Return the nodes of rows; for row -1, which stands for no client, any number."""
        return self._nodes.numbers[rows] if len(self.registry) else np.full_like(rows, NOWHERE)

    def _rows_at(self, node_ids: Collection[int]) -> RowNumbers:
        numbers = self._nodes.numbers
        if len(node_ids) == 1:
            (node_id,) = node_ids
            return np.flatnonzero(numbers == node_id).astype(np.int32)
        return np.flatnonzero(np.isin(numbers, list(node_ids))).astype(np.int32)

    # Changes

    def place(self, client_id: str, node_id: int) -> None:
        """Put a client at a node, from wherever it was."""
        row = self.registry.row(client_id)
        if row < 0:
            (row,) = self.registry.add([client_id]).tolist()
            before = NOWHERE
        else:
            before = int(self._nodes.numbers[row])
            if before == node_id:
                return
            if before == NOWHERE:
                self._num_left -= 1
                self._returned.add(row)
        if before != NOWHERE:
            _add(self._num_members, before, -1)
            if row < len(self._is_away) and self._is_away[row]:
                _add(self._num_away, before, -1)
                _add(self._num_away, node_id, 1)
        _add(self._num_members, node_id, 1)
        self._nodes.set(row, node_id)

    def place_all(self, client_ids: Sequence[str], node_id: int) -> None:
        """Put clients, each named once, at a node, from wherever they were."""
        rows = self.registry.rows(client_ids)
        new = [client_ids[place] for place in np.flatnonzero(rows < 0).tolist()]
        rows = rows[rows >= 0]
        self._returned.update(rows[self._at(rows) == NOWHERE].tolist())
        if new:
            rows = np.concatenate([rows, self.registry.add(new)])
            self._num_left += len(new)
        self._move(rows, node_id)

    def move_all(self, from_nodes: Collection[int], node_id: int) -> None:
        """Put all clients that stand at some nodes at another one."""
        if any(self._num_members.get(one) for one in from_nodes):
            self._move(self._rows_at(from_nodes), node_id)

    def remove(self, client_ids: Sequence[str]) -> None:
        """Forget clients; those without a position are ignored."""
        rows = self.registry.rows(client_ids)
        rows = rows[rows >= 0]
        rows = rows[self._at(rows) != NOWHERE]
        if not len(rows):
            return
        self.set_away(rows, is_away=False)
        self._move(rows, NOWHERE)
        self.registry.clear_numbers(rows)
        self._returned.difference_update(rows.tolist())
        if self._num_left > max(MOST_LEFT, len(self.registry) // ROWS_PER_LEFT):
            self._drop_rows_of_clients_that_left()

    def _move(self, rows: RowNumbers, node_id: int) -> None:
        for counts, own in [
            (self._num_members, rows),
            (self._num_away, rows[self._are_away(rows)]),
        ]:
            for before, count in _counted(self._at(own)):
                if before != NOWHERE:
                    _add(counts, before, -count)
                elif counts is self._num_members:
                    self._num_left -= count
            if node_id != NOWHERE:
                _add(counts, node_id, len(own))
            elif counts is self._num_members:
                self._num_left += len(own)
        self._nodes.set_many(rows, node_id)

    def _drop_rows_of_clients_that_left(self) -> None:
        kept = np.flatnonzero(self._nodes.numbers != NOWHERE).astype(np.int32)
        is_away = self._are_away(kept)
        returned = np.isin(kept, list(self._returned))
        self.registry.drop_all_but(kept)
        self._num_left = 0
        self._is_away = is_away
        self._returned = set(np.flatnonzero(returned).tolist())

    # Clients that are away

    def num_away(self, node_id: int) -> int:
        """Count the clients at exactly this node that are away."""
        return self._num_away.get(node_id, 0)

    def is_away(self, client_id: str) -> bool:
        """Return whether a client is away."""
        row = self.registry.row(client_id)
        return 0 <= row < len(self._is_away) and bool(self._is_away[row])

    def _are_away(self, rows: RowNumbers) -> NDArray[np.bool_]:
        if not len(self._is_away):
            return np.zeros(len(rows), dtype=bool)
        is_away: NDArray[np.bool_] = self._is_away[np.minimum(rows, len(self._is_away) - 1)]
        return is_away & (rows >= 0) & (rows < len(self._is_away))

    def set_away(self, rows: RowNumbers, *, is_away: bool) -> None:
        """Count clients as away, or no longer; clients that have left never are."""
        rows = rows[(self._are_away(rows) != is_away) & (self._at(rows) != NOWHERE)]
        if not len(rows):
            return
        rows = distinct_rows(rows)
        if len(self._is_away) < len(self.registry):
            more = len(self.registry) + len(self.registry) // 8 - len(self._is_away)
            self._is_away = np.concatenate([self._is_away, np.zeros(more, dtype=bool)])
        self._is_away[rows] = is_away
        for node_id, count in _counted(self._at(rows)):
            _add(self._num_away, node_id, count if is_away else -count)

    def take_returned(self) -> RowNumbers:
        """Return the rows of clients that had left and are here again since the last call."""
        rows = np.array(sorted(self._returned), dtype=np.int32)
        self._returned = set()
        return rows

    def with_position(self, rows: RowNumbers) -> RowNumbers:
        """Return the rows without those of clients that have left."""
        here: RowNumbers = rows[self._at(rows) != NOWHERE]
        return here

    # Files

    def to_state(self) -> tuple[JSON, dict[str, Tensors]]:
        """Describe the positions as JSON and tensors, for a checkpoint."""
        state, files, newest = self.registry.to_state()
        base, changes = self._nodes.to_state()
        if base is not None:
            files["positions"] = base
        moves = {**newest, **changes}
        if moves:
            files["moves"] = moves
        return state, files

    @classmethod
    def from_state(
        cls, state: JSON, files: Mapping[str, Tensors], node_ids: Collection[int]
    ) -> Positions:
        """Rebuild positions from what :meth:`to_state` returned.

        Raises
        ------
        ValueError, KeyError, TypeError, AttributeError
            If the parts contradict each other, or a client stands at none of the nodes.
        """
        moves = files.get("moves", {})
        registry = Registry.from_state(state, files, moves)
        nodes = IntColumn.from_state(NOWHERE, files.get("positions"), moves)
        if len(nodes) != len(registry):
            raise ValueError(f"{len(registry)} clients have {len(nodes)} positions")
        positions = cls()
        positions._start_with(registry, nodes)
        missing = sorted(positions._num_members.keys() - set(node_ids))
        if missing:
            raise ValueError(f"clients stand at nodes {missing[:10]}, which are not there")
        return positions


def _counted(node_ids: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Count how often each node is named."""
    found, counts = np.unique(node_ids, return_counts=True)
    return list(zip(found.tolist(), counts.tolist(), strict=True))


def _add(counts: dict[int, int], node_id: int, number: int) -> None:
    total = counts.get(node_id, 0) + number
    if total:
        counts[node_id] = total
    else:
        counts.pop(node_id, None)
