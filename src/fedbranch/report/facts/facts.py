"""Everything that a page shows about runs, as one JSON object that needs no folder.

``docs/file-formats.md`` describes it. Numbers have four digits. What is too much for a page is
folded: rounds are left out evenly, matrices averaged, curves of single clients dropped. The same
folders give the same object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import fedbranch
from fedbranch.report.facts.clients import clients, plain_last
from fedbranch.report.facts.decisions import decisions
from fedbranch.report.facts.folding import number
from fedbranch.report.facts.metrics import mean_over
from fedbranch.report.facts.news import news
from fedbranch.report.facts.norms import norms
from fedbranch.report.facts.overlay import Contestant, overlay
from fedbranch.report.facts.run import RunFacts, read_run
from fedbranch.report.facts.series import series
from fedbranch.report.facts.settings_in_words import small_facts
from fedbranch.report.facts.similarities import similarities
from fedbranch.report.facts.truth import adjusted_rand_index, truth
from fedbranch.runs import RunFolder
from fedbranch.types import JSON

__all__ = ["SCHEMA", "page_facts", "read_facts"]

SCHEMA = 1


def read_facts(folders: Sequence[RunFolder]) -> JSON:
    """Read runs for a report.

    Parameters
    ----------
    folders
        One or more; complete or going on, from the simulator or from a federation.

    Returns
    -------
    dict
        ``schema``, ``fedbranch`` (the version), ``runs`` in the order given, and ``comparison``,
        which is None for one run without baselines.

    Raises
    ------
    ValueError
        If there is no folder.
    DamagedFile
        If a file of a run, or of one of its baselines, is damaged.
    """
    if not folders:
        raise ValueError("there is no run folder to report on; give at least one")
    return page_facts([read_run(folder) for folder in folders])


def page_facts(runs: Sequence[RunFacts]) -> JSON:
    """Return what a page shows of runs that were read; see :func:`read_facts`."""
    names = _distinct_names(runs)
    contestants = [
        contestant
        for run, name in zip(runs, names, strict=True)
        for contestant in _contestants(run, name)
    ]
    return {
        "schema": SCHEMA,
        "fedbranch": fedbranch.__version__,
        "runs": [_run(run, name) for run, name in zip(runs, names, strict=True)],
        "comparison": overlay(contestants) if len(contestants) > 1 else None,
    }


def _run(run: RunFacts, name: str) -> JSON:
    saved = run.reading.saved
    matrices = similarities(saved.tree, run.index_of, run.true_groups) if saved else []
    return {
        "name": name,
        "method": run.method,
        "title": run.title,
        "driver": run.about.get("driver", "simulator"),
        "seed": run.about.get("seed"),
        "rule": run.rule,
        "about": small_facts(run.about, len(run.all_client_ids), in_training=run.in_training),
        "rounds_done": len(run.history),
        "rounds_planned": run.about.get("rounds", len(run.history)),
        "is_complete": run.is_complete,
        "how_to_go_on": None if run.is_complete else _how_to_go_on(run, name),
        "measured_on": "training data" if run.in_training else "held-out data",
        "metrics": [metric.to_json() for metric in run.metrics],
        "clients": clients(run),
        "nodes": _nodes(run),
        "decisions": decisions(run),
        "series": series(run),
        "norms": norms(run, matrices),
        "similarities": matrices,
        "truth": truth(run),
        "news": news(run.history, run.names),
    }


def _how_to_go_on(run: RunFacts, name: str) -> str:
    """Return what continues the run, without its path: the page may be read elsewhere."""
    without_path = run.folder.how_to_go_on.removesuffix(f" {run.folder.path}")
    return without_path + ("" if run.about.get("driver") == "flower" else f" {name}")


def _nodes(run: RunFacts) -> list[JSON]:
    plain = plain_last(run)

    def means(values: Mapping[str, Mapping[str, float]], client_ids: Sequence[str]) -> JSON:
        return {name: number(mean_over(of, client_ids)) for name, of in values.items()}

    return [
        {
            "id": node.id,
            "parent": node.parent_id,
            "children": list(node.child_ids),
            "born": node.born_in_round,
            "split_in_round": node.split_in_round,
            "num_clients": len(ids),
            "clients": sorted(run.index_of[i] for i in ids),
            "groups": dict(sorted(run.groups_at(node.id).items())),
            "last": means(run.last, ids),
            "plain": None if plain is None else means(plain, ids),
        }
        for node in run.growth.nodes.values()
        for ids in [run.clients_at[node.id]]
    ]


def _contestants(run: RunFacts, name: str) -> Iterator[Contestant]:
    """Yield a run, and those of its baselines in which anything was measured."""
    yield Contestant(name=name, run=run, ari=adjusted_rand_index(run.true_groups, run.leaf_of))
    for baseline in run.baselines.values():
        if baseline.metrics:
            leaf_of = baseline.leaf_of if baseline.folder.is_complete else {}
            yield Contestant(
                name=name, run=baseline, ari=adjusted_rand_index(run.true_groups, leaf_of)
            )


def _distinct_names(runs: Sequence[RunFacts]) -> list[str]:
    """Name runs after their folders; the second of the same name gets a 2."""
    names: list[str] = []
    count: Counter[str] = Counter()
    for run in runs:
        name = run.folder.path.resolve().name
        count[name] += 1
        names.append(name if count[name] == 1 else f"{name} ({count[name]})")
    return names
