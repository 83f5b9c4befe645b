"""A federation's run folder: the simulator's, and the initial model beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from flwr.app import MetricRecord

from fedbranch.checkpoint import JSON, STATE_FILE, read_checkpoint, write_checkpoint
from fedbranch.errors import UnusableRun
from fedbranch.flower.arrays import Layout
from fedbranch.runs import RunFolder

__all__ = ["metrics_from_json", "metrics_to_json", "open_run"]

MetricsJSON = Mapping[str, float | list[float | None] | None]


def open_run(path: Path, about: JSON, layout: Layout, *, resume: bool) -> tuple[RunFolder, Layout]:
    """Start a run folder, or go on with one.

    Parameters
    ----------
    path
        The folder.
    about
        Everything that the decisions depend on. The number of rounds may grow.
    layout
        Of the initial model given now. A run that goes on keeps the one that it began with:
        a server app that starts again may draw other initial numbers.

    Returns
    -------
    tuple
        The folder and the layout with the initial model that holds.
    """
    folder = RunFolder.open(path, about, resume=resume, may_differ={"rounds"})
    folder.extend(about["rounds"])
    initial_path = folder.path / "initial"
    if not (initial_path / STATE_FILE).exists():
        if folder.has_state:
            raise UnusableRun(f"{path} cannot be resumed: its initial model is missing")
        write_checkpoint(initial_path, "initial model", *layout.to_state())
        return folder, layout
    return folder, Layout.from_state(*read_checkpoint(initial_path, "initial model"))


def metrics_to_json(metrics: MetricRecord) -> MetricsJSON:
    """Give metrics as JSON can say them: None for what is not finite."""

    def shown(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        name: [shown(entry) for entry in value] if isinstance(value, list) else shown(value)
        for name, value in metrics.items()
    }


def metrics_from_json(metrics: MetricsJSON) -> MetricRecord:
    """Give metrics as Flower has them: NaN for None."""

    def number(value: float | None) -> float:
        return math.nan if value is None else value

    return MetricRecord(
        {
            name: [number(entry) for entry in value] if isinstance(value, list) else number(value)
            for name, value in metrics.items()
        }
    )
