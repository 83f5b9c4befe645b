"""The command line: parse, call, print. Results go to stdout, progress to stderr."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TextIO, cast, get_args

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

import fedbranch
from fedbranch.cli.experiment import Experiment, preset_names
from fedbranch.cli.signals import Stopped, stoppable
from fedbranch.cli.studies import make_importable
from fedbranch.data import sources
from fedbranch.errors import CannotWrite, FedbranchError, InvalidExperiment, UsingPreviousState
from fedbranch.report.facts.facts import read_facts
from fedbranch.report.figures import FORMATS, What, save_figure
from fedbranch.report.page.page import write_page
from fedbranch.report.text.comparison import compare
from fedbranch.report.text.holdings import print_holding, print_holdings
from fedbranch.report.text.terminal import print_comparison
from fedbranch.report.text.why import print_why
from fedbranch.runs import Round, RunFolder, next_free_folder

__all__ = ["main"]

app = typer.Typer(
    help="Clustered federated learning: one model that branches where the clients' data disagree.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Folder of the run.", show_default="the next free runs/NAME-1, NAME-2, ..."
    ),
]
Seed = Annotated[int | None, typer.Option(help="Instead of the experiment's seed.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="Folder that has a folder for each data set.",
        show_default="$FEDBRANCH_DATA, or fedbranch in your cache folder",
    ),
]
REPORT_FILE = "report.html"

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
RunPaths = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are compared.")
]


def main() -> None:
    """Run the command line; expected errors are one line and an exit code."""
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
    """Show our own warnings as errors are shown, without the place in the code."""
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
    """Say the version, where asked."""
    if version:
        print(fedbranch.__version__)
        raise typer.Exit


@app.command()
def demo(out: Out = None, seed: Seed = None, as_json: AsJSON = False) -> None:
    """Watch 20 clients with four kinds of swapped labels branch into four clusters."""
    _run_experiment(Experiment.preset("demo"), "demo", out, seed, None, as_json)


@app.command()
def run(
    experiment: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|PRESET", help=f"A TOML file, or one of: {', '.join(preset_names())}."
        ),
    ],
    out: Out = None,
    seed: Seed = None,
    data_dir: DataDir = None,
    as_json: AsJSON = False,
) -> None:
    """Run an experiment."""
    path = Path(experiment)
    is_file = path.suffix == ".toml" or path.exists()
    loaded = Experiment.load(path) if is_file else Experiment.preset(experiment)
    _run_experiment(loaded, path.stem, out, seed, data_dir, as_json)


@app.command()
def resume(run_path: RunPath, data_dir: DataDir = None, as_json: AsJSON = False) -> None:
    """Go on with an interrupted run, to the same result to the bit."""
    folder = RunFolder(run_path)
    about = folder.about.get("about")
    if not isinstance(about, dict) or "experiment" not in about:
        how = (
            folder.how_to_go_on
            if folder.about.get("driver") == "flower"
            else "resume it from Python with simulate(..., folder=..., resume=True)"
        )
        raise InvalidExperiment(f"{run_path} was not made by `fedbranch run`; {how}")
    experiment = Experiment.from_json(about["experiment"])
    _finish(experiment, run_path, data_dir, as_json, resume=True)


@app.command()
def show(
    run_path: RunPath,
    as_json: AsJSON = False,
    why: Annotated[
        bool, typer.Option("--why", help="Print the examinations, with their numbers in words.")
    ] = False,
) -> None:
    """Print a run's tree, its table beside the baselines and the reason for every split."""
    folder = RunFolder(run_path)
    if not why:
        _print(folder, as_json)
        return
    examinations = compare(folder).examinations
    if as_json:
        print(json.dumps([asdict(decision) for decision in examinations], indent=2))
    else:
        print_why(examinations, Console())


@app.command()
def report(
    run_paths: RunPaths,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="The page.",
            show_default="report.html in the first run's folder",
        ),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="DIR", help="Write TensorBoard's event files too."),
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


@app.command()
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


@app.command()
def watch(
    run_path: RunPath,
    port: Annotated[int, typer.Option(help="On 127.0.0.1; 0 for any.", min=0, max=65535)] = 8000,
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


@app.command()
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


@app.command()
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


def _run_experiment(
    experiment: Experiment,
    name: str,
    out: Path | None,
    seed: int | None,
    data_dir: Path | None,
    as_json: bool,
) -> None:
    if seed is not None:
        experiment = experiment.with_seed(seed)
    folder = out if out is not None else next_free_folder("runs", name)
    _finish(experiment, folder, data_dir, as_json, resume=False)


def _finish(
    experiment: Experiment, folder: Path, data_dir: Path | None, as_json: bool, *, resume: bool
) -> None:
    try:
        with stoppable() as stop_if_asked:
            with _progress(experiment, stop_if_asked) as on_round:
                run_folder = experiment.run(
                    folder, data_dir=data_dir, resume=resume, on_round=on_round
                )
            about = run_folder.about
            print(
                f"fedbranch: engine {about['engine']} ({about['engine_reason']}); {_peak_memory()}",
                file=sys.stderr,
            )
            try:
                write_page(read_facts([run_folder]), run_folder.path / REPORT_FILE)
            except CannotWrite as error:  # the run is complete all the same
                print(f"fedbranch: warning: there is no report: {error}", file=sys.stderr)
            _print(run_folder, as_json)
    except Stopped as stopped:
        has_begun = (folder / "run.json").exists()
        where = "" if data_dir is None else f" --data-dir {data_dir}"
        again = f"continue with: fedbranch resume {folder}{where}"
        hint = again if has_begun else "nothing was run yet"
        print(f"fedbranch: {stopped.how}; {hint}", file=sys.stderr)
        raise typer.Exit(128 + stopped.signal_number) from None


def _print(run_folder: RunFolder, as_json: bool) -> None:
    comparison = compare(run_folder)
    page = run_folder.path / REPORT_FILE
    if as_json:
        told = {"report": str(page) if page.is_file() else None}
        print(json.dumps({**comparison.to_json(), **told}, indent=2))
        return
    print_comparison(comparison, Console())
    if page.is_file():
        print(f"Report: {page}")


def _peak_memory() -> str:
    """Say how much memory this process, its largest worker and the GPU have taken at most."""
    if sys.platform == "win32":
        return "peak memory unknown"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    own, worker = (
        resource.getrusage(who).ru_maxrss * unit / 2**20
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    if sys.platform == "linux":
        # There the number above begins with what the process that started us had taken.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        own = int(status.split("VmHWM:")[1].split()[0]) / 2**10
    parts = [f"peak memory {own:,.0f} MiB"]
    if worker:
        parts.append(f"{worker:,.0f} MiB in the largest worker")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        parts.append(f"{torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB on the GPU")
    return ", ".join(parts)


@contextmanager
def _progress(
    experiment: Experiment, after_round: Callable[[], None]
) -> Iterator[Callable[[str, Round], None]]:
    """Show a bar on a terminal, nothing elsewhere; do something else after every round."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description:>8}"),
        BarColumn(),
        TextColumn("round {task.completed}/{task.total}"),
        TextColumn("{task.fields[news]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        tasks = {
            method: progress.add_task(method, total=experiment.rounds, start=False, news="")
            for method in experiment.methods
        }

        last_ends: dict[str, float] = {}

        def on_round(method: str, entry: Round) -> None:
            task = tasks[method]
            if entry.record.round == 1:
                progress.start_task(task)
            num_clusters = len(entry.record.cluster_sizes)
            news = f"{num_clusters} cluster{'s' if num_clusters != 1 else ''}"
            now = time.perf_counter()
            if method in last_ends and entry.num_visits is not None:
                rate = entry.num_visits / max(now - last_ends[method], 1e-9)
                news += f", {rate:,.0f} samples/s"
            last_ends[method] = now
            progress.update(task, completed=entry.record.round, news=news)
            after_round()

        yield on_round
