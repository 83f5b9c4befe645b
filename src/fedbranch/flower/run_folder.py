"""A federation's run folder: the simulator's, and the initial model beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from flwr.app import MetricRecord

from fedbranch.errors import DamagedFile
from fedbranch.flower.arrays import Layout
from fedbranch.runs import RunFolder
from fedbranch.server.options import NOT_IN_OLDER_RUNS
from fedbranch.storage.checkpoint import has_checkpoint, read_checkpoint, write_checkpoint
from fedbranch.types import JSON

__all__ = ["metrics_from_json", "metrics_to_json", "open_run"]

MetricsJSON = Mapping[str, float | list[float | None] | None]


def open_run(path: Path, about: JSON, layout: Layout, *, resume: bool) -> tuple[RunFolder, Layout]:
    """Start a run folder, or go on with one.

    Parameters
    ----------
    path
        The folder.
    about
        The settings that must be the same as before, except the number of rounds.
    layout
        The layout with the initial model given now. A run that goes on keeps the one that it
        began with: a server app that starts again may draw other initial numbers.

    Returns
    -------
    tuple
        The folder, and the layout with the initial model of the run.

    Raises
    ------
    UnusableRun
        If the folder has a run with other settings.
    DamagedFile
        If something that the run needs is missing or was changed.
    """
    folder = RunFolder.open(
        path,
        about,
        resume=resume,
        may_differ={"rounds"},
        may_be_missing=NOT_IN_OLDER_RUNS,
    )
    try:
        return folder, _initial(folder, layout, about)
    except Exception:
        folder.close()
        raise


def _initial(folder: RunFolder, layout: Layout, about: JSON) -> Layout:
    """Read the initial model of a run, or write it if the run begins now."""
    # A crash can come between the first line of the history and the first state.
    if not folder.has_state and (folder.is_complete or len(folder.history()) > 1):
        raise DamagedFile(f"{folder.path / 'state'} is missing, but rounds have been done")
    path = folder.path / "initial"
    if not folder.has_state and not has_checkpoint(path):
        write_checkpoint(path, "initial model", *layout.to_state())
        return layout
    saved = Layout.from_state(*read_checkpoint(path, "initial model"))
    if saved.describe() != about["model"]:
        raise DamagedFile(f"{path} holds another model than the run")
    return saved


def metrics_to_json(metrics: MetricRecord) -> MetricsJSON:
    """Convert metrics to what JSON can express: None for numbers that are not finite."""

    def shown(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        name: [shown(entry) for entry in value] if isinstance(value, list) else shown(value)
        for name, value in metrics.items()
    }


def metrics_from_json(metrics: MetricsJSON) -> MetricRecord:
    """Convert metrics to Flower's: NaN for None."""

    def number(value: float | None) -> float:
        return math.nan if value is None else value

    return MetricRecord(
        {
            name: [number(entry) for entry in value] if isinstance(value, list) else number(value)
            for name, value in metrics.items()
        }
    )
