"""Read the content of a run folder at one moment, also while training writes into it."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass

from fedbranch.errors import DamagedFile, UsingPreviousState
from fedbranch.runs import Round, RunFolder
from fedbranch.tree import ParameterTree

__all__ = ["Reading", "SavedTree", "read"]

ATTEMPTS = 5
SECONDS_BETWEEN_ATTEMPTS = 0.05


@dataclass(frozen=True)
class SavedTree:
    """A saved tree, and the number of the round after which it was saved."""

    tree: ParameterTree
    round: int


@dataclass(frozen=True, eq=False)
class Reading:
    """The content of a run folder at one moment.

    Attributes
    ----------
    folder
        The run folder.
    saved
        The tree as saved last; None if nothing was saved.
    history
        All rounds, also those after the saved tree.
    """

    folder: RunFolder
    saved: SavedTree | None
    history: list[Round]


def read(folder: RunFolder, *, pause_s: float = SECONDS_BETWEEN_ATTEMPTS) -> Reading:
    """Read a run folder, and read it again if a file was replaced meanwhile.

    Parameters
    ----------
    folder
        The run folder. A run may be writing into it.
    pause_s
        Seconds between two attempts.

    Raises
    ------
    DamagedFile
        If a file is damaged in every attempt.
    """
    for attempt in range(ATTEMPTS):
        is_last = attempt == ATTEMPTS - 1
        with warnings.catch_warnings():
            if not is_last:
                warnings.simplefilter("error", UsingPreviousState)
            try:
                # The state first: a run that goes on writes the history before the state.
                saved = SavedTree(*folder.saved_tree()) if folder.has_state else None
                return Reading(folder, saved, folder.history())
            except (DamagedFile, UsingPreviousState):
                if is_last:
                    raise
        time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")
