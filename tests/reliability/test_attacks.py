"""The attack matrix: whom CFL keeps away from honest clients, and what attacks cost these."""

import os
from pathlib import Path
from statistics import fmean

import pytest

from reliability.attacks import ATTACKS
from reliability.matrix import CFL, METHODS, NUM_CLIENTS, run_matrix, table, values

ISOLATED = ("label-flip", "direction")  # and honest clients do not suffer
MOST_POINTS_LOST = 1.0
SET_ASIDE = ("gaussian", "gaussian-10", "times-100")  # at once
ROUNDS_TO_SET_ASIDE = 3
LEAST_SHARE_OUT = 0.8  # of all rounds: noise resembles somebody now and then
MOST_POINTS_LOST_TO_OTHERS = 5.0

# What costs honest clients more than that, as docs/reliability.md says: attack -> points.
COSTLIER = {"alie": 25.0}
# A smaller group of honest clients is hard to tell from the others with or without attackers.
LEAST_GROUP = 4


def broken_promises(results):
    """Name every cell that is not as promised, and how it is."""
    return [
        f"{cell['attack']}, {cell['percent']} %, {cell['num_groups']} group(s), seed {cell['seed']}: "
        + complaint
        for result in results
        for cell in [result["cell"]]
        for complaint in complaints(
            cell["attack"], result["methods"][CFL], has_small_groups=has_small_groups(cell)
        )
    ]


def has_small_groups(cell):
    """Say whether a cell's honest groups are too small for a promise about their accuracy."""
    num_honest = NUM_CLIENTS * (100 - cell["percent"]) // 100
    return num_honest // cell["num_groups"] < LEAST_GROUP


def complaints(attack, found, *, has_small_groups=False):
    """Say what is not as promised in a cell."""
    made = []
    most = (
        MOST_POINTS_LOST if attack in ISOLATED else COSTLIER.get(attack, MOST_POINTS_LOST_TO_OTHERS)
    )
    if found["points_lost"] > most and not has_small_groups:
        made.append(f"{found['points_lost']:.1f} points lost, more than {most}")
    if attack in ISOLATED and (found["precision"], found["recall"]) != (1, 1):
        made.append(f"precision {found['precision']}, recall {found['recall']}")
    if attack in SET_ASIDE and (found["out_by"] or 99) > ROUNDS_TO_SET_ASIDE:
        made.append(f"set aside by round {found['out_by']}")
    if attack in SET_ASIDE and found["share_out"] < LEAST_SHARE_OUT:
        made.append(f"set aside in {found['share_out']:.0%} of the rounds only")
    return made


def test_a_promise_that_is_not_kept_is_named():
    kept = {"points_lost": 0.5, "precision": 1.0, "recall": 1.0, "out_by": 3, "share_out": 0.9}

    assert complaints("label-flip", kept) == complaints("times-100", kept) == []
    assert len(complaints("label-flip", kept | {"points_lost": 1.1})) == 1
    assert len(complaints("direction", kept | {"precision": 0.9})) == 1
    assert len(complaints("direction", kept | {"precision": None, "recall": 0.0})) == 1
    assert len(complaints("times-100", kept | {"out_by": 4})) == 1
    assert len(complaints("gaussian", kept | {"out_by": None})) == 1
    assert len(complaints("gaussian-10", kept | {"share_out": 0.5})) == 1
    assert len(complaints("mimic", kept | {"points_lost": 5.1})) == 1


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


def summary(results):
    """Say in a line what came of it."""
    told = []
    for attack in ISOLATED:
        where = {"attack": attack}
        alone = [
            (precision, recall) == (1, 1)
            for precision, recall in zip(
                values(results, CFL, "precision", **where),
                values(results, CFL, "recall", **where),
                strict=True,
            )
        ]
        told.append(
            f"{ATTACKS[attack].title}: precision = recall = 1 in {sum(alone)} of {len(alone)} runs, "
            f"at most {max(values(results, CFL, 'points_lost', **where)):.1f} points lost"
        )
    for attack in SET_ASIDE:
        rounds = values(results, CFL, "out_by", attack=attack)
        known = [number for number in rounds if number is not None]
        told.append(
            f"{ATTACKS[attack].title}: all set aside in {len(known)} of {len(rounds)} runs, "
            f"by round {max(known, default='–')}"
        )
    others = [attack for attack in ATTACKS if attack not in (*ISOLATED, *SET_ASIDE)]
    lost = {attack: max(values(results, CFL, "points_lost", attack=attack)) for attack in others}
    worst = max(lost, key=lost.__getitem__)
    told.append(f"the others: at most {lost[worst]:.1f} points lost ({ATTACKS[worst].title})")
    means = ", ".join(
        f"{method} {fmean(values(results, method, 'points_lost')):.1f}" for method in METHODS
    )
    told.append(f"mean points lost: {means}")
    return "; ".join(told)
