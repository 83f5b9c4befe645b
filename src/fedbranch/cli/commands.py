"""The command line: parse, call, print. Results go to stdout, progress to stderr."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

import fedbranch
from fedbranch.cli.arguments import AsJSON, DataDir
from fedbranch.cli.report_commands import plot, report, show, watch
from fedbranch.cli.run_commands import demo, resume, run
from fedbranch.data import sources
from fedbranch.errors import FedbranchError, InvalidExperiment, UsingPreviousState
from fedbranch.report.text.holdings import print_holding, print_holdings

__all__ = ["main"]

app = typer.Typer(
    help="Clustered federated learning: one model that branches where the clients' data disagree.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; an expected error is one line and an exit code."""
    with _warnings_in_one_line():
        try:
            app()
        except InvalidExperiment as error:
            _fail(error, 2)
        except (FedbranchError, OSError) as error:
            _fail(error, 1)


def _fail(error: Exception, code: int) -> None:
    print(f"fedbranch: {error}", file=sys.stderr)
    sys.exit(code)


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print our own warnings in one line, like errors, without the place in the code."""
    with warnings.catch_warnings():
        show_others = warnings.showwarning

        def show_warning(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, UsingPreviousState):
                print(f"fedbranch: warning: {message}", file=sys.stderr)
            else:
                show_others(message, category, filename, lineno, file, line)

        warnings.showwarning = show_warning
        yield


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Print the version if it is asked for."""
    if version:
        print(fedbranch.__version__)
        raise typer.Exit


for command in (demo, run, resume, show, report, plot, watch):
    app.command()(command)


@app.command()
def data(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help=f"One of: {', '.join(sources.NAMES)}."),
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJSON = False,
) -> None:
    """Fetch or check a data set and say where it is; without a name, list what is there."""
    if name is None:
        holdings = [sources.look(known, data_dir) for known in sources.NAMES]
        if as_json:
            print(json.dumps([holding.to_json() for holding in holdings], indent=2))
        else:
            print_holdings(holdings, Console())
        return
    try:
        missing = sources.look(name, data_dir).missing
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from None
    if missing and sys.stderr.isatty():
        print(f"fedbranch: fetching {name}", file=sys.stderr)
    elif missing:  # what fetches it has progress bars of its own
        for library in ("HF_DATASETS", "HF_HUB"):
            os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")
    holding = sources.fetch(name, data_dir)
    if as_json:
        print(json.dumps(holding.to_json(), indent=2))
    else:
        print_holding(holding, Console())


@app.command()
def audit(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer clients, in a minute.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Save the results as JSON.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of digits, models and secrets.")] = 0,
    as_json: AsJSON = False,
) -> None:
    """Attack hidden updates as a curious server would, and say what leaks."""
    try:
        from fedbranch.privacy import audit as audits
    except ImportError as error:
        raise FedbranchError(str(error)) from error
    if out is not None and not out.parent.is_dir():  # said now, not after minutes
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description:<44}"),
        BarColumn(),
        TextColumn("attack {task.completed}/{task.total}"),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=len(audits.ATTACKS))
        begun = iter(range(len(audits.ATTACKS)))
        results = audits.audit(
            seed=seed,
            sizes=audits.Sizes.quick() if quick else None,
            on_attack=lambda attack: progress.update(
                task, completed=next(begun), description=attack.title
            ),
        )
        progress.update(task, completed=len(audits.ATTACKS), description="done")
    if out is not None:
        results.save(out)
    if as_json:
        print(json.dumps(results.to_json(), indent=1))
    else:
        audits.print_results(results, Console())
