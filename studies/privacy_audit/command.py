"""The command ``fedbranch audit``: run the attacks, show how far it is, print the table."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from studies.privacy_audit.attacks import ATTACKS
from studies.privacy_audit.results import audit
from studies.privacy_audit.scene import Sizes
from studies.privacy_audit.table import print_results

__all__ = ["run_command"]


def run_command(
    *,
    is_quick: bool,
    out: Path | None,
    seed: int,
    as_json: bool,
    only: Collection[str] | None = None,
) -> None:
    """Run the attacks and print what they got.

    Parameters
    ----------
    is_quick
        Attack fewer clients; takes a minute.
    out
        The file for the results, as JSON. Its folder must exist.
    seed
        Of digits, models and secrets.
    as_json
        Print JSON instead of a table.
    only
        The keys of the attacks to run; by default all of them.
    """
    num_attacks = len(ATTACKS if only is None else only)
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description:<44}"),
        BarColumn(),
        TextColumn("attack {task.completed}/{task.total}"),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=num_attacks)
        begun = iter(range(num_attacks))
        results = audit(
            seed=seed,
            sizes=Sizes.quick() if is_quick else None,
            only=only,
            on_attack=lambda attack: progress.update(
                task, completed=next(begun), description=attack.title
            ),
        )
        progress.update(task, completed=num_attacks, description="done")
    if out is not None:
        results.save(out)
    if as_json:
        print(json.dumps(results.to_json(), indent=1))
    else:
        print_results(results, Console())
