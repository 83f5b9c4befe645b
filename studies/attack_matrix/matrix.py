"""All cells of the matrix, one after another or in several processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context

import torch

from fedbranch.types import JSON
from studies.attack_matrix.attackers import ATTACKS
from studies.attack_matrix.methods import METHODS, under_attack, without_attackers
from studies.attack_matrix.scenes import Cell, Scene

__all__ = ["NUMS_OF_GROUPS", "PERCENTS", "SEEDS", "run_matrix"]

PERCENTS = (10, 25, 40)
NUMS_OF_GROUPS = (1, 2, 4)
SEEDS = (0, 1, 2)


def run_matrix(
    *,
    attacks: Iterable[str] = tuple(ATTACKS),
    percents: Iterable[int] = PERCENTS,
    nums_of_groups: Iterable[int] = NUMS_OF_GROUPS,
    seeds: Iterable[int] = SEEDS,
    methods: Sequence[str] = METHODS,
    jobs: int = 1,
) -> list[JSON]:
    """Run all cells, and compare them with the runs without attackers.

    Parameters
    ----------
    attacks
        Keys of :data:`ATTACKS`.
    percents, nums_of_groups, seeds
        Each combination is a scene.
    methods
        Some of :data:`METHODS`.
    jobs
        The number of processes.

    Returns
    -------
    list
        For each cell its scene and attack (``cell``), the outcome without attackers
        (``attack_free``), and the outcomes of the ``methods``. ``points_lost`` is the accuracy
        lost against the run without attackers, in percentage points.
    """
    scenes = [Scene(*which) for which in product(percents, nums_of_groups, seeds)]
    cells = [
        Cell(scene.percent, scene.num_groups, scene.seed, attack)
        for attack in attacks
        for scene in scenes
    ]
    results = _all_results(scenes, cells, methods, jobs)
    for cell in cells:
        alone = results[cell.scene]
        results[cell]["attack_free"] = alone
        for measured in results[cell]["methods"].values():
            measured["points_lost"] = 100 * (alone["accuracy"] - measured["accuracy"])
    return [results[cell] for cell in cells]


def _all_results(
    scenes: Sequence[Scene], cells: Sequence[Cell], methods: Sequence[str], jobs: int
) -> dict[Scene, JSON]:
    began = time.monotonic()
    results: dict[Scene, JSON] = {}

    def note(scene: Scene, result: JSON) -> None:
        results[scene] = result
        if sys.stderr.isatty():
            seconds = time.monotonic() - began
            print(
                f"\r{len(results)}/{len(scenes) + len(cells)} {seconds:.0f} s",
                end="",
                file=sys.stderr,
            )

    if jobs == 1:
        _one_thread()
        for scene in scenes:
            note(scene, without_attackers(scene))
        for cell in cells:
            note(cell, under_attack(cell, methods))
        return results
    context = get_context("spawn")  # a fork would copy the threads that torch may have
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_one_thread) as pool:
        futures = {pool.submit(without_attackers, scene): scene for scene in scenes}
        futures |= {pool.submit(under_attack, cell, methods): cell for cell in cells}
        for future in as_completed(futures):
            note(futures[future], future.result())
    return results


def _one_thread() -> None:
    torch.set_num_threads(1)
