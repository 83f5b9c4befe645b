"""The command line: parse, call, print. Results go to stdout, progress to stderr."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, TextIO

import typer

import fedbranch
from fedbranch.cli.audit_command import audit
from fedbranch.cli.data_command import data
from fedbranch.cli.report_commands import plot, report, show, watch
from fedbranch.cli.run_commands import demo, resume, run
from fedbranch.errors import FedbranchError, InvalidExperiment, UsingPreviousState

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


for command in (demo, run, resume, show, report, plot, watch, data, audit):
    app.command()(command)
