"""Run every experiment and check what each must show.

    python -m experiments.all --quick --data-dir DEST

Exit code 0: every claim of every figure holds. ``--table`` prints what the committed results
say instead: the table of the README.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from experiments.figure import (
    RESULTS,
    Experiment,
    How,
    Outcomes,
    add_options,
    default_folder,
    judged,
    measured,
    read,
    save,
    write,
)

__all__ = ["EXPERIMENTS", "experiments", "table"]

EXPERIMENTS = (
    "fig1_toys",
    "fig2_paths",
    "fig3_region",
    "fig4_data_size",
    "fig5_rounds",
    "fig6_norms",
    "fig7_cifar10",
    "fig8_ag_news",
    "fig9_tree",
    "fig10a_methods",
    "fig10b_ifca",
    "fig10c_compression",
    "fig10d_adversaries",
    "fig11_privacy",
)


def experiments() -> dict[str, Experiment]:
    """Load all experiments, by name."""
    return {name: import_module(f"experiments.{name}").EXPERIMENT for name in EXPERIMENTS}


def table() -> str:
    """Write a table of what the paper reports beside what the committed results show."""
    lines = [
        "| figure | command | the paper | ours, mean ± spread over seeds | minutes | differences |",
        "|---|---|---|---|---|---|",
    ]
    for name, experiment in experiments().items():
        outcomes = read(RESULTS / f"{name}.json")
        number = name.split("_")[0].removeprefix("fig")
        ours, minutes = "not measured in full yet", ""
        if outcomes:
            ours = f"[{experiment.summary(outcomes)}](results/{name}.png)"
            minutes = ", ".join(f"{spent:.1f} ({on})" for on, spent in outcomes.minutes.items())
        cells = [
            f"{number}: {experiment.title}",
            f"`{experiment.command()}`",
            experiment.paper,
            ours,
            minutes,
            experiment.differs,
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--table", action="store_true", help="print the README's table, and stop")
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    how = How(quick=options.quick, data_dir=options.data_dir, device=options.device)
    folder = options.out or default_folder(how)
    of = experiments()
    jobs = [job for experiment in of.values() for job in experiment.jobs(how)]
    waiting = {name: len(experiment.jobs(how)) for name, experiment in of.items()}
    outcomes = {name: Outcomes() for name in of}
    failed = []
    for job, outcome in measured(jobs, options.jobs):
        name = job.experiment
        if outcome is None:
            failed.append(f"{name}: {job.part}, seed {job.seed} could not be measured")
            continue
        print(f"{name}: {job.part}, seed {job.seed}: {outcome.minutes:.1f} min", file=sys.stderr)
        outcomes[name].append(outcome)
        waiting[name] -= 1
        if waiting[name]:
            continue
        command = of[name].command(quick=how.quick)
        write(folder / f"{name}.json", of[name], outcomes[name], command)
        print(f"{of[name].title}: {of[name].summary(outcomes[name])}")
        claims = judged(of[name], outcomes[name], how.quick)
        failed += [f"{name}: {claim.text}" for claim in claims if not claim.holds]
        save(of[name], outcomes[name], folder / f"{name}.png")
    print(f"{len(of)} figures in {folder}")
    if failed:
        sys.exit("These claims do not hold:\n  " + "\n  ".join(failed))
    print("Every claim holds.")


if __name__ == "__main__":
    main()
