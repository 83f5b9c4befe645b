"""A run folder's content, read at one moment, also while somebody writes into it."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass

from fedbranch.errors import DamagedFile, UsingPreviousState
from fedbranch.report.facts.events import natural_order
from fedbranch.report.facts.growth import Saved
from fedbranch.runs import Round, RunFolder

__all__ = ["Reading", "all_client_ids", "read"]

ATTEMPTS = 5
SECONDS_BETWEEN_ATTEMPTS = 0.05


@dataclass(frozen=True, eq=False)
class Reading:
    """A run folder's content, read at one moment."""

    folder: RunFolder
    saved: Saved | None
    history: list[Round]


def read(folder: RunFolder) -> Reading:
    """Read a folder that somebody may be writing to: what is replaced meanwhile is read again."""
    for attempt in range(ATTEMPTS):
        is_last = attempt == ATTEMPTS - 1
        with warnings.catch_warnings():
            if not is_last:
                warnings.simplefilter("error", UsingPreviousState)
            try:
                # The state first: a run that goes on writes the history before the state.
                saved = Saved(*folder.saved_tree()) if folder.has_state else None
                return Reading(folder, saved, folder.history())
            except (DamagedFile, UsingPreviousState):
                if is_last:
                    raise
        time.sleep(SECONDS_BETWEEN_ATTEMPTS)
    raise AssertionError("the last attempt returns or raises")


def all_client_ids(reading: Reading) -> list[str]:
    """Give all clients that there ever were: as the run names them, then by name."""
    described = [str(client["id"]) for client in reading.folder.about["clients"]]
    met: set[str] = set(reading.folder.names)
    if reading.saved is not None:
        met.update(reading.saved.tree.client_ids)
    for entry in reading.history:
        met.update(entry.record.joined, entry.record.metrics, entry.evaluation)
        for decision in entry.record.splits:
            met.update(*decision.groups)
    return described + sorted(met.difference(described), key=natural_order)
