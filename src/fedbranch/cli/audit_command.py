"""The command that attacks hidden updates, from a checkout of the project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbranch.cli.arguments import AsJSON
from fedbranch.cli.studies import make_importable
from fedbranch.errors import FedbranchError

__all__ = ["audit"]


def audit(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer clients, in a minute.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Save the results as JSON.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of digits, models and secrets.")] = 0,
    as_json: AsJSON = False,
) -> None:
    """Attack hidden updates as a curious server would, and print what leaks."""
    make_importable("privacy_audit")
    try:
        from studies.privacy_audit import run_command
    except ImportError as error:
        raise FedbranchError(str(error)) from error
    if out is not None and not out.parent.is_dir():  # an error now instead of after minutes
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    run_command(is_quick=quick, out=out, seed=seed, as_json=as_json)
