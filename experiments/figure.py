"""What all experiments share: a figure is measured in parts, then drawn and judged.

The parts are independent of each other, and every part is measured for every seed; so they
can be measured in any order, in processes of their own, also on other machines. What was
measured is kept in one JSON file, from which the figure is drawn and the claims are judged.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import multiprocessing
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

__all__ = [
    "COLOURS",
    "JSON",
    "RESULTS",
    "Claim",
    "Experiment",
    "How",
    "Job",
    "Outcome",
    "Outcomes",
    "judged",
    "main",
    "mean_and_spread",
    "measured",
]

JSON: TypeAlias = Any  # what json reads and writes
RESULTS = Path(__file__).parent / "results"
# Okabe and Ito: safe for all eyes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


@dataclass(frozen=True, kw_only=True)
class How:
    """How an experiment is run.

    Attributes
    ----------
    quick
        Small enough for two cores and three minutes.
    data_dir
        Where the data sets are; None: where :mod:`fedbranch.data.sources` looks by itself.
    device
        As for :func:`fedbranch.simulate`.
    """

    quick: bool = False
    data_dir: Path | None = None
    device: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was measured of one part, for one seed, and where."""

    part: str
    seed: int
    minutes: float
    machine: str
    measured: JSON


class Outcomes(list[Outcome]):
    """All that was measured of a figure."""

    def of(self, part: str) -> list[JSON]:
        """Return what was measured of a part, for each seed."""
        return [outcome.measured for outcome in self if outcome.part == part]

    @property
    def parts(self) -> list[str]:
        """The parts that were measured, each once."""
        return list(dict.fromkeys(outcome.part for outcome in self))

    @property
    def seeds(self) -> list[int]:
        """The seeds of any part."""
        return sorted({outcome.seed for outcome in self})

    @property
    def minutes(self) -> dict[str, float]:
        """Machine -> for how long it computed."""
        minutes: dict[str, float] = {}
        for outcome in self:
            machine = outcome.machine.split(",")[0]
            minutes[machine] = minutes.get(machine, 0.0) + outcome.minutes
        return minutes


@dataclass(frozen=True)
class Claim:
    """Something that the figure shows, or fails to."""

    text: str
    holds: bool
    measured: str


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A figure: how it is measured, drawn and judged.

    Attributes
    ----------
    name
        Of its module and its results.
    title
        What it is about, in a line.
    paper
        What the paper reports.
    measure
        Part, seed and how -> numbers, as JSON.
    draw
        What was measured -> the figure.
    claims
        What was measured -> what must hold; the second argument says whether it was quick.
    summary
        What was measured -> what we get, in a line.
    differs
        Where and why that differs from the paper.
    parts, quick_parts
        What is measured independently.
    data
        The data sets it needs, by their names in ``fedbranch data``; and the quick version.
    """

    name: str
    title: str
    paper: str
    measure: Callable[[str, int, How], JSON]
    draw: Callable[[Outcomes], Drawing]
    claims: Callable[[Outcomes, bool], list[Claim]]
    summary: Callable[[Outcomes], str]
    differs: str = ""
    parts: Sequence[str] = ("all",)
    quick_parts: Sequence[str] | None = None
    seeds: Sequence[int] = (0, 1, 2)
    quick_seeds: Sequence[int] = (0,)
    data: Sequence[str] = ()
    quick_data: Sequence[str] | None = None

    def command(self, *, quick: bool = False) -> str:
        """Return the command that runs it."""
        flags = (" --quick" if quick else "") + (" --data-dir DEST" if self.data else "")
        return f"python -m experiments.{self.name}{flags}"

    def jobs(self, how: How) -> list[Job]:
        """List what there is to measure."""
        parts = self.parts if self.quick_parts is None or not how.quick else self.quick_parts
        seeds = self.quick_seeds if how.quick else self.seeds
        return [Job(self.name, part, seed, how) for seed in seeds for part in parts]


@dataclass(frozen=True)
class Job:
    """One part of one experiment, for one seed."""

    experiment: str
    part: str
    seed: int
    how: How

    def measure(self) -> Outcome:
        """Measure it in this process."""
        experiment: Experiment = import_module(f"experiments.{self.experiment}").EXPERIMENT
        began = time.perf_counter()
        measured = experiment.measure(self.part, self.seed, self.how)
        return Outcome(
            part=self.part,
            seed=self.seed,
            minutes=(time.perf_counter() - began) / 60,
            machine=machine(self.how.device),
            measured=_rounded(measured),
        )


def machine(device: str) -> str:
    """Describe the machine: its processor, or its GPU."""
    uses_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    processor = torch.cuda.get_device_name() if uses_gpu else f"{os.cpu_count()} CPU cores"
    return f"{processor}, Python {platform.python_version()}, torch {torch.__version__}"


def measured(jobs: Sequence[Job], num_processes: int = 1) -> Iterator[tuple[Job, Outcome | None]]:
    """Measure all jobs, several at a time, and yield the outcomes as they come.

    Of a job that fails it prints why, and gives None; the others go on.
    """
    if num_processes == 1:
        yield from map(_measured, jobs)
        return
    cores = os.cpu_count() or 1
    threads = int(os.environ.get("OMP_NUM_THREADS", max(1, cores // num_processes)))
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with context.Pool(
        num_processes, initializer=torch.set_num_threads, initargs=(threads,), maxtasksperchild=1
    ) as pool:
        yield from pool.imap_unordered(_measured, jobs)


def _measured(job: Job) -> tuple[Job, Outcome | None]:
    try:
        return job, job.measure()
    except Exception:
        traceback.print_exc()
        return job, None


def judged(experiment: Experiment, outcomes: Outcomes, quick: bool) -> list[Claim]:
    """Judge the claims and print them."""
    claims = experiment.claims(outcomes, quick)
    for claim in claims:
        print(f"  {'holds' if claim.holds else 'FAILS'}: {claim.text} ({claim.measured})")
    return claims


def mean_and_spread(values: Iterable[float], digits: int = 1, scale: float = 1.0) -> str:
    """Write numbers as their mean and standard deviation.

    Examples
    --------
    >>> mean_and_spread([0.61, 0.63, 0.65], scale=100)
    '63.0 ± 2.0'
    """
    scaled = [scale * value for value in values]
    spread = stdev(scaled) if len(scaled) > 1 else 0.0
    return f"{fmean(scaled):.{digits}f} ± {spread:.{digits}f}"


# Files


def read(path: Path) -> Outcomes:
    """Read what was measured."""
    if not path.exists():
        return Outcomes()
    return Outcomes(Outcome(**entry) for entry in json.loads(path.read_text())["outcomes"])


def write(path: Path, experiment: Experiment, outcomes: Outcomes, command: str) -> None:
    """Write what was measured, in the order of parts and seeds."""
    order = [*experiment.parts, *(experiment.quick_parts or ())]
    outcomes.sort(key=lambda o: (order.index(o.part) if o.part in order else -1, o.seed))
    report = {
        "figure": experiment.title,
        "command": command,
        "seeds": outcomes.seeds,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(_one_line_lists(json.dumps(report, indent=1)) + "\n")
    temporary.replace(path)


def _one_line_lists(text: str) -> str:
    """Put lists of numbers on one line each, for people and for `git diff`."""
    lines: list[str] = []
    for line in text.splitlines():
        inside = line.strip()
        if lines and lines[-1].endswith("[") and _is_number(inside):
            lines[-1] += inside
        elif lines and lines[-1].endswith(",") and "[" in lines[-1] and _is_number(inside):
            lines[-1] += f" {inside}"
        elif lines and "[" in lines[-1] and _ends_in_number(lines[-1]) and inside in ("]", "],"):
            lines[-1] += inside
        else:
            lines.append(line)
    return "\n".join(lines)


def _is_number(text: str) -> bool:
    return text.rstrip(",").lower() in ("null", "true", "false", "nan") or text[:1] in "-0123456789"


def _ends_in_number(line: str) -> bool:
    return _is_number(line.rsplit("[", 1)[1].rsplit(" ", 1)[-1])


def _rounded(value: JSON) -> JSON:
    """Keep six digits of every number; what is not finite becomes None."""
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


# Command line


def main(experiment: Experiment) -> None:
    """Run one experiment from the command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{experiment.name}", description=experiment.title
    )
    add_options(parser)
    parser.add_argument("--seeds", type=int, nargs="+", help="which seeds")
    parser.add_argument("--parts", nargs="+", default=["*"], help="which parts; * stands for any")
    parser.add_argument("--only-measure", action="store_true", help="do not draw nor judge")
    parser.add_argument("--only-draw", action="store_true", help="draw and judge what is there")
    options = parser.parse_args()
    how = How(quick=options.quick, data_dir=options.data_dir, device=options.device)
    path = (options.out or default_folder(how)) / f"{experiment.name}.json"
    outcomes = read(path)
    jobs = [
        job
        for job in experiment.jobs(how)
        if any(fnmatch.fnmatch(job.part, pattern) for pattern in options.parts)
    ]
    if options.seeds is not None:
        jobs = list(
            dict.fromkeys(Job(j.experiment, j.part, s, how) for s in options.seeds for j in jobs)
        )
    command = experiment.command(quick=how.quick)
    failed = []
    for number, (job, outcome) in enumerate(
        () if options.only_draw else measured(jobs, options.jobs), start=1
    ):
        place = f"{number}/{len(jobs)} {experiment.name}: {job.part}, seed {job.seed}"
        if outcome is None:
            failed.append(place)
            continue
        # What was measured before, for this part and seed, is replaced.
        outcomes = Outcomes(
            [o for o in outcomes if (o.part, o.seed) != (job.part, job.seed)] + [outcome]
        )
        write(path, experiment, outcomes, command)
        print(f"{place}, {outcome.minutes:.1f} minutes", file=sys.stderr)
    if failed:
        sys.exit("These failed:\n  " + "\n  ".join(failed))
    if options.only_measure:
        return
    print(experiment.title)
    print(f"  {experiment.summary(outcomes)}")
    claims = judged(experiment, outcomes, how.quick)
    save(experiment, outcomes, path.with_suffix(".png"))
    print(f"  {path}\n  {path.with_suffix('.png')}")
    sys.exit(not all(claim.holds for claim in claims))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what one experiment and all of them have in common."""
    parser.add_argument("--quick", action="store_true", help="minutes on two cores")
    parser.add_argument("--data-dir", type=Path, help="where the data sets are")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="where the results go")


def default_folder(how: How) -> Path:
    """Return where results go: the committed ones are of full runs."""
    return Path("runs") / "quick" if how.quick else RESULTS


def save(experiment: Experiment, outcomes: Outcomes, path: Path) -> None:
    """Draw the figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        drawing = experiment.draw(outcomes)
        drawing.savefig(path, dpi=110, metadata={"Software": None})
        pyplot.close(drawing)
