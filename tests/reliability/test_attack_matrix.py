"""The attack matrix: attackers are kept away from honest clients, at a bounded cost to these."""

import os
from pathlib import Path

import pytest

from studies.attack_matrix import run_matrix, table
from studies.attack_matrix.methods import CFL
from studies.attack_matrix.promises import ISOLATED, SET_ASIDE, broken_promises, summary


@pytest.mark.slow
def test_attackers_that_can_be_seen_are_kept_away():
    results = run_matrix(
        attacks=(*ISOLATED, *SET_ASIDE),
        percents=(25,),
        nums_of_groups=(1, 2),
        seeds=(0,),
        methods=(CFL,),
    )

    assert broken_promises(results) == []


@pytest.mark.reliability
def test_the_whole_matrix(measured):
    results = run_matrix(jobs=min(2, os.cpu_count() or 1))

    print(table(results))
    folder = os.environ.get("FEDBRANCH_RELIABILITY")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "matrix.md").write_text(table(results) + "\n", encoding="utf-8")
    measured("attacks", summary(results))
    assert broken_promises(results) == []
