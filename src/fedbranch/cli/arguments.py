"""The arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["REPORT_FILE", "AsJSON", "DataDir", "Out", "RunPath", "RunPaths", "Seed"]

REPORT_FILE = "report.html"  # in the run's folder

AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="The folder to make for the run.",
        show_default="the next free runs/NAME-1, NAME-2, ...",
    ),
]
Seed = Annotated[int | None, typer.Option(help="Use this seed, not the experiment's.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="Folder that has a folder for each data set.",
        show_default="$FEDBRANCH_DATA, or fedbranch in your cache folder",
    ),
]

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
RunPaths = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are compared.")
]
