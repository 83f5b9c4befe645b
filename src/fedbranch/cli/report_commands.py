"""The commands that show runs: show, report, plot, watch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.console import Console

from fedbranch.cli.arguments import REPORT_FILE, AsJSON, RunPath, RunPaths
from fedbranch.report.facts.facts import read_facts
from fedbranch.report.facts.run import RunFacts, read_run
from fedbranch.report.figures import FORMATS, What, save_figure
from fedbranch.report.page.page import write_page
from fedbranch.report.text.run_json import run_json
from fedbranch.report.text.terminal import print_run
from fedbranch.report.text.why import print_why
from fedbranch.runs import RunFolder

__all__ = ["plot", "print_facts", "report", "show", "watch"]


def show(
    run_path: RunPath,
    as_json: AsJSON = False,
    why: Annotated[
        bool, typer.Option("--why", help="Print the examinations, with their numbers in words.")
    ] = False,
) -> None:
    """Print a run's tree, its table beside the baselines and the reason for every split."""
    facts = read_run(RunFolder(run_path))
    if not why:
        print_facts(facts, as_json)
    elif as_json:
        print(json.dumps([asdict(decision) for decision in facts.examinations], indent=2))
    else:
        print_why(facts.examinations, Console())


def report(
    run_paths: RunPaths,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write the page to this file.",
            show_default="report.html in the first run's folder",
        ),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="DIR", help="Also write TensorBoard's event files."),
    ] = None,
) -> None:
    """Make one page of runs that opens offline: tree, training, similarities, clients, reasons."""
    folders = [RunFolder(path) for path in run_paths]
    page = out if out is not None else run_paths[0] / REPORT_FILE
    facts = read_facts(folders)
    events = []
    if tensorboard is not None:
        from fedbranch.report.tensorboard import write_events  # loads PyTorch

        events = write_events(facts, tensorboard)
    write_page(facts, page)
    for path in (page, *events):
        print(path)


def plot(
    run_paths: RunPaths,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Ends with .pdf, .png or .svg.")
    ],
    what: Annotated[
        str, typer.Option("--what", help=f"One of: {', '.join(get_args(What))}.")
    ] = "all",
) -> None:
    """Draw figures for papers: training, tree, similarities, gap and norms."""
    if what not in get_args(What):
        known = ", ".join(get_args(What))
        raise typer.BadParameter(f"{what!r} is not one of {known}", param_hint="--what")
    if out.suffix.removeprefix(".").lower() not in FORMATS:
        raise typer.BadParameter(
            f"{out} does not end with one of {', '.join('.' + known for known in FORMATS)}",
            param_hint="--out",
        )
    facts = read_facts([RunFolder(path) for path in run_paths])
    save_figure(facts, out, cast("What", what))
    print(out)


def watch(
    run_path: RunPath,
    port: Annotated[
        int, typer.Option(help="Port on 127.0.0.1; 0 for any free one.", min=0, max=65535)
    ] = 8000,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Only print the address.")
    ] = False,
) -> None:
    """Serve a run's page on this machine, up to date while the run goes on; Ctrl-C ends it."""
    from fedbranch.report.page import live

    live.watch(
        run_path,
        port=port,
        opens_browser=not no_browser,
        on_ready=lambda address: print(address, flush=True),
    )


def print_facts(facts: RunFacts, as_json: bool) -> None:
    """Print a run, and where its page is."""
    page = facts.folder.path / REPORT_FILE
    if as_json:
        path = {"report": str(page) if page.is_file() else None}
        print(json.dumps({**run_json(facts), **path}, indent=2))
        return
    print_run(facts, Console())
    if page.is_file():
        print(f"Report: {page}")
