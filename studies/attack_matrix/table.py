"""The matrix as a Markdown table: one row for each attack and share of attackers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from fedbranch.types import JSON
from studies.attack_matrix.attackers import ATTACKS
from studies.attack_matrix.methods import CFL, METHODS

__all__ = ["table", "values"]

EXPLANATION = """\
Points of accuracy that honest clients lose against CFL without attackers: mean (worst).
Precision, recall and the share of rounds in which attackers were out: mean (worst).
The round by which all attackers had been out: latest (in how many runs).
"""


def values(results: Iterable[JSON], method: str, name: str, **where: Any) -> list[Any]:
    """Collect a measure of a method over cells, such as those with ``attack="mimic"``."""
    return [
        result["methods"][method].get(name)
        for result in results
        if method in result["methods"]
        and all(result["cell"][key] == value for key, value in where.items())
    ]


def table(results: Sequence[JSON]) -> str:
    """Render the results, over groups and seeds."""
    others = [m for m in METHODS if m != CFL and values(results, m, "accuracy")]
    names = ["attack", "%", "CFL loses", "precision", "recall", "out by round", "rounds out"]
    names += [f"{method} loses" for method in others]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for attack, percent in dict.fromkeys(
        (result["cell"]["attack"], result["cell"]["percent"]) for result in results
    ):
        where = {"attack": attack, "percent": percent}
        cells = [
            ATTACKS[attack].title,
            str(percent),
            _lost(values(results, CFL, "points_lost", **where)),
            _least(values(results, CFL, "precision", **where)),
            _least(values(results, CFL, "recall", **where)),
            _last(values(results, CFL, "out_by", **where)),
            _least(values(results, CFL, "share_out", **where)),
            *(_lost(values(results, method, "points_lost", **where)) for method in others),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([EXPLANATION, *lines, *_backdoor_lines(results)])


def _backdoor_lines(results: Sequence[JSON]) -> list[str]:
    by_method = {
        method: values(results, method, "backdoor_success", attack="backdoor") for method in METHODS
    }
    rates = ", ".join(f"{method} {fmean(own):.0%}" for method, own in by_method.items() if own)
    return ["", f"Images on which the backdoor's trigger works: {rates}."] if rates else []


def _lost(points: Sequence[float]) -> str:
    return f"{fmean(points):.1f} ({max(points):.1f})" if points else ""


def _least(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return f"{fmean(known):.2f} ({min(known):.2f})" if known else "–"


def _last(rounds: Sequence[int | None]) -> str:
    known = [number for number in rounds if number is not None]
    return f"{max(known)} ({len(known)}/{len(rounds)})" if known else f"– (0/{len(rounds)})"
