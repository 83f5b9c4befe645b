"""The experiments: their quick versions show what they must, their committed results too."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import figure
from experiments.all import EXPERIMENTS, experiments, table
from experiments.figure import Claim, Experiment, How, Job, Outcome, Outcomes, mean_and_spread
from fedbranch.data.sources import NAMES, default_data_dir, is_present

ROOT = Path(__file__).parents[1]
README = (ROOT / "experiments" / "README.md").read_text()
MEASURED = [name for name in EXPERIMENTS if (figure.RESULTS / f"{name}.json").exists()]


def lacking(experiment):
    needed = experiment.data if experiment.quick_data is None else experiment.quick_data
    return [name for name in needed if not is_present(name)]


TWO_SEEDS = {"fig10b_ifca": ["MNIST 2400 x 100: CFL"]}  # as the table says


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_quick_version_shows_what_the_figure_shows(name, tmp_path):
    experiment = experiments()[name]
    if missing := lacking(experiment):
        pytest.skip(f"{default_data_dir()} has no {' nor '.join(missing)}; see docs/data.md")
    jobs = experiment.jobs(How(quick=True, device="cpu"))
    outcomes = Outcomes(job.measure() for job in jobs)

    claims = experiment.claims(outcomes, True)
    figure.save(experiment, outcomes, tmp_path / "figure.png")

    assert claims
    assert not [claim for claim in claims if not claim.holds]
    assert (tmp_path / "figure.png").stat().st_size > 5000


@pytest.mark.parametrize("name", MEASURED)
def test_the_committed_results_show_what_the_figure_shows(name):
    experiment = experiments()[name]
    outcomes = figure.read(figure.RESULTS / f"{name}.json")

    assert set(outcomes.parts) == set(experiment.parts)
    assert [p for p in experiment.parts if len(outcomes.of(p)) < 3] == TWO_SEEDS.get(name, [])
    assert not [claim for claim in experiment.claims(outcomes, False) if not claim.holds]
    assert (figure.RESULTS / f"{name}.png").exists()


def test_the_readme_says_what_the_committed_results_say():
    assert table() in README


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_have_the_names_of_their_modules(name):
    experiment = experiments()[name]

    assert experiment.name == name
    assert set(experiment.data) <= set(NAMES)
    assert (ROOT / "experiments" / f"{name}.py").exists()


def test_experiments_use_public_names_only():
    for path in (ROOT / "experiments").glob("*.py"):
        imported = re.findall(
            r"^from (fedbranch[\w.]*) import ([^(\n]+|\([^)]*\))", path.read_text(), re.M
        )
        names = [f"{module}.{name}" for module, name in imported]
        assert not [name for name in names if "._" in name or re.search(r"\b_\w", name)]


# The frame


def tiny(name="tiny", holds=True):
    return Experiment(
        name=name,
        title="A tiny experiment",
        paper="nothing",
        measure=lambda part, seed, how: {"value": seed / 3, "lists": [[1, 2.5], []]},
        draw=lambda outcomes: None,
        claims=lambda outcomes, quick: [Claim("it is so", holds, "1 of 1")],
        summary=lambda outcomes: mean_and_spread(m["value"] for m in outcomes.of("a")),
        parts=("a", "b"),
        quick_parts=("a",),
    )


def test_jobs_are_all_parts_for_all_seeds():
    assert [(job.part, job.seed) for job in tiny().jobs(How())] == [
        (part, seed) for seed in (0, 1, 2) for part in ("a", "b")
    ]
    assert [(job.part, job.seed) for job in tiny().jobs(How(quick=True))] == [("a", 0)]


def test_what_was_measured_is_read_back(tmp_path):
    outcomes = Outcomes(
        Outcome(
            part=part, seed=seed, minutes=0.5, machine="here", measured={"x": [[1, 2], [], [0.5]]}
        )
        for seed in (1, 0)
        for part in ("b", "a")
    )
    path = tmp_path / "results" / "tiny.json"

    figure.write(path, tiny(), outcomes, "python -m experiments.tiny")

    assert figure.read(path) == sorted(outcomes, key=lambda o: (o.part, o.seed))
    assert '"x": [' in path.read_text()
    assert json.loads(path.read_text())["seeds"] == [0, 1]
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny.json"]


@pytest.mark.parametrize(
    "value", [[1, 2, 3], [[1.5, -2], [3]], {"a": [True, None]}, [], ["text", "-1"], [{"b": []}]]
)
def test_shorter_lines_are_the_same_json(value):
    assert json.loads(figure._one_line_lists(json.dumps(value, indent=1))) == value


def test_an_experiment_runs_alone_and_a_second_run_replaces_what_it_measures(tmp_path):
    command = [sys.executable, "-m", "experiments.fig2_paths", "--quick", "--out", tmp_path]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    path = tmp_path / "fig2_paths.json"
    measured = [outcome.measured for outcome in figure.read(path)]

    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert "holds: " in first.stdout
    assert [outcome.measured for outcome in figure.read(path)] == measured
    assert path.with_suffix(".png").exists()


def test_jobs_in_processes_give_the_same():
    jobs = [
        Job("fig2_paths", part, 0, How(quick=True)) for part in experiments()["fig2_paths"].parts
    ]

    alone, beside = (
        {job: outcome.measured for job, outcome in figure.measured(jobs, num_processes)}
        for num_processes in (1, 2)
    )

    assert alone == beside


def test_a_job_that_fails_does_not_stop_the_others(capsys):
    jobs = [Job("fig2_paths", part, 0, How(quick=True)) for part in ("no such part", "congruent")]

    outcomes = [outcome for _, outcome in figure.measured(jobs)]

    assert outcomes[0] is None
    assert outcomes[1].part == "congruent"
    assert "no such part" in capsys.readouterr().err


def test_the_table_says_who_computed_and_for_how_long():
    outcomes = Outcomes(
        Outcome(part="a", seed=seed, minutes=1.5, machine=f"{name}, Python 3", measured={})
        for seed, name in enumerate(["a GPU", "2 CPU cores", "a GPU"])
    )

    assert outcomes.minutes == {"a GPU": 3.0, "2 CPU cores": 1.5}
