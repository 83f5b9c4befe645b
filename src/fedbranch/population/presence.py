"""Presence: the round in which each client was seen last, and so which clients are away.

A client is away if it was not seen in the last ten rounds, though it has not left. The driver
names the clients that are present. Each round looks only at the clients that were seen ten rounds
ago, so it costs as much as happened then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedbranch.population.int_column import IntColumn, RowNumbers, distinct_rows
from fedbranch.population.positions import Positions
from fedbranch.storage.checkpoint import Tensors

__all__ = ["ROUNDS_UNTIL_AWAY", "Presence"]

ROUNDS_UNTIL_AWAY = 10
NEVER = 0  # rounds count from 1
LAST_ROUND = 2**31 - 1


class Presence:
    """The round in which each client was seen last, from the first :meth:`mark` on.

    Parameters
    ----------
    positions
        The clients; they are counted as away there.

    Examples
    --------
    >>> positions = Positions()
    >>> positions.place_all(["a", "b"], 0)
    >>> presence = Presence(positions)
    >>> for number in range(1, 12):
    ...     presence.mark(["a"], number)
    >>> positions.is_away("a"), positions.is_away("b")
    (False, True)
    """

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        self._seen: IntColumn | None = None  # no client is away before the first mark
        self._num_marked = 0  # rows from this one on are new since the last mark
        # Round -> the rows that were seen in it, and perhaps again later; only recent rounds.
        self._seen_in: dict[int, list[RowNumbers]] = {}
        self._num_renumberings = positions.registry.num_renumberings

    def mark(self, client_ids: Sequence[str], this_round: int) -> None:
        """Note the clients that are present in a round; clients new since the last mark are, too."""
        positions = self._positions
        if self._seen is None:
            self._seen = positions.registry.add_column(IntColumn(NEVER))
        self.count_out(this_round)
        new = np.concatenate([self._new_rows(), positions.take_returned()])
        new = positions.with_position(new[self._seen.numbers[new] == NEVER])
        rows = distinct_rows(np.concatenate([positions.registry.rows(client_ids), new]))
        rows = rows[self._seen.numbers[rows] != this_round]
        if len(rows):
            self._seen.set_many(rows, this_round)
            self._seen_in.setdefault(this_round, []).append(rows)
            positions.set_away(rows, is_away=False)

    def _new_rows(self) -> RowNumbers:
        first, self._num_marked = self._num_marked, len(self._positions.registry)
        return np.arange(first, self._num_marked, dtype=np.int32)

    def count_out(self, this_round: int) -> None:
        """Count as away the clients that were not seen in this round and the nine before it."""
        if self._seen is None:
            return
        if self._num_renumberings != self._positions.registry.num_renumberings:
            self._sort_all(self._seen, this_round)
        for long_ago in sorted(n for n in self._seen_in if n <= this_round - ROUNDS_UNTIL_AWAY):
            for rows in self._seen_in.pop(long_ago):
                still = rows[self._seen.numbers[rows] == long_ago]
                self._positions.set_away(still, is_away=True)

    def _sort_all(self, seen: IntColumn, this_round: int) -> None:
        """Sort all clients by the round in which they were seen; needed when rows are new."""
        self._num_renumberings = self._positions.registry.num_renumberings
        self._num_marked = 0
        numbers, since = seen.numbers, this_round - ROUNDS_UNTIL_AWAY
        is_away = (numbers != NEVER) & (numbers <= since)
        self._positions.set_away(np.flatnonzero(is_away).astype(np.int32), is_away=True)
        self._seen_in = {
            number: [np.flatnonzero(numbers == number).astype(np.int32)]
            for number in range(max(since, NEVER) + 1, this_round + 1)
        }

    # Files

    def to_state(self) -> tuple[bool, dict[str, Tensors]]:
        """Describe presence for a checkpoint: whether there was any mark, and tensors by file."""
        if self._seen is None:
            return False, {}
        base, sightings = self._seen.to_state()
        files: dict[str, Tensors] = {} if base is None else {"seen": base}
        if sightings:
            files["sightings"] = sightings
        return True, files

    @classmethod
    def from_state(
        cls,
        state: object,
        files: Mapping[str, Tensors],
        positions: Positions,
        this_round: int,
    ) -> Presence:
        """Rebuild presence from what :meth:`to_state` returned.

        Raises
        ------
        ValueError, KeyError, TypeError
            If the parts contradict each other.
        """
        presence = cls(positions)
        if not isinstance(state, bool):
            raise TypeError(f"whether presence was marked is saved as {state!r}")
        if state:
            seen = IntColumn.from_state(NEVER, files.get("seen"), files.get("sightings", {}))
            if type(this_round) is not int or not 0 < this_round <= LAST_ROUND:
                raise ValueError(f"the next round is {this_round!r}")
            numbers = seen.numbers
            if len(seen) != len(positions.registry):
                raise ValueError(f"{len(seen)} clients were seen of {len(positions.registry)}")
            if len(seen) and not NEVER <= numbers.min() <= numbers.max() <= this_round:
                raise ValueError(f"a client was seen last in round {numbers.max()}")
            presence._seen = positions.registry.add_column(seen)
            presence._sort_all(seen, this_round)
        return presence
