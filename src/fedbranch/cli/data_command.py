"""The command that fetches, checks and lists data sets."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from fedbranch.cli.arguments import AsJSON, DataDir
from fedbranch.cli.signals import Stopped, stoppable
from fedbranch.data import sources
from fedbranch.report.text.holdings import print_holding, print_holdings

__all__ = ["data"]


def data(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help=f"One of: {', '.join(sources.NAMES)}."),
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJSON = False,
) -> None:
    """Fetch what is missing of a data set and check it; without a name, list all sets."""
    if name is None:
        holdings = [sources.look(known, data_dir) for known in sources.NAMES]
        if as_json:
            print(json.dumps([holding.to_json() for holding in holdings], indent=2))
        else:
            print_holdings(holdings, Console())
        return
    try:
        sources.look(name, data_dir)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from None
    try:
        with stoppable(), _download_progress() as on_progress:
            holding = sources.fetch(name, data_dir, on_progress=on_progress)
    except Stopped as stopped:
        print(
            f"fedbranch: {stopped.how}; complete files were kept, and the same command fetches "
            "the others",
            file=sys.stderr,
        )
        raise typer.Exit(128 + stopped.signal_number) from None
    if as_json:
        print(json.dumps(holding.to_json(), indent=2))
    else:
        print_holding(holding, Console())


@contextmanager
def _download_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for each file that is downloaded: on a terminal only."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def on_progress(file_name: str, num_bytes: int, total: int) -> None:
            if file_name not in tasks:
                tasks[file_name] = progress.add_task(file_name, total=None)
            progress.update(tasks[file_name], completed=num_bytes, total=total or None)

        yield on_progress
