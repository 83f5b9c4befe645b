"""Who is away: the clients that were not there for some rounds, though they have not left.

A driver says who is there; clients come to be away as rounds go by. Only those who were seen in
the round that is now too long ago are looked at, so a round costs what happened in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedbranch.population.int_column import Column, Rows, distinct
from fedbranch.population.positions import Positions
from fedbranch.storage.checkpoint import Tensors

__all__ = ["ROUNDS_UNTIL_AWAY", "Presence"]

ROUNDS_UNTIL_AWAY = 10
NEVER = 0  # rounds count from 1
LAST_ROUND = 2**31 - 1


class Presence:
    """In which round every client was seen last, once somebody says who is there.

    Parameters
    ----------
    positions
        The clients. Those that are away are counted there.

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
        self._seen: Column | None = None  # until somebody says who is there, nobody is away
        self._num_told = 0  # of the first rows nobody is new, but those who came back
        # Round -> who was seen in it, and perhaps again later; in rounds that are not long ago.
        self._seen_in: dict[int, list[Rows]] = {}
        self._num_renumbered = positions.known.num_renumbered

    def mark(self, client_ids: Sequence[str], this_round: int) -> None:
        """Say who is there in a round. Clients that are new since the last time were seen now."""
        positions = self._positions
        if self._seen is None:
            self._seen = positions.known.column(NEVER)
        self.count_out(this_round)
        new = np.concatenate([self._new_rows(), positions.take_those_who_came_back()])
        new = positions.those_here(new[self._seen.numbers[new] == NEVER])
        rows = distinct(np.concatenate([positions.known.rows(client_ids), new]))
        rows = rows[self._seen.numbers[rows] != this_round]
        if len(rows):
            self._seen.set_many(rows, this_round)
            self._seen_in.setdefault(this_round, []).append(rows)
            positions.set_away(rows, is_away=False)

    def _new_rows(self) -> Rows:
        first, self._num_told = self._num_told, len(self._positions.known)
        return np.arange(first, self._num_told, dtype=np.int32)

    def count_out(self, this_round: int) -> None:
        """Count as away, from a round on, who was not seen in it and the nine before."""
        if self._seen is None:
            return
        if self._num_renumbered != self._positions.known.num_renumbered:
            self._begin_anew(self._seen, this_round)
        for long_ago in sorted(n for n in self._seen_in if n <= this_round - ROUNDS_UNTIL_AWAY):
            for rows in self._seen_in.pop(long_ago):
                still = rows[self._seen.numbers[rows] == long_ago]
                self._positions.set_away(still, is_away=True)

    def _begin_anew(self, seen: Column, this_round: int) -> None:
        """Sort out all clients, whose rows are others than before."""
        self._num_renumbered = self._positions.known.num_renumbered
        self._num_told = 0
        numbers, since = seen.numbers, this_round - ROUNDS_UNTIL_AWAY
        is_away = (numbers != NEVER) & (numbers <= since)
        self._positions.set_away(np.flatnonzero(is_away).astype(np.int32), is_away=True)
        self._seen_in = {
            number: [np.flatnonzero(numbers == number).astype(np.int32)]
            for number in range(max(since, NEVER) + 1, this_round + 1)
        }

    # Files

    def to_state(self) -> tuple[bool, dict[str, Tensors]]:
        """Say whether anybody said who is there, and give what they said, for a checkpoint."""
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
        """Rebuild it from what :meth:`to_state` gave.

        Raises
        ------
        ValueError, KeyError, TypeError
            If that cannot be.
        """
        presence = cls(positions)
        if not isinstance(state, bool):
            raise TypeError(f"whether anybody said who is there is {state!r}")
        if state:
            seen = Column.from_state(NEVER, files.get("seen"), files.get("sightings", {}))
            if type(this_round) is not int or not 0 < this_round <= LAST_ROUND:
                raise ValueError(f"the next round is {this_round!r}")
            numbers = seen.numbers
            if len(seen) != len(positions.known):
                raise ValueError(f"{len(seen)} clients were seen of {len(positions.known)}")
            if len(seen) and not NEVER <= numbers.min() <= numbers.max() <= this_round:
                raise ValueError(f"a client was seen last in round {numbers.max()}")
            presence._seen = positions.known.column(NEVER, seen)
            presence._begin_anew(seen, this_round)
        return presence
