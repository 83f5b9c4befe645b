"""Everything that a report shows about runs, as one JSON object that needs no folder any more.

What it holds is described in ``docs/file-formats.md``. Numbers have four digits, and what would
be too much for a page is folded: rounds are left out evenly, matrices averaged, curves of single
clients dropped. The same folders give the same object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import fedbranch
from fedbranch.report.facts.events import comings_and_goings, natural_order, news, refusals
from fedbranch.report.facts.growth import Growth
from fedbranch.report.facts.overlay import Contestant, overlay
from fedbranch.report.facts.series import (
    MOST_CLIENT_NUMBERS,
    MOST_LINES,
    MOST_POINTS,
    latest,
    mean_over,
    metrics_of,
    node_series,
    number,
    numbers,
    overall_series,
    plain_series,
    thinned,
    trace,
)
from fedbranch.report.facts.settings_in_words import rule_text, small_facts
from fedbranch.report.facts.similarities import similarities
from fedbranch.report.load import all_client_ids, read
from fedbranch.report.text.terminal import METHOD_TITLES
from fedbranch.report.text.why import VERDICTS, episodes, measured_in_words
from fedbranch.rules import Decision
from fedbranch.runs import Round, RunFolder
from fedbranch.types import JSON

__all__ = ["SCHEMA", "read_facts"]

SCHEMA = 1
MOST_DECISIONS = 2000
MOST_COUNTS = 5000  # true groups times clusters
MOST_NORM_NUMBERS = 25_000
LONGEST_REASON = 300  # characters


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
    names = _distinct_names(folders)
    runs, contestants = [], []
    for folder, name in zip(folders, names, strict=True):
        run = _Run(folder, name)
        runs.append(run.to_json())
        contestants.append(run.contestant())
        contestants.extend(run.rivals())
    return {
        "schema": SCHEMA,
        "fedbranch": fedbranch.__version__,
        "runs": runs,
        "comparison": overlay(contestants) if len(contestants) > 1 else None,
    }


class _Run:
    """One run, with everything that several parts of the report need."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        reading = read(folder)
        self.folder, self.name = folder, name
        self.about, self.history, self.saved = folder.about, reading.history, reading.saved
        self.in_training = not any(entry.evaluation for entry in self.history)
        self.metrics = metrics_of(self.history, in_training=self.in_training)
        self.names = folder.names
        self.client_ids = all_client_ids(reading)
        self.index_of = {client_id: index for index, client_id in enumerate(self.client_ids)}
        self.groups = {i: group for i, group in folder.groups.items() if group is not None}
        self.growth = Growth()
        self.trace = trace(
            self.history,
            self.saved,
            self.growth,
            self.client_ids,
            self.metrics,
            in_training=self.in_training,
        )
        self.clients_at = self.growth.clients_at()
        self.last = latest(self.history, self.metrics, in_training=self.in_training)
        self.baselines = {
            baseline_name: read(baseline) for baseline_name, baseline in folder.baselines.items()
        }
        self.plain = self._plain_at_its_end()

    @property
    def title(self) -> str:
        return METHOD_TITLES.get(self.folder.method, self.folder.method)

    @property
    def leaf_ids(self) -> list[int]:
        return [node.id for node in self.growth.nodes.values() if not node.child_ids]

    def to_json(self) -> JSON:
        folder = self.folder
        about = folder.about.get("about") or {}
        expected = about.get("experiment", {}).get("baselines", [])
        done = {name for name, reading in self.baselines.items() if reading.folder.is_complete}
        lacks = set(expected) - done if folder.method == "cfl" else set()
        is_complete = folder.is_complete and not lacks
        matrices = similarities(self.saved.tree, self.index_of, self.groups) if self.saved else []
        return {
            "name": self.name,
            "method": folder.method,
            "title": self.title,
            "driver": self.about.get("driver", "simulator"),
            "seed": self.about.get("seed"),
            "rule": rule_text(self.about.get("rule")),
            "about": small_facts(self.about, len(self.client_ids), in_training=self.in_training),
            "rounds_done": len(self.history),
            "rounds_planned": self.about.get("rounds", len(self.history)),
            "is_complete": is_complete,
            # Whoever gets the report by mail has no use for our paths.
            "how_to_go_on": None
            if is_complete
            else folder.how_to_go_on.removesuffix(f" {folder.path}")
            + ("" if self.about.get("driver") == "flower" else f" {self.name}"),
            "measured_on": "training data" if self.in_training else "held-out data",
            "metrics": [metric.to_json() for metric in self.metrics],
            "clients": self._clients(),
            "nodes": self._nodes(),
            "decisions": self._decisions(),
            "series": self._series(),
            "norms": self._norms(matrices),
            "similarities": matrices,
            "truth": self._truth(),
            "news": news(self.history, self.names),
        }

    def contestant(self) -> Contestant:
        return Contestant(
            run=self.name,
            title=self.title,
            rule=rule_text(self.about.get("rule")),
            about=self.about,
            metrics=self.metrics,
            history=self.history,
            in_training=self.in_training,
            last=_of_those_who_stayed(self.history, self.last),
            num_clusters=_num_clusters(self.history),
            ari=self._ari(self._placed()),
        )

    def rivals(self) -> list[Contestant]:
        """Give the baselines, as far as something was measured in them."""
        rivals = []
        for name, reading in self.baselines.items():
            in_training = not any(entry.evaluation for entry in reading.history)
            metrics = metrics_of(reading.history, in_training=in_training)
            clusters: Mapping[str, Sequence[str]] = {}
            if reading.folder.is_complete:
                clusters = reading.folder.summary.get("clusters", {})
            positions = {i: int(leaf) for leaf, ids in clusters.items() for i in ids}
            if not metrics:
                continue
            rivals.append(
                Contestant(
                    run=self.name,
                    title=METHOD_TITLES.get(name, name),
                    rule=rule_text(reading.folder.about.get("rule")),
                    about=reading.folder.about,
                    metrics=metrics,
                    history=reading.history,
                    in_training=in_training,
                    last=_of_those_who_stayed(
                        reading.history,
                        latest(reading.history, metrics, in_training=in_training),
                    ),
                    num_clusters=_num_clusters(reading.history),
                    ari=self._ari(positions),
                )
            )
        return rivals

    # Parts of the report

    def _clients(self) -> JSON:
        described = {str(client["id"]): client for client in self.about["clients"]}
        joined, left = comings_and_goings(self.history)
        refused = Counter(i for entry in self.history for i in entry.record.refused)
        told = refusals(self.history)
        return {
            "ids": self.client_ids,
            "names": [self.names.get(i) for i in self.client_ids],
            "leaf": [self.growth.positions.get(i) for i in self.client_ids],
            "examples": [described.get(i, {}).get("num_train") for i in self.client_ids],
            "group": [self.groups.get(i) for i in self.client_ids],
            "joined": [joined.get(i) for i in self.client_ids],
            "left": [left.get(i) for i in self.client_ids],
            "refused": [refused[i] for i in self.client_ids],
            "refusals": [told.get(i, []) for i in self.client_ids],
            "last": self._by_client(self.last),
            "plain": None if self.plain is None else self._by_client(self.plain),
        }

    def _by_client(self, values: Mapping[str, Mapping[str, float]]) -> JSON:
        return {
            name: numbers(by_client.get(i) for i in self.client_ids)
            for name, by_client in values.items()
        }

    def _nodes(self) -> list[JSON]:
        return [
            {
                "id": node.id,
                "parent": node.parent_id,
                "children": list(node.child_ids),
                "born": node.born_in_round,
                "split_in_round": node.split_in_round,
                "num_clients": len(self.clients_at[node.id]),
                "clients": sorted(self.index_of[i] for i in self.clients_at[node.id]),
                "groups": dict(sorted(self._groups_of(self.clients_at[node.id]).items())),
                "last": self._means(self.last, node.id),
                "plain": None if self.plain is None else self._means(self.plain, node.id),
            }
            for node in self.growth.nodes.values()
        ]

    def _means(self, values: Mapping[str, Mapping[str, float]], node_id: int) -> JSON:
        client_ids = self.clients_at[node_id]
        return {name: number(mean_over(of, client_ids)) for name, of in values.items()}

    def _groups_of(self, client_ids: Iterable[str]) -> Counter[str]:
        return Counter(self.groups[i] for i in client_ids if i in self.groups)

    def _decisions(self) -> list[JSON]:
        examinations = [
            decision
            for entry in self.history
            for decision in entry.record.decisions
            if decision.is_examination
        ]
        found = list(episodes(examinations))
        if len(found) > MOST_DECISIONS:  # splits say most, then what happened last
            ranks = {id(e): (e.last.verdict in ("split", "merge"), e.last.round) for e in found}
            kept = sorted(found, key=lambda e: ranks[id(e)], reverse=True)[:MOST_DECISIONS]
            kept_ids = {id(episode) for episode in kept}
            found = [episode for episode in found if id(episode) in kept_ids]
        return [self._decision(e.decisions[0].round, e.last) for e in found]

    def _decision(self, first_round: int, decision: Decision) -> JSON:
        children = self.growth.children_of.get((decision.round, decision.node_id), ())
        return {
            "node": decision.node_id,
            "first_round": first_round,
            "round": decision.round,
            "verdict": decision.verdict,
            "title": VERDICTS[decision.verdict],
            "reason": decision.reason[:LONGEST_REASON],
            "measured": measured_in_words(decision),
            "children": list(children) if decision.verdict == "split" else [],
            "moves": [
                [self.index_of[i], leaf_id]
                for i, leaf_id in sorted(decision.moves.items())
                if i in self.index_of
            ],
        }

    def _largest_nodes(self) -> list[int]:
        """Give the clusters that were, by clients, the largest, in the order of their ids."""
        largest: dict[int, int] = {}
        for entry in self.history:
            for node_id, size in entry.record.cluster_sizes.items():
                largest[node_id] = max(size, largest.get(node_id, 0))
            for split in entry.record.splits:  # in the first round it never had a size
                largest.setdefault(split.node_id, sum(map(len, split.groups)))
        ranked = sorted(largest, key=lambda node_id: (-largest[node_id], node_id))
        return sorted(ranked[:MOST_LINES])

    def _series(self) -> JSON:
        node_ids = self._largest_nodes()
        num_numbers = len(self.trace.rounds) * len(self.client_ids) * len(self.metrics)
        return {
            "rounds": self.trace.rounds,
            "num_clusters": [len(leaf_ids) for leaf_ids in self.trace.leaf_ids],
            "overall": overall_series(self.trace),
            "nodes": {m.name: node_series(self.trace, m.name, node_ids) for m in self.metrics},
            "clients": None
            if num_numbers > MOST_CLIENT_NUMBERS
            else {
                metric.name: [numbers(line) for line in self.trace.values[metric.name].T.tolist()]
                for metric in self.metrics
            },
            "plain": self._plain_series(node_ids),
        }

    def _plain_at_its_end(self) -> dict[str, dict[str, float]] | None:
        plain = self.baselines.get("fedavg")
        if plain is None or not plain.folder.is_complete:
            return None
        values = latest(plain.history, self.metrics, in_training=self.in_training)
        return values if any(values.values()) else None

    def _plain_series(self, node_ids: Sequence[int]) -> JSON | None:
        plain = self.baselines.get("fedavg")
        if plain is None:
            return None
        traced = trace(
            plain.history,
            None,
            Growth(),
            self.client_ids,
            self.metrics,
            in_training=self.in_training,
        )
        shown = {i: ids for i, ids in self.clients_at.items() if i in {0, *node_ids}}
        return plain_series(traced, shown)

    def _norms(self, matrices: Sequence[JSON]) -> JSON:
        """Give the two norms and the separation, in every round in which they were measured."""
        at_splits = {(m["node"], m["round"]): m for m in matrices}
        points: dict[int, dict[int, list[float | None]]] = {i: {} for i in self._largest_nodes()}
        for entry in self.history:
            for decision in entry.record.decisions:
                if "mean_norm" not in decision.measurements or decision.node_id not in points:
                    continue
                split = at_splits.get((decision.node_id, decision.round), {})
                told = decision.measurements.get
                points[decision.node_id][decision.round] = [
                    told("mean_norm"),
                    told("max_norm"),
                    told("separation_gap", told("gap", split.get("gap"))),
                    told("cross_similarity", split.get("cross")),
                ]
        num_lines = max((len(entry.record.cluster_sizes) for entry in self.history), default=1)
        most = MOST_NORM_NUMBERS // (5 * min(max(1, num_lines), MOST_LINES))
        norms: JSON = {}
        for node_id, by_round in points.items():
            if by_round:
                examined = {r for r, p in by_round.items() if p[2] is not None or p[3] is not None}
                rounds = thinned(sorted(by_round), examined, min(MOST_POINTS, most))
                columns = zip(*(by_round[r] for r in rounds), strict=True)
                lines = dict(zip(("mean", "max", "gap", "cross"), columns, strict=True))
                norms[str(node_id)] = {
                    "rounds": rounds,
                    **{k: numbers(v) for k, v in lines.items()},
                }
        return norms

    def _truth(self) -> JSON | None:
        """Hold the clusters against the true groups."""
        placed = {i: leaf for i, leaf in self._placed().items() if i in self.groups}
        if not placed:
            return None
        leaf_ids = self.leaf_ids
        count = Counter((self.groups[i], leaf) for i, leaf in placed.items())
        groups = sorted({self.groups[i] for i in placed}, key=natural_order)
        if len(groups) * len(leaf_ids) > MOST_COUNTS:
            groups, leaf_ids = [], []  # no table that anybody could read
        return {
            "ari": self._ari(placed),
            "groups": groups,
            "leaves": leaf_ids,
            "counts": [[count[group, leaf] for leaf in leaf_ids] for group in groups],
        }

    def _placed(self) -> dict[str, int]:
        """Give the leaf of every client that is at one; others are still on their way down."""
        leaf_ids = set(self.leaf_ids)
        return {i: node for i, node in self.growth.positions.items() if node in leaf_ids}

    def _ari(self, positions: Mapping[str, int]) -> float | None:
        known = sorted(i for i in positions if i in self.groups)
        if not known:
            return None
        from sklearn.metrics import adjusted_rand_score  # a second to load

        true, found = [self.groups[i] for i in known], [positions[i] for i in known]
        ari = float(adjusted_rand_score(true, found))
        # Of many clients a few may be wrong and the index still round to 1, which says: exactly.
        return 1.0 if ari == 1 else min(float(f"{ari:.4g}"), 0.9999)


def _of_those_who_stayed(
    history: Sequence[Round], last: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Leave out the clients that left: what they reported then says nothing about the end."""
    _, left = comings_and_goings(history)
    return {name: {i: v for i, v in of.items() if i not in left} for name, of in last.items()}


def _num_clusters(history: Sequence[Round]) -> int:
    """Count the clusters that have clients."""
    sizes = history[-1].record.cluster_sizes if history else {}
    return sum(size > 0 for size in sizes.values())


def _distinct_names(folders: Sequence[RunFolder]) -> list[str]:
    """Name runs after their folders; of equal names, the second gets a 2."""
    names: list[str] = []
    count: Counter[str] = Counter()
    for folder in folders:
        name = folder.path.resolve().name
        count[name] += 1
        names.append(name if count[name] == 1 else f"{name} ({count[name]})")
    return names
