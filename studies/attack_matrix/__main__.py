"""Run the attack matrix and print its table.

    python -m studies.attack_matrix [--quick] [--jobs 2] [--attacks NAME ...] [--out FILE]

``--out`` takes all numbers, as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

from studies.attack_matrix.attackers import ATTACKS
from studies.attack_matrix.matrix import NUMS_OF_GROUPS, PERCENTS, SEEDS, run_matrix
from studies.attack_matrix.methods import METHODS
from studies.attack_matrix.table import table

__all__ = ["main"]


def main() -> None:
    """Run the cells that the command line chooses."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.attack_matrix",
        description="The attack matrix: what each attack costs honest clients.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one seed, 25 %% attackers, 1 and 2 groups"
    )
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--percents", nargs="+", type=int, default=PERCENTS)
    parser.add_argument("--groups", nargs="+", type=int, default=NUMS_OF_GROUPS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path, help="file for all numbers, as JSON")
    chosen = parser.parse_args()
    began = time.monotonic()
    results = run_matrix(
        attacks=chosen.attacks,
        percents=(25,) if chosen.quick else chosen.percents,
        nums_of_groups=(1, 2) if chosen.quick else chosen.groups,
        seeds=(0,) if chosen.quick else chosen.seeds,
        methods=chosen.methods,
        jobs=chosen.jobs,
    )
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(table(results))
    print(f"{len(results)} cells in {math.ceil(time.monotonic() - began)} s", file=sys.stderr)


if __name__ == "__main__":
    main()
