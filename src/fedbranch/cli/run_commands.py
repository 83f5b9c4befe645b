"""The commands that run experiments: demo, run, resume."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedbranch.cli.arguments import REPORT_FILE, AsJSON, DataDir, Out, RunPath, Seed
from fedbranch.cli.experiment import Experiment, preset_names
from fedbranch.cli.progress import peak_memory, progress
from fedbranch.cli.report_commands import print_facts
from fedbranch.cli.signals import Stopped, stoppable
from fedbranch.errors import CannotWrite, InvalidExperiment
from fedbranch.report.facts.facts import page_facts
from fedbranch.report.facts.run import read_run
from fedbranch.report.page.page import write_page
from fedbranch.runs import RunFolder, next_free_folder

__all__ = ["demo", "resume", "run"]


def demo(out: Out = None, seed: Seed = None, as_json: AsJSON = False) -> None:
    """Watch 20 clients with four kinds of swapped labels branch into four clusters."""
    _run_experiment(Experiment.preset("demo"), "demo", out, seed, None, as_json)


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
    """Run an experiment: a TOML file of your own, or a preset."""
    path = Path(experiment)
    is_file = path.suffix == ".toml" or path.exists()
    loaded = Experiment.load(path) if is_file else Experiment.preset(experiment)
    _run_experiment(loaded, path.stem, out, seed, data_dir, as_json)


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
    """Run an experiment, write its page and print it; if it is stopped, print how to go on."""
    try:
        with stoppable() as stop_if_asked:
            with progress(experiment, stop_if_asked) as on_round:
                run_folder = experiment.run(
                    folder, data_dir=data_dir, resume=resume, on_round=on_round
                )
            about = run_folder.about
            print(
                f"fedbranch: engine {about['engine']} ({about['engine_reason']}); {peak_memory()}",
                file=sys.stderr,
            )
            facts = read_run(run_folder)
            try:
                write_page(page_facts([facts]), run_folder.path / REPORT_FILE)
            except CannotWrite as error:  # the run is complete all the same
                print(f"fedbranch: warning: there is no report: {error}", file=sys.stderr)
            print_facts(facts, as_json)
    except Stopped as stopped:
        has_begun = (folder / "run.json").exists()
        where = "" if data_dir is None else f" --data-dir {data_dir}"
        again = f"continue with: fedbranch resume {folder}{where}"
        hint = again if has_begun else "nothing was run yet"
        print(f"fedbranch: {stopped.how}; {hint}", file=sys.stderr)
        raise typer.Exit(128 + stopped.signal_number) from None
