"""How often each client has sent numbers that its noise must cover."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from fedbranch.errors import DamagedFile
from fedbranch.storage.atomic import append_line, replace_file, sync
from fedbranch.storage.sealed_json import seal, unseal

__all__ = ["Releases"]


class Releases:
    """Counts releases: an update counts once, an update on halves twice.

    Parameters
    ----------
    path
        A file for the counts, with a sealed line for each round. None keeps them in memory
        only.

    Attributes
    ----------
    by_client
        Client id -> number of its releases so far.
    num_rounds
        Number of rounds that are counted.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.by_client: Counter[str] = Counter()
        self.num_rounds = 0

    def go_on_after(self, num_rounds: int) -> None:
        """Read the counts of the first rounds, and drop all later ones.

        Raises
        ------
        DamagedFile
            If a line of these rounds is missing, was cut or changed, or has impossible counts.
        """
        self.by_client.clear()
        self.num_rounds = num_rounds
        if self.path is None:
            return
        lines = self._raw_lines(self.path)[:num_rounds]
        for number, line in enumerate(lines, start=1):
            try:
                self.by_client.update(_counts_of(line, number))
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise self._damaged(f"line {number} cannot be read", repr(error)) from error
        if len(lines) < num_rounds:
            raise self._damaged("is too short", f"it has {len(lines)} of {num_rounds} rounds")
        replace_file(self.path, b"".join(line + b"\n" for line in lines))

    def add(self, counts: Mapping[str, int]) -> None:
        """Add the releases of the next round, by client id."""
        self.by_client.update(counts)
        self.num_rounds += 1
        if self.path is not None:
            append_line(self.path, seal({"round": self.num_rounds, "releases": dict(counts)}))

    def sync(self) -> None:
        """Wait until all counts so far are on the disk."""
        if self.path is not None and self.path.exists():
            sync(self.path)

    def _raw_lines(self, path: Path) -> list[bytes]:
        """Read all complete lines. A last line without its end was cut by a crash."""
        try:
            return path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._damaged("cannot be read", str(error.strerror)) from error

    def _damaged(self, what: str, why: str) -> DamagedFile:
        return DamagedFile(
            f"{self.path} {what}, so the privacy that the noise gives cannot be computed: {why}"
        )


def _counts_of(line: bytes, number: int) -> dict[str, int]:
    """Read and check one line; raise an error that says what is wrong."""
    document = unseal(line)
    if document["round"] != number:
        raise ValueError(f"it is round {document['round']!r}")
    for client_id, count in document["releases"].items():
        if type(count) is not int or count < 1:
            raise ValueError(f"client {client_id!r} has {count!r} releases in a round")
    counts: dict[str, int] = document["releases"]
    return counts
