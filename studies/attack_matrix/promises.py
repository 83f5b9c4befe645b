"""What docs/reliability.md promises about attacks, and which cells break a promise."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fedbranch.types import JSON
from studies.attack_matrix.attackers import ATTACKS
from studies.attack_matrix.methods import CFL, METHODS
from studies.attack_matrix.scenes import NUM_CLIENTS
from studies.attack_matrix.table import values

__all__ = ["ISOLATED", "SET_ASIDE", "broken_promises", "complaints", "summary"]

# Attacks after which attackers end in clusters without honest clients.
ISOLATED = ("label-flip", "direction")
MAX_POINTS_LOST_IF_ISOLATED = 1.0
# Attacks with replies that the guard sets aside.
SET_ASIDE = ("gaussian", "gaussian-10", "times-100")
MAX_ROUNDS_TO_SET_ASIDE = 3
MIN_SHARE_OUT = 0.8  # of all rounds; noise resembles some update now and then
MAX_POINTS_LOST = 5.0  # under all other attacks but the costlier ones
COSTLIER = {"alie": 25.0}  # attack -> points, as docs/reliability.md says
# Smaller groups of honest clients are hard to find with or without attackers.
MIN_GROUP_SIZE = 4


def broken_promises(results: Sequence[JSON]) -> list[str]:
    """Describe each cell that breaks a promise."""
    return [
        f"{cell['attack']}, {cell['percent']} %, {cell['num_groups']} group(s), "
        f"seed {cell['seed']}: {complaint}"
        for result in results
        for cell in [result["cell"]]
        for complaint in complaints(
            cell["attack"], result["methods"][CFL], has_small_groups=_has_small_groups(cell)
        )
    ]


def complaints(attack: str, found: JSON, *, has_small_groups: bool = False) -> list[str]:
    """Describe the promises that a cell breaks.

    Parameters
    ----------
    attack
        A key of ``ATTACKS``.
    found
        The outcome of CFL in the cell.
    has_small_groups
        Whether honest groups are too small for a promise about their accuracy.
    """
    made = []
    if attack in ISOLATED:
        most = MAX_POINTS_LOST_IF_ISOLATED
    else:
        most = COSTLIER.get(attack, MAX_POINTS_LOST)
    if found["points_lost"] > most and not has_small_groups:
        made.append(f"{found['points_lost']:.1f} points lost, more than {most}")
    if attack in ISOLATED and (found["precision"], found["recall"]) != (1, 1):
        made.append(f"precision {found['precision']}, recall {found['recall']}")
    if attack in SET_ASIDE and (
        found["out_by"] is None or found["out_by"] > MAX_ROUNDS_TO_SET_ASIDE
    ):
        made.append(f"set aside by round {found['out_by']}")
    if attack in SET_ASIDE and found["share_out"] < MIN_SHARE_OUT:
        made.append(f"set aside in {found['share_out']:.0%} of the rounds only")
    return made


def _has_small_groups(cell: JSON) -> bool:
    num_honest = NUM_CLIENTS * (100 - cell["percent"]) // 100
    return bool(num_honest // cell["num_groups"] < MIN_GROUP_SIZE)


def summary(results: Sequence[JSON]) -> str:
    """Summarise the matrix in one line."""
    parts = []
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
        parts.append(
            f"{ATTACKS[attack].title}: precision = recall = 1 in {sum(alone)} of {len(alone)} runs, "
            f"at most {max(values(results, CFL, 'points_lost', **where)):.1f} points lost"
        )
    for attack in SET_ASIDE:
        rounds = values(results, CFL, "out_by", attack=attack)
        known = [number for number in rounds if number is not None]
        parts.append(
            f"{ATTACKS[attack].title}: all set aside in {len(known)} of {len(rounds)} runs, "
            f"by round {max(known, default='–')}"
        )
    others = [attack for attack in ATTACKS if attack not in (*ISOLATED, *SET_ASIDE)]
    lost = {attack: max(values(results, CFL, "points_lost", attack=attack)) for attack in others}
    worst = max(lost, key=lost.__getitem__)
    parts.append(f"the others: at most {lost[worst]:.1f} points lost ({ATTACKS[worst].title})")
    means = ", ".join(
        f"{method} {fmean(values(results, method, 'points_lost')):.1f}" for method in METHODS
    )
    parts.append(f"mean points lost: {means}")
    return "; ".join(parts)
