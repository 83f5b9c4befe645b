"""How often every client has sent something that its noise must cover."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from fedbranch.checkpoint import replace_file
from fedbranch.errors import DamagedFile

__all__ = ["Releases"]


class Releases:
    """Counts what clients send, as their noise does: an update once, one on halves twice.

    Parameters
    ----------
    path
        Where to keep the counts, a line for each round; None to keep them in memory only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.by_client: Counter[str] = Counter()

    def go_on_after(self, num_rounds: int) -> None:
        """Read the counts of the first rounds and forget those of all others."""
        self.by_client.clear()
        if self.path is None:
            return
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        try:
            if len(lines) < num_rounds:
                raise ValueError(f"it has {len(lines)} of {num_rounds} rounds")
            for line in lines[:num_rounds]:
                self.by_client.update({i: _checked(i, n) for i, n in json.loads(line).items()})
        except (ValueError, AttributeError, TypeError) as error:
            raise DamagedFile(
                f"{self.path} cannot be read, so that nobody knows what the noise is worth: {error}"
            ) from error
        replace_file(self.path, b"".join(line + b"\n" for line in lines[:num_rounds]))

    def add(self, counts: Mapping[str, int]) -> None:
        """Add what was sent in a round, by client id."""
        self.by_client.update(counts)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(counts, sort_keys=True) + "\n")


def _checked(client_id: str, count: object) -> int:
    if type(count) is not int or count < 1:
        raise ValueError(f"client {client_id!r} has {count!r} releases in a round")
    return count
